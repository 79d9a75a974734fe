"""How checkpoints store a quantized matrix [N, K], and its conversion to a matrix of kernels/ops.py.

A scheme names the tensors of a matrix by their suffixes after the module's name. Values keep the file's bits:
they are moved, never rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from foreword.kernels.ops import Float8Blocks, GroupedInts

FLOATS = ("F32", "BF16", "F16")
WORD_BITS = 32
INT_BLOCK = 32  # columns: a group holds a multiple of them, or the whole row
MAX_SCALE = 1e30  # products of a scale and a value stay finite
CHUNK = 64  # words of a row that are transposed at once: their temporaries stay in the cache


class SchemeError(Exception):
    """A tensor that does not hold what its scheme demands."""

    def __init__(self, suffix: str, problem: str) -> None:
        super().__init__(problem)
        self.suffix = suffix


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a matrix as the file must hold it."""

    dtypes: tuple[str, ...]  # names in safetensors
    shapes: tuple[tuple[int, ...], ...]  # one of these
    optional: bool = False


class Scheme(Protocol):
    """How a matrix is stored."""

    @property
    def values(self) -> str:
        """Suffix of the tensor of values."""

    @property
    def bits(self) -> int:
        """Bits of a value in memory."""

    def num_groups(self, columns: int) -> int:
        """Groups of values of a row that share a scale in memory. Raises SchemeError."""

    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        """The tensors by suffix. Raises SchemeError for sizes that cannot be stored or computed."""

    def matrix(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> GroupedInts | Float8Blocks:
        """Raises SchemeError for contents that are not valid."""


@dataclass(frozen=True, slots=True)
class GroupedScheme:
    """Integers in groups along K that share a scale and a zero."""

    bits: int
    group_size: int | None  # values; None: a row is one group

    def num_groups(self, columns: int) -> int:
        """Groups of a row. Raises SchemeError."""
        size = self.group_size or columns
        if columns % size:
            raise SchemeError(self.values, f"has {columns} columns, no multiple of the group size {size}")
        if size % INT_BLOCK and size != columns:
            raise SchemeError(self.values, f"has groups of {size} values; a multiple of {INT_BLOCK} works")
        if columns * self.bits % 8:
            raise SchemeError(self.values, f"has {columns} columns; rows must be whole bytes")
        return columns // size

    @property
    def values(self) -> str:
        return "qweight"

    def _words(self, count: int) -> int:
        """Words of `count` packed values. Raises SchemeError if the last word is not full."""
        if count * self.bits % WORD_BITS:
            raise SchemeError(self.values, f"packs {count} values; words hold {WORD_BITS // self.bits}")
        return count * self.bits // WORD_BITS

    def _grouped(
        self, values: Tensor, scales: Tensor, zeros: Tensor, columns: int, order: Tensor | None = None
    ) -> GroupedInts:
        return GroupedInts(self.bits, self.group_size or columns, values, scales, zeros, order)


def scale_shapes(rows: int, groups: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of scales: of groups, of rows, or of the whole matrix."""
    return ((rows, groups),) if groups > 1 else ((rows, 1), (rows,), (1,), (), (1, 1))


def read_scales(tensors: Mapping[str, Tensor], suffix: str) -> Tensor:
    """float32, checked."""
    scales = tensors[suffix].to(torch.float32)
    largest = float(scales.abs().amax())
    if not largest <= MAX_SCALE:
        raise SchemeError(suffix, f"holds {largest:g}; scales must be finite and at most {MAX_SCALE:g}")
    if largest == 0:
        raise SchemeError(suffix, "holds nothing but zeros")
    return scales


def expand_scales(
    tensors: Mapping[str, Tensor], rows: int, groups: int, suffix: str = "weight_scale"
) -> Tensor:
    """float32 [N, K / G], from any of scale_shapes()."""
    return read_scales(tensors, suffix).reshape(-1, groups).expand(rows, groups).contiguous()


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 [A, B] -> uint8 [A, B * 32 / bits], lowest bits first."""
    data = words.contiguous().view(torch.uint8)
    return torch.stack((data & 15, data >> 4), -1).flatten(1) if bits == 4 else data
