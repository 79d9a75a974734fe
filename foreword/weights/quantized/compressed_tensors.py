"""Unpacks the integers of compressed-tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from foreword.kernels.ops import GroupedInts
from foreword.weights.quantized.scheme import (
    FLOATS,
    WORD_BITS,
    GroupedScheme,
    SchemeError,
    StoredTensor,
    expand_scales,
    scale_shapes,
    unpack_words,
)


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
