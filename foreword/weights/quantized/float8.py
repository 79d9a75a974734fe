"""Matrices of float8 with their scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from foreword.kernels.ops import Float8Blocks
from foreword.weights.quantized.scheme import (
    FLOATS,
    SchemeError,
    StoredTensor,
    expand_scales,
    read_scales,
    scale_shapes,
)

FLOAT8_BLOCK = 128  # columns: a block holds a multiple of them, or the whole row


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
