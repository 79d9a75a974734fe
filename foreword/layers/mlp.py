"""The gated feed-forward layer."""

from __future__ import annotations

from torch import Tensor

from foreword.kernels.ops import Ops
from foreword.layers.linear import Linear

__all__ = ["MLP"]


class MLP:
    """down(activation(gate(x)) * up(x)); `gate_up` is both in one."""

    def __init__(self, ops: Ops, gate_up: Linear, down: Linear, activation: str) -> None:
        self._ops = ops
        self._gate_up = gate_up
        self._down = down
        self._activation = activation

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, H] -> [T, H], added to `residual` [T, H] if given"""
        return self._down(self._gate_up.gated_act(x, self._activation), residual)
