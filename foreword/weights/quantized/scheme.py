"""How quantized checkpoints store a matrix [N, K], and its conversion for kernels/ops.py.

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
FLOAT8_BLOCK = 128  # columns: a block holds a multiple of them, or the whole row


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


@dataclass(frozen=True, slots=True)
class PackedInts(GroupedScheme):
    """compressed-tensors' pack-quantized: words of values + 2^(bits - 1) along K, and of zeros along N."""

    symmetric: bool

    @property
    def values(self) -> str:
        return "weight_packed"

    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        groups = self.num_groups(columns)
        stored = {
            "weight_packed": StoredTensor(("I32",), ((rows, -(-columns * self.bits // WORD_BITS)),)),
            "weight_scale": StoredTensor(FLOATS, scale_shapes(rows, groups)),
            "weight_shape": StoredTensor(("I64", "I32"), ((2,),), optional=True),
        }
        if not self.symmetric:
            words = -(-rows * self.bits // WORD_BITS)
            stored["weight_zero_point"] = StoredTensor(("I32",), ((words, groups),))
        return stored

    def matrix(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> GroupedInts:
        if "weight_shape" in tensors and tensors["weight_shape"].tolist() != [rows, columns]:
            shape = tensors["weight_shape"].tolist()
            raise SchemeError("weight_shape", f"says {shape}; the config says {[rows, columns]}")
        values = tensors["weight_packed"].view(torch.uint8)[:, : columns * self.bits // 8]
        groups = self.num_groups(columns)
        if self.symmetric:
            zeros = _constant_zeros(1 << self.bits - 1, rows, groups, values)
        else:
            packed = tensors["weight_zero_point"].t().contiguous()
            zeros = unpack_words(packed, self.bits)[:, :rows].t().contiguous()
        return self._grouped(values, expand_scales(tensors, rows, groups), zeros, columns)


@dataclass(frozen=True, slots=True)
class PlainInts(GroupedScheme):
    """compressed-tensors' int-quantized: int8 values and zeros."""

    symmetric: bool

    @property
    def values(self) -> str:
        return "weight"

    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        groups = self.num_groups(columns)
        stored = {
            "weight": StoredTensor(("I8",), ((rows, columns),)),
            "weight_scale": StoredTensor(FLOATS, scale_shapes(rows, groups)),
        }
        if not self.symmetric:
            stored["weight_zero_point"] = StoredTensor(("I8",), scale_shapes(rows, groups))
        return stored

    def matrix(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> GroupedInts:
        values = tensors["weight"].view(torch.uint8) ^ 128
        groups = self.num_groups(columns)
        zeros = _constant_zeros(128, rows, groups, values)
        if not self.symmetric:
            zeros ^= tensors["weight_zero_point"].view(torch.uint8).reshape(-1, groups)
        return self._grouped(values, expand_scales(tensors, rows, groups), zeros, columns)


def _constant_zeros(zero: int, rows: int, groups: int, values: Tensor) -> Tensor:
    """uint8 [N, K / G] beside `values`"""
    return torch.full((rows, groups), zero, dtype=torch.uint8, device=values.device)


@dataclass(frozen=True, slots=True)
class Float8:
    """float8_e4m3fn values; a scale for each block, each row, or the matrix, which becomes each row's."""

    scale: str  # suffix
    block_shape: tuple[int, int] | None  # rows and columns; None: a scale a row
    values: str = "weight"
    bits: int = 8

    def num_groups(self, columns: int) -> int:
        return 1 if self.block_shape is None else -(-columns // self.block_shape[1])

    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        if self.block_shape is None:
            shapes = scale_shapes(rows, 1)
        else:
            block_rows, block_columns = self.block_shape
            if block_columns % FLOAT8_BLOCK and block_columns < columns:
                problem = f"has blocks of {block_columns} columns; a multiple of {FLOAT8_BLOCK} works"
                raise SchemeError(self.scale, problem)
            shapes = ((-(-rows // block_rows), -(-columns // block_columns)),)
        return {
            "weight": StoredTensor(("F8_E4M3",), ((rows, columns),)),
            self.scale: StoredTensor(FLOATS, shapes),
        }

    def matrix(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> Float8Blocks:
        if self.block_shape is None:
            return Float8Blocks(tensors["weight"], expand_scales(tensors, rows, 1, self.scale), (1, columns))
        return Float8Blocks(tensors["weight"], read_scales(tensors, self.scale), self.block_shape)
