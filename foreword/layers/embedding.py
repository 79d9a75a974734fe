"""Token embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from foreword.kernels.ops import Ops

__all__ = ["Embedding"]


class Embedding:
    """Rows of `weight` [V, H], times `scale` (rounded to the weight's type, as Gemma was trained)."""

    def __init__(self, ops: Ops, weight: Tensor, scale: float = 1.0) -> None:
        self._ops = ops
        self.weight = weight
        self._scale = torch.tensor(scale, dtype=weight.dtype).item()

    def __call__(self, ids: Tensor) -> Tensor:
        """int64 [T] -> [T, H]"""
        x = self._ops.embedding(ids, self.weight)
        return x if self._scale == 1.0 else x * self._scale
