"""The parts that encoders are built of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from foreword.embedding.base import EncoderConfig, VarlenBatch
from foreword.kernels.ops import Ops
from foreword.layers.embedding import Embedding
from foreword.layers.linear import Linear, load_linear
from foreword.layers.weights import Weights

__all__ = [
    "ACTIVATIONS",
    "ClassificationHead",
    "EmbeddingTable",
    "EncoderAttention",
    "EncoderFeedForward",
    "EncoderLayerNorm",
    "EncoderLinear",
    "PostNormLayer",
    "word_embeddings",
]

WEIGHT_DTYPE = "float32"  # of weights: vectors are compared, and errors of rounding would be what differs


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


def word_embeddings(ops: Ops, weights: Weights, name: str, config: EncoderConfig) -> Embedding:
    """The token embedding."""
    packed = load_linear(ops, weights, WEIGHT_DTYPE, config.hidden_size, {name: config.vocab_size})
    return Embedding(ops, packed, torch.float32)


class EmbeddingTable:
    """Rows of a small table, by number."""

    def __init__(self, weights: Weights, name: str, num_rows: int, width: int) -> None:
        self._weight = weights.tensor(f"{name}.weight", num_rows, width)

    def __call__(self, indices: Tensor) -> Tensor:
        """int64 [T] -> [T, width]"""
        return self._weight.index_select(0, indices)


class EncoderLinear:
    """y = x W^T + b; several layers that read the same input are one."""

    def __init__(
        self, ops: Ops, weights: Weights, in_features: int, out_features: Mapping[str, int], bias: bool = True
    ) -> None:
        self._linear = Linear(ops, load_linear(ops, weights, WEIGHT_DTYPE, in_features, out_features, bias))

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N]"""
        return self._linear(x)


class EncoderLayerNorm:
    """Torch takes the mean and the variance of one row after the other: bits do not depend on how many there are."""

    def __init__(self, weights: Weights, name: str, config: EncoderConfig, bias: bool = True) -> None:
        self._weight = weights.tensor(f"{name}.weight", config.hidden_size)
        self._bias = weights.tensor(f"{name}.bias", config.hidden_size) if bias else None
        self._eps = config.eps

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]"""
        return F.layer_norm(x, (x.shape[-1],), self._weight, self._bias, self._eps)


class EncoderAttention:
    """Every token of a text sees every other one.

    names    of the projections to q, k and v, in this order
    """

    def __init__(
        self, ops: Ops, config: EncoderConfig, weights: Weights, qkv_names: Sequence[str], out_name: str
    ) -> None:
        self._heads = config.num_heads
        self._qkv = EncoderLinear(
            ops, weights, config.hidden_size, dict.fromkeys(qkv_names, config.hidden_size)
        )
        self._out = EncoderLinear(ops, weights, config.hidden_size, {out_name: config.hidden_size})

    def __call__(self, x: Tensor, batch: VarlenBatch, biases: Sequence[Tensor] | None = None) -> Tensor:
        """[T, H] -> [T, H]; biases [heads, t, t] of each text are added to its scores"""
        texts = torch.split(self._qkv(x), batch.seq_lens)
        each_bias = biases if biases is not None else (None,) * len(texts)
        return self._out(
            torch.cat([self._attend(qkv, bias) for qkv, bias in zip(texts, each_bias, strict=True)])
        )

    def _attend(self, qkv: Tensor, bias: Tensor | None) -> Tensor:
        """[t, 3H] of one text -> [t, H]"""
        # A copy begins where memory is aligned, wherever in the batch the text stands: products may round by that.
        q, k, v = qkv.view(len(qkv), 3, self._heads, -1).permute(1, 2, 0, 3).contiguous().unsqueeze(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)[0].transpose(0, 1).flatten(1)


class EncoderFeedForward:
    """down(activation(up(x)))"""

    def __init__(
        self, ops: Ops, config: EncoderConfig, weights: Weights, up_name: str, down_name: str
    ) -> None:
        self._up = EncoderLinear(ops, weights, config.hidden_size, {up_name: config.intermediate_size})
        self._down = EncoderLinear(ops, weights, config.intermediate_size, {down_name: config.hidden_size})
        self._activation = ACTIVATIONS[config.activation]

    def __call__(self, x: Tensor, batch: VarlenBatch) -> Tensor:
        """[T, H] -> [T, H]"""
        return self._down(batch.map_texts(self._activation, self._up(x)))


class PostNormLayer:
    """Attention, norm, feed-forward, norm; each norm reads the sum of a branch and of what the branch read."""

    def __init__(
        self,
        attention: EncoderAttention,
        attention_norm: EncoderLayerNorm,
        mlp: EncoderFeedForward,
        mlp_norm: EncoderLayerNorm,
    ) -> None:
        self._attention = attention
        self._attention_norm = attention_norm
        self._mlp = mlp
        self._mlp_norm = mlp_norm

    def __call__(self, x: Tensor, batch: VarlenBatch, biases: Sequence[Tensor] | None = None) -> Tensor:
        """[T, H] -> [T, H]; biases as in Attention"""
        x = self._attention_norm(self._attention(x, batch, biases) + x)
        return self._mlp_norm(self._mlp(x, batch) + x)


class ClassificationHead:
    """out(activation(dense(x)))"""

    def __init__(
        self, dense: EncoderLinear, activation: Callable[[Tensor], Tensor], out: EncoderLinear
    ) -> None:
        self._dense = dense
        self._activation = activation
        self._out = out

    def __call__(self, vector: Tensor) -> Tensor:
        """[1, H] -> [1, 1]"""
        return self._out(self._activation(self._dense(vector)))
