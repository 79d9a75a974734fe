"""Root mean square norm."""

from __future__ import annotations

from torch import Tensor

from foreword.kernels.ops import Ops

__all__ = ["RMSNorm"]


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * (weight + offset) over the last dimension. Gemma's weights have offset 1.

    weight  float32 [H]
    """

    def __init__(self, ops: Ops, weight: Tensor, eps: float, offset: float = 0.0) -> None:
        self._ops = ops
        self._weight = weight + offset
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]"""
        return self._ops.rms_norm(x, self._weight, self._eps)
