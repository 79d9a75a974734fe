"""The parts that towers are built of.

A tower sees one picture, or one tile of it, at a time: what torch computes of it depends on nothing else, so that torch's own
norms and activations are as good as the engine's, whose rows must not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from foreword.kernels.ops import Ops
from foreword.layers.linear import Linear, load_linear
from foreword.layers.weights import Weights
from foreword.models.base import Precision

__all__ = [
    "ACTIVATIONS",
    "ATTENTION_COST_FACTOR",
    "PatchEmbedding",
    "VisionLayerNorm",
    "VisionMLP",
    "activate",
    "build_linear",
    "unquantized_format",
]

ATTENTION_COST_FACTOR: Final = (
    4  # its multiply-adds take so many times as long as those of linear layers: 2 in float32, 8 in bfloat16
)
FLOAT_FORMATS = ("float32", "bfloat16", "float16")


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return (x * 1.702).sigmoid_().mul_(x)


ACTIVATION_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"gelu": F.gelu, "gelu_tanh": _gelu_tanh, "quick_gelu": _quick_gelu, "relu": F.relu, "silu": F.silu}
)
# Names in checkpoints -> ours.
ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {name: name for name in ACTIVATION_FUNCTIONS}
    | {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "swish": "silu"}
)


def activate(x: Tensor, activation: str) -> Tensor:
    """Of x's type, computed in float32; `activation` is one of ours."""
    return ACTIVATION_FUNCTIONS[activation](x.to(torch.float32)).to(x.dtype)


def unquantized_format(precision: Precision) -> str:
    """Of a tower's weights, which are not quantized: they are few, and what is not seen rightly cannot be answered rightly."""
    return (
        precision.linear_format
        if precision.linear_format in FLOAT_FORMATS
        else str(precision.dtype).removeprefix("torch.")
    )


def build_linear(
    ops: Ops, weights: Weights, weight_format: str, inputs: int, outputs: Mapping[str, int], bias: bool = True
) -> Linear:
    """The layers of these names and numbers of outputs, which read the same, as one."""
    return Linear(ops, load_linear(ops, weights, weight_format, inputs, outputs, bias))


class VisionLayerNorm:
    """Computed in float32."""

    def __init__(self, weights: Weights, name: str, size: int, eps: float) -> None:
        self._weight = weights.tensor(f"{name}.weight", size)
        self._bias = weights.tensor(f"{name}.bias", size)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[N, H] -> [N, H]"""
        return F.layer_norm(x.to(torch.float32), self._weight.shape, self._weight, self._bias, self._eps).to(
            x.dtype
        )


class VisionMLP:
    """down(activation(up(x)))"""

    def __init__(self, up: Linear, down: Linear, activation: str) -> None:
        self._up = up
        self._down = down
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        """[N, K] -> [N, H]"""
        return self._down(activate(self._up(x), self._activation))


class PatchEmbedding:
    """Squares of a tile, each as one row: a convolution whose stride is its size."""

    def __init__(
        self, ops: Ops, weights: Weights, weight_format: str, patch_size: int, hidden_size: int, bias: bool
    ) -> None:
        matrix = weights.tensor("weight", hidden_size, 3, patch_size, patch_size).flatten(1)
        self._linear = Linear(
            ops,
            ops.pack_linear([matrix], weight_format, weights.tensor("bias", hidden_size) if bias else None),
        )
        self._patch_size = patch_size

    def __call__(self, tile: Tensor) -> Tensor:
        """[3, height, width] -> [rows * columns, H]; what is left at the right and below is not seen"""
        size = self._patch_size
        rows, columns = tile.shape[1] // size, tile.shape[2] // size
        whole = tile[:, : rows * size, : columns * size]
        squares = whole.reshape(3, rows, size, columns, size).permute(1, 3, 0, 2, 4)
        return self._linear(squares.reshape(rows * columns, -1))
