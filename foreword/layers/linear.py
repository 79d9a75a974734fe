"""Linear layers; those that read the same input are fused into one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from foreword.kernels.ops import Ops
from foreword.layers.weights import Weights

__all__ = ["Linear", "load_linear"]


class Linear:
    """y = x W^T + b; weight [N, K], bias [N]."""

    def __init__(self, ops: Ops, weight: Tensor, bias: Tensor | None = None) -> None:
        self._ops = ops
        self._packed = ops.pack_linear(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]"""
        return self._ops.linear(x, self._packed)


def load_linear(ops: Ops, weights: Weights, inputs: int, outputs: Mapping[str, int], bias: bool = False) -> Linear:
    """The layers of these names and numbers of outputs as one, in this order."""
    weight = weights.take_rows({f"{name}.weight": size for name, size in outputs.items()}, inputs)
    return Linear(ops, weight, weights.take_rows({f"{name}.bias": size for name, size in outputs.items()}) if bias else None)
