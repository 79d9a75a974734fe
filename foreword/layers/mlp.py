"""The gated feed-forward layer."""

from __future__ import annotations

from torch import Tensor

from foreword.layers.linear import Linear


class MLP:
    """down(activation(gate(x)) * up(x)), with gate and up fused."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = activation

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, H] -> [T, H], plus `residual` [T, H]"""
        return self._down(self._gate_up.gated_act(x, self._activation), residual)
