"""Weights in the layout of the native kernels, in their own huge pages."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from foreword.kernels.cpu.library import FORMAT_IDS, ExpertMatrices, Experts, Weight
from foreword.kernels.ops import Matrix, QuantizedBlocks
from foreword.utils.hugepages import HugePages

__all__ = ["CpuExperts", "CpuLinear", "PackedBlock", "Packer", "join_experts"]

DTYPE_FORMATS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True, slots=True)
class PackedBlock:
    """Rows [first_row, first_row + weight.n) of a matrix, packed in one format."""

    weight: Weight
    first_row: int
    keep_alive: tuple[Tensor, ...]  # owns the memory of `weight`


@dataclass(frozen=True, slots=True)
class CpuLinear:
    """A packed matrix [N, K]: one block, or several where a file mixes formats."""

    blocks: tuple[PackedBlock, ...]
    out_features: int
    in_features: int


@dataclass(frozen=True, slots=True)
class CpuExperts:
    """The matrices of a mixture of experts."""

    pointers: Experts
    keep_alive: tuple[object, ...]  # owns the memory of `pointers`


class Packer:
    """Packs with the threads of a CPU context (csrc/program.h)."""

    def __init__(self, library: ctypes.CDLL, cpu_context: int) -> None:
        self._library = library
        self._cpu_context = cpu_context
        self._memory = HugePages()

    def pack(self, parts: Sequence[Matrix], weight_format: str, bias: Tensor | None) -> CpuLinear:
        """See Ops.pack_linear."""
        inputs = _num_columns(parts[0])
        assert all(_num_columns(part) == inputs for part in parts)
        float_bias = None if bias is None else bias.to(torch.float32).contiguous()
        blocks = tuple(self._pack_blocks(parts, weight_format, float_bias))
        return CpuLinear(blocks, sum(block.weight.n for block in blocks), inputs)

    def _pack_blocks(
        self, parts: Sequence[Matrix], weight_format: str, bias: Tensor | None
    ) -> Iterator[PackedBlock]:
        first = 0
        for source, same_format in groupby(parts, _source_format):
            rows = np.concatenate([_row_pointers(part) for part in same_format])
            target = source if source not in DTYPE_FORMATS.values() else weight_format
            yield self._pack_block(rows, source, target, _num_columns(parts[0]), first, bias)
            first += len(rows)

    def _pack_block(
        self, row_pointers: np.ndarray, source: str, target: str, k: int, first_row: int, bias: Tensor | None
    ) -> PackedBlock:
        n = len(row_pointers)
        format_id, rows = FORMAT_IDS[target], row_pointers.ctypes.data
        tiles = self._memory.allocate(self._library.foreword_packed_bytes(format_id, n, k))
        data = tiles.data_ptr()
        self._library.foreword_pack(self._cpu_context, format_id, FORMAT_IDS[source], rows, n, k, data)
        if bias is None:
            return PackedBlock(Weight(format_id, 0, n, k, data, None), first_row, (tiles,))
        block_bias = bias[first_row : first_row + n]
        weight = Weight(format_id, 0, n, k, data, block_bias.data_ptr())
        return PackedBlock(weight, first_row, (tiles, block_bias))


def join_experts(gate_up: Sequence[CpuLinear], down: Sequence[CpuLinear]) -> CpuExperts:
    """Weights [2I, H] and [H, I] of each expert."""
    hidden, inner = gate_up[0].in_features, down[0].in_features
    assert all((matrix.out_features, matrix.in_features) == (2 * inner, hidden) for matrix in gate_up)
    assert all((matrix.out_features, matrix.in_features) == (hidden, inner) for matrix in down)
    assert len(gate_up) == len(down)
    first, second = _join_blocks(gate_up), _join_blocks(down)
    matrices = [
        ExpertMatrices(ctypes.addressof(blocks), ctypes.addressof(starts))
        for blocks, starts in (first, second)
    ]
    keep_alive = (first, second, tuple(gate_up), tuple(down))
    return CpuExperts(Experts(len(down), hidden, inner, *matrices), keep_alive)


def _join_blocks(
    matrices: Sequence[CpuLinear],
) -> tuple[ctypes.Array[Weight], ctypes.Array[ctypes.c_int64]]:
    """The blocks of all matrices, and where those of each begin."""
    blocks = [block.weight for matrix in matrices for block in matrix.blocks]
    starts = np.cumsum([0, *(len(matrix.blocks) for matrix in matrices)]).tolist()
    return (Weight * len(blocks))(*blocks), (ctypes.c_int64 * len(starts))(*starts)


def _num_columns(part: Matrix) -> int:
    return part.columns if isinstance(part, QuantizedBlocks) else part.shape[1]


def _source_format(part: Matrix) -> str:
    return part.format if isinstance(part, QuantizedBlocks) else DTYPE_FORMATS[part.dtype]


def _row_pointers(part: Matrix) -> np.ndarray:
    """uint64 [N]: address of each row."""
    data = part.data if isinstance(part, QuantizedBlocks) else part
    assert data.device.type == "cpu" and (data.stride(1) == 1 or data.shape[1] == 1)
    stride = data.stride(0) * data.itemsize
    return data.data_ptr() + np.arange(data.shape[0], dtype=np.uint64) * np.uint64(stride)
