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


class LayerNorm:
    """torch's layer norm in float32: it reduces each row alone, so it is row-invariant."""

    def __init__(self, weights: Weights, name: str, size: int, eps: float, bias: bool = True) -> None:
        self._weight = weights.tensor(f"{name}.weight", size)
        self._bias = weights.tensor(f"{name}.bias", size) if bias else None
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H] of x's data type"""
        y = F.layer_norm(x.to(torch.float32), self._weight.shape, self._weight, self._bias, self._eps)
        return y.to(x.dtype)
