"""Token embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from foreword.kernels.ops import Ops, PackedLinear


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
