"""Layers of vision encoders.

A tower encodes one image or tile at a time: bits cannot depend on the batch, so torch's ops suffice.
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
from foreword.models.interfaces import Precision

# Time of one multiply-add of attention, in those of linear layers: 2 in float32, 8 in bfloat16.
ATTENTION_COST_FACTOR: Final = 4
FLOAT_FORMATS = ("float32", "bfloat16", "float16")


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return (x * 1.702).sigmoid_().mul_(x)


ACTIVATION_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"gelu": F.gelu, "gelu_tanh": _gelu_tanh, "quick_gelu": _quick_gelu, "relu": F.relu, "silu": F.silu}
)
# Name in config.json -> name in ACTIVATION_FUNCTIONS.
ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {name: name for name in ACTIVATION_FUNCTIONS}
    | {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "swish": "silu"}
)


def activate(x: Tensor, activation: str) -> Tensor:
    """Computed in float32, returned in x's data type; `activation` is a name in ACTIVATION_FUNCTIONS."""
    return ACTIVATION_FUNCTIONS[activation](x.to(torch.float32)).to(x.dtype)


def unquantized_format(precision: Precision) -> str:
    """Weight format of a tower: never quantized, because its weights are few."""
    return (
        precision.linear_format
        if precision.linear_format in FLOAT_FORMATS
        else str(precision.dtype).removeprefix("torch.")
    )


def build_linear(
    ops: Ops, weights: Weights, weight_format: str, inputs: int, outputs: Mapping[str, int], bias: bool = True
) -> Linear:
    """Layers with the same input, fused; `outputs` maps their names to their numbers of outputs."""
    return Linear(ops, load_linear(ops, weights, weight_format, inputs, outputs, bias))


class VisionMLP:
    """down(activation(up(x))); `layers` maps the names of up and down to their numbers of outputs."""

    def __init__(
        self,
        ops: Ops,
        weights: Weights,
        weight_format: str,
        inputs: int,
        layers: Mapping[str, int],
        activation: str,
        bias: bool = True,
    ) -> None:
        (up, hidden), (down, outputs) = layers.items()
        self._up = build_linear(ops, weights, weight_format, inputs, {up: hidden}, bias)
        self._down = build_linear(ops, weights, weight_format, hidden, {down: outputs}, bias)
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        """[N, K] -> [N, H]"""
        return self._down(activate(self._up(x), self._activation))


class PatchEmbedding:
    """Linear layer over the flattened patches of a tile: a convolution whose stride is its kernel size."""

    def __init__(
        self, ops: Ops, weights: Weights, weight_format: str, patch_size: int, hidden_size: int, bias: bool
    ) -> None:
        matrix = weights.tensor("weight", hidden_size, 3, patch_size, patch_size).flatten(1)
        packed_bias = weights.tensor("bias", hidden_size) if bias else None
        self._linear = Linear(ops, ops.pack_linear([matrix], weight_format, packed_bias))
        self._patch_size = patch_size

    def __call__(self, tile: Tensor) -> Tensor:
        """[3, height, width] -> [rows * columns, H]; partial patches at the edges are cut off"""
        size = self._patch_size
        rows, columns = tile.shape[1] // size, tile.shape[2] // size
        cropped = tile[:, : rows * size, : columns * size]
        patches = cropped.reshape(3, rows, size, columns, size).permute(1, 3, 0, 2, 4)
        return self._linear(patches.reshape(rows * columns, -1))
