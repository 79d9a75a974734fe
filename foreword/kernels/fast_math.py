"""The reference without row tiles: faster for many rows, and its bits depend on the batch.

This is `--fast-math`. It is also the negative control of the exactness tests, which must notice it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from foreword.kernels.reference import ACTIVATIONS, ReferenceOps

__all__ = ["FastMathOps"]


class FastMathOps(ReferenceOps):
    """Ordinary torch on whole batches."""

    name = "fast-math"

    def __init__(self) -> None:
        super().__init__(row_tile=1)

    def gated_act(self, gate_up: Tensor, activation: str) -> Tensor:
        """gate_up [T, 2I] -> [T, I]"""
        gate, up = gate_up.chunk(2, -1)
        return ACTIVATIONS[activation](gate) * up

    def _apply_by_tile(self, operation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return operation(x)
