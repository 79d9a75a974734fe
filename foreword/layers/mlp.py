"""The feed-forward layer: an MLP, gated or not, or a mixture of experts."""

from __future__ import annotations

from torch import Tensor

from foreword.kernels.ops import NO_ALPHAS, ExpertsConfig, Ops, PackedExperts
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


class UngatedMLP:
    """down(activation(up(x))); alphas as in Ops.act."""

    def __init__(
        self, ops: Ops, up: Linear, down: Linear, activation: str, alphas: tuple[float, float] = NO_ALPHAS
    ) -> None:
        self._ops = ops
        self._up = up
        self._down = down
        self._activation = activation
        self._alphas = alphas

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, H] -> [T, H], plus `residual` [T, H]"""
        return self._down(self._ops.act(self._up(x), self._activation, self._alphas), residual)


class SharedExpert:
    """The expert of every row, scaled by sigmoid(gate(x)) if there is a gate [1, H]."""

    def __init__(self, ops: Ops, mlp: MLP | UngatedMLP, gate: Linear | None) -> None:
        self._ops = ops
        self._mlp = mlp
        self._gate = gate

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """[T, H] -> [T, H], plus `residual` [T, H]"""
        if self._gate is None:
            return self._mlp(x, residual)
        y = self._ops.scale_by_sigmoid(self._mlp(x), self._gate(x))
        return y if residual is None else self._ops.add(residual, y)


class MoE:
    """The weighted sum of each row's experts, plus the shared expert; the router is float32 [E, H]."""

    def __init__(
        self,
        ops: Ops,
        config: ExpertsConfig,
        router: Linear,
        experts: PackedExperts,
        shared: SharedExpert | None = None,
    ) -> None:
        self._ops = ops
        self._config = config
        self._router = router
        self._experts = experts
        self._shared = shared

    def __call__(self, x: Tensor, residual: Tensor | None = None, router_x: Tensor | None = None) -> Tensor:
        """[T, H] -> [T, H], plus `residual` [T, H]; router_x [T, H]: input of the router, if it is not x"""
        if self._shared is not None:
            residual = self._shared(x, residual)
        logits = self._router(x if router_x is None else router_x)
        return self._ops.experts(x, logits, self._experts, self._config, residual)
