"""Triton with the matrix products of cuBLAS: `--fast-math` on a GPU. Its bits depend on the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from foreword.kernels.ops import Matrix, PackedLinear
from foreword.kernels.triton.backend import TritonOps

__all__ = ["TritonFastMath"]

UNQUANTIZED_FORMATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """matrix [N, K], bias [N] or None, both of the type of the activations."""

    matrix: Tensor
    bias: Tensor | None


class TritonFastMath(TritonOps):
    """Quantized weights stay with the kernels of TritonOps: cuBLAS has no product for them."""

    name = "triton-fast-math"

    def pack_linear(
        self, parts: Sequence[Matrix], weight_format: str, bias: Tensor | None = None
    ) -> PackedLinear:
        """Plain, if nothing is quantized"""
        tensors = [part for part in parts if isinstance(part, Tensor)]
        if weight_format not in UNQUANTIZED_FORMATS or len(tensors) < len(parts):
            return super().pack_linear(parts, weight_format, bias)
        dtype = getattr(torch, weight_format)
        return DenseWeight(
            torch.cat([part.to(dtype) for part in tensors]), None if bias is None else bias.to(dtype)
        )

    def linear(
        self, x: Tensor, weight: PackedLinear, dtype: torch.dtype | None = None, add_to: Tensor | None = None
    ) -> Tensor:
        """x [T, K] -> [T, N] of `dtype`"""
        if not isinstance(weight, DenseWeight):
            return super().linear(x, weight, dtype, add_to)
        product = F.linear(x.to(weight.matrix.dtype), weight.matrix, weight.bias).to(dtype or x.dtype)
        return product if add_to is None else add_to + product

    def linear_gated_act(self, x: Tensor, weight: PackedLinear, activation: str) -> Tensor:
        """x [T, K] -> [T, I]"""
        if not isinstance(weight, DenseWeight):
            return super().linear_gated_act(x, weight, activation)
        return self.gated_act(self.linear(x, weight), activation)

    def embedding(
        self, token_ids: Tensor, weight: PackedLinear, dtype: torch.dtype, scale: float = 1.0
    ) -> Tensor:
        """ids [T], weight [V, H] -> [T, H]"""
        if not isinstance(weight, DenseWeight):
            return super().embedding(token_ids, weight, dtype, scale)
        rows = weight.matrix.index_select(0, token_ids)
        return (rows if scale == 1.0 else rows.to(torch.float32) * scale).to(dtype)
