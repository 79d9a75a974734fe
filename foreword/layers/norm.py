"""RMS norm and layer norm."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from foreword.kernels.ops import Ops
from foreword.layers.weights import Weights


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * (weight + offset) over the last dimension; weight float32 [H].

    Gemma's weights have offset 1.
    """

    def __init__(self, ops: Ops, weight: Tensor, eps: float, offset: float = 0.0) -> None:
        self._ops = ops
        self._weight = weight + offset
        self._eps = eps

    def without_weight(self) -> RMSNorm:
        """The same norm with a weight of 1."""
        return RMSNorm(self._ops, torch.ones_like(self._weight), self._eps)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]"""
        return self._ops.rms_norm(x, self._weight, self._eps)

    def scaled(self, factor: float) -> RMSNorm:
        """The norm whose results are `factor` times as large."""
        return RMSNorm(self._ops, self._weight * factor, self._eps)


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension; weight, bias float32 [H]."""

    def __init__(self, ops: Ops, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self._ops = ops
        self._weight = weight
        self._bias = bias
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]"""
        return self._ops.layer_norm(x, self._weight, self._bias, self._eps)

    def scaled(self, factor: float) -> LayerNorm:
        """The norm whose results are `factor` times as large."""
        bias = None if self._bias is None else self._bias * factor
        return LayerNorm(self._ops, self._weight * factor, bias, self._eps)


Norm = RMSNorm | LayerNorm


class EncoderLayerNorm:
    """torch's layer norm in float32: it reduces each row alone, so it is row-invariant."""

    def __init__(self, weights: Weights, name: str, size: int, eps: float, bias: bool = True) -> None:
        self._weight = weights.tensor(f"{name}.weight", size)
        self._bias = weights.tensor(f"{name}.bias", size) if bias else None
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H] of x's data type"""
        y = F.layer_norm(x.to(torch.float32), self._weight.shape, self._weight, self._bias, self._eps)
        return y.to(x.dtype)
