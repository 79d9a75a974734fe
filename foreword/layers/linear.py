"""Linear layers, whose projections of the same input are fused into one, and token embedding."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from foreword.kernels.ops import Ops, PackedLinear
from foreword.layers.lora import LoraLinear
from foreword.layers.weights import Weights


class Linear:
    """y = x W^T + b, of type `dtype` (default: of x), plus the adapter of each row if there are any."""

    def __init__(
        self, ops: Ops, weight: PackedLinear, dtype: torch.dtype | None = None, lora: LoraLinear | None = None
    ) -> None:
        self._ops = ops
        self._weight = weight
        self._dtype = dtype
        self._lora = lora

    def first_rows(self, count: int) -> Linear:
        """The first outputs alone, with the same memory; there are no adapters."""
        assert self._lora is None
        return Linear(self._ops, self._ops.first_rows(self._weight, count), self._dtype)

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        """x [T, K] -> [T, N], plus `add_to` [T, N]"""
        if self._lora is None:
            return self._ops.linear(x, self._weight, self._dtype, add_to)
        y = self._lora.add(self._ops.linear(x, self._weight, self._dtype), x)
        return y if add_to is None else self._ops.add(add_to, y)

    def gated_act(self, x: Tensor, activation: str) -> Tensor:
        """x [T, K] -> activation(first half of y) * second half of y [T, N / 2]"""
        if self._lora is None:
            return self._ops.linear_gated_act(x, self._weight, activation)
        return self._ops.gated_act(self(x), activation)


def load_linear(
    ops: Ops,
    weights: Weights,
    weight_format: str,
    in_features: int,
    out_features: Mapping[str, int],
    bias: bool = False,
) -> PackedLinear:
    """Load and fuse the layers named in out_features (name -> rows), in order; see Ops.pack_linear."""
    biases: Tensor | None = None
    if bias:
        biases = torch.cat([weights.tensor(f"{name}.bias", size) for name, size in out_features.items()])
    num_rows = {f"{name}.weight": size for name, size in out_features.items()}
    with weights.weights(num_rows, in_features) as parts:
        return ops.pack_linear(parts, weight_format, biases)


class Embedding:
    """Rows of a packed weight [V, H], times `scale`, as `dtype`."""

    def __init__(self, ops: Ops, weight: PackedLinear, dtype: torch.dtype, scale: float = 1.0) -> None:
        self._ops = ops
        self._weight = weight
        self._dtype = dtype
        self._scale = scale

    def __call__(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, H]"""
        return self._ops.embedding(token_ids, self._weight, self._dtype, self._scale)
