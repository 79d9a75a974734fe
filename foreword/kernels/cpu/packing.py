"""Weights laid out for the native kernels, in huge pages of their own."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from foreword.core.memory import HugePages
from foreword.kernels.cpu.library import KINDS, Weight
from foreword.kernels.ops import Blocks, Matrix

__all__ = ["CpuLinear", "Packer", "Piece"]

TENSOR_KINDS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [first, first + weight.n) of a matrix, packed as one kind. `keep` owns the memory that `weight` points to."""

    weight: Weight
    first: int
    keep: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class CpuLinear:
    """A packed matrix [outputs, inputs]: mostly one piece, or several where a file mixes kinds."""

    pieces: tuple[Piece, ...]
    outputs: int
    inputs: int


class Packer:
    """Packs with the threads of one machine (csrc/program.h)."""

    def __init__(self, library: ctypes.CDLL, machine: int) -> None:
        self._library = library
        self._machine = machine
        self._memory = HugePages()

    def pack(self, parts: Sequence[Matrix], kind: str, bias: Tensor | None) -> CpuLinear:
        """See Ops.pack_linear."""
        inputs = _columns(parts[0])
        assert all(_columns(part) == inputs for part in parts)
        wide = None if bias is None else bias.to(torch.float32).contiguous()
        pieces = tuple(self._pieces(parts, kind, wide))
        return CpuLinear(pieces, sum(piece.weight.n for piece in pieces), inputs)

    def _pieces(self, parts: Sequence[Matrix], kind: str, bias: Tensor | None) -> Iterator[Piece]:
        first = 0
        for source, run in groupby(parts, _source):
            rows = np.concatenate([_pointers(part) for part in run])
            target = source if source not in TENSOR_KINDS.values() else kind
            yield self._piece(rows, source, target, _columns(parts[0]), first, bias)
            first += len(rows)

    def _piece(self, rows: np.ndarray, source: str, kind: str, k: int, first: int, bias: Tensor | None) -> Piece:
        n = len(rows)
        tiles = self._memory.take(self._library.foreword_packed_bytes(KINDS[kind], n, k))
        self._library.foreword_pack(self._machine, KINDS[kind], KINDS[source], rows.ctypes.data, n, k, tiles.data_ptr())
        own = None if bias is None else bias[first : first + n]
        weight = Weight(KINDS[kind], 0, n, k, tiles.data_ptr(), None if own is None else own.data_ptr())
        return Piece(weight, first, (tiles,) if own is None else (tiles, own))


def _columns(part: Matrix) -> int:
    return part.columns if isinstance(part, Blocks) else part.shape[1]


def _source(part: Matrix) -> str:
    return part.kind if isinstance(part, Blocks) else TENSOR_KINDS[part.dtype]


def _pointers(part: Matrix) -> np.ndarray:
    """uint64 [N]: where each row begins."""
    data = part.data if isinstance(part, Blocks) else part
    assert data.device.type == "cpu" and (data.stride(1) == 1 or data.shape[1] == 1)
    stride = data.stride(0) * data.itemsize
    return data.data_ptr() + np.arange(data.shape[0], dtype=np.uint64) * np.uint64(stride)
