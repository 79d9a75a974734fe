"""The parts that encoders are built of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from foreword.encoders.base import EncoderConfig, Rows
from foreword.kernels.ops import Ops
from foreword.layers.embedding import Embedding
from foreword.layers.linear import Linear, load_linear
from foreword.layers.weights import Weights

__all__ = ["ACTIVATIONS", "Attention", "Dense", "FeedForward", "LayerNorm", "PostNormLayer", "ScoreHead", "Table", "words"]

KIND = "float32"  # of weights: vectors are compared, and errors of rounding would be what differs


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "gelu": F.gelu,
        "gelu_new": _gelu_tanh,
        "gelu_pytorch_tanh": _gelu_tanh,
        "relu": F.relu,
        "silu": F.silu,
        "swish": F.silu,
    }
)


def words(ops: Ops, weights: Weights, name: str, config: EncoderConfig) -> Embedding:
    """The token embedding."""
    packed = load_linear(ops, weights, KIND, config.hidden, {name: config.vocab_size})
    return Embedding(ops, packed, torch.float32)


class Table:
    """Rows of a small table, by number."""

    def __init__(self, weights: Weights, name: str, rows: int, width: int) -> None:
        self._rows = weights.take(f"{name}.weight", rows, width)

    def __call__(self, numbers: Tensor) -> Tensor:
        """int64 [T] -> [T, width]"""
        return self._rows.index_select(0, numbers)


class Dense:
    """y = x W^T + b; several layers that read the same input are one."""

    def __init__(self, ops: Ops, weights: Weights, inputs: int, outputs: Mapping[str, int], bias: bool = True) -> None:
        self._linear = Linear(ops, load_linear(ops, weights, KIND, inputs, outputs, bias))

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N]"""
        return self._linear(x)


class LayerNorm:
    """Torch takes the mean and the variance of one row after the other: bits do not depend on how many there are."""

    def __init__(self, weights: Weights, name: str, config: EncoderConfig, bias: bool = True) -> None:
        self._weight = weights.take(f"{name}.weight", config.hidden)
        self._bias = weights.take(f"{name}.bias", config.hidden) if bias else None
        self._eps = config.eps

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]"""
        return F.layer_norm(x, (x.shape[-1],), self._weight, self._bias, self._eps)


class Attention:
    """Every token of a text sees every other one.

    names    of the projections to q, k and v, in this order
    """

    def __init__(self, ops: Ops, config: EncoderConfig, weights: Weights, names: Sequence[str], out: str) -> None:
        self._heads = config.heads
        self._qkv = Dense(ops, weights, config.hidden, dict.fromkeys(names, config.hidden))
        self._out = Dense(ops, weights, config.hidden, {out: config.hidden})

    def __call__(self, x: Tensor, rows: Rows, biases: Sequence[Tensor] | None = None) -> Tensor:
        """[T, H] -> [T, H]; biases [heads, t, t] of each text are added to its scores"""
        texts = torch.split(self._qkv(x), rows.sizes)
        each_bias = biases if biases is not None else (None,) * len(texts)
        return self._out(torch.cat([self._attend(qkv, bias) for qkv, bias in zip(texts, each_bias, strict=True)]))

    def _attend(self, qkv: Tensor, bias: Tensor | None) -> Tensor:
        """[t, 3H] of one text -> [t, H]"""
        # A copy begins where memory is aligned, wherever in the batch the text stands: products may round by that.
        q, k, v = qkv.view(len(qkv), 3, self._heads, -1).permute(1, 2, 0, 3).contiguous().unsqueeze(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)[0].transpose(0, 1).flatten(1)


class FeedForward:
    """down(activation(up(x)))"""

    def __init__(self, ops: Ops, config: EncoderConfig, weights: Weights, up: str, down: str) -> None:
        self._up = Dense(ops, weights, config.hidden, {up: config.intermediate})
        self._down = Dense(ops, weights, config.intermediate, {down: config.hidden})
        self._activation = ACTIVATIONS[config.activation]

    def __call__(self, x: Tensor, rows: Rows) -> Tensor:
        """[T, H] -> [T, H]"""
        return self._down(rows.each(self._activation, self._up(x)))


class PostNormLayer:
    """Attention, norm, feed-forward, norm; each norm reads the sum of a branch and of what the branch read."""

    def __init__(self, attention: Attention, attention_norm: LayerNorm, mlp: FeedForward, mlp_norm: LayerNorm) -> None:
        self._attention = attention
        self._attention_norm = attention_norm
        self._mlp = mlp
        self._mlp_norm = mlp_norm

    def __call__(self, x: Tensor, rows: Rows, biases: Sequence[Tensor] | None = None) -> Tensor:
        """[T, H] -> [T, H]; biases as in Attention"""
        x = self._attention_norm(self._attention(x, rows, biases) + x)
        return self._mlp_norm(self._mlp(x, rows) + x)


class ScoreHead:
    """out(activation(dense(x)))"""

    def __init__(self, dense: Dense, activation: Callable[[Tensor], Tensor], out: Dense) -> None:
        self._dense = dense
        self._activation = activation
        self._out = out

    def __call__(self, vector: Tensor) -> Tensor:
        """[1, H] -> [1, 1]"""
        return self._out(self._activation(self._dense(vector)))
