"""Layers of text encoders. Weights are float32, because rounding errors would blur comparisons of vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from foreword.embedding.encoder import ACTIVATIONS, EncoderConfig, VarlenBatch
from foreword.kernels.ops import Ops
from foreword.layers.linear import Embedding, Linear, load_linear
from foreword.layers.norm import EncoderLayerNorm
from foreword.layers.weights import Weights

WEIGHT_FORMAT = "float32"


def word_embeddings(ops: Ops, weights: Weights, name: str, config: EncoderConfig) -> Embedding:
    """The token embedding."""
    packed = load_linear(ops, weights, WEIGHT_FORMAT, config.hidden_size, {name: config.vocab_size})
    return Embedding(ops, packed, torch.float32)


def encoder_linear(
    ops: Ops, weights: Weights, in_features: int, out_features: Mapping[str, int], bias: bool = True
) -> Linear:
    """Layers that read the same input, fused into one; `out_features` maps their names to rows."""
    return Linear(ops, load_linear(ops, weights, WEIGHT_FORMAT, in_features, out_features, bias))


class EmbeddingTable:
    """A small table of rows."""

    def __init__(self, weights: Weights, name: str, num_rows: int, width: int) -> None:
        self._weight = weights.tensor(f"{name}.weight", num_rows, width)

    def __call__(self, indices: Tensor) -> Tensor:
        """int64 [T] -> [T, width]"""
        return self._weight.index_select(0, indices)


class EncoderAttention:
    """Bidirectional attention within each text."""

    def __init__(
        self, ops: Ops, config: EncoderConfig, weights: Weights, qkv_names: Sequence[str], out_name: str
    ) -> None:
        hidden = config.hidden_size
        self._heads = config.num_heads
        self._qkv = encoder_linear(ops, weights, hidden, dict.fromkeys(qkv_names, hidden))
        self._out = encoder_linear(ops, weights, hidden, {out_name: hidden})

    def __call__(self, x: Tensor, batch: VarlenBatch, biases: Sequence[Tensor] | None = None) -> Tensor:
        """[T, H] -> [T, H]; biases [heads, t, t] of each text are added to its scores"""
        texts = torch.split(self._qkv(x), batch.seq_lens)
        each_bias = biases if biases is not None else (None,) * len(texts)
        attended = [self._attend(qkv, bias) for qkv, bias in zip(texts, each_bias, strict=True)]
        return self._out(torch.cat(attended))

    def _attend(self, qkv: Tensor, bias: Tensor | None) -> Tensor:
        """[t, 3H] of one text -> [t, H]"""
        # The copy is aligned, wherever the text is in the batch: rounding may depend on alignment.
        q, k, v = qkv.view(len(qkv), 3, self._heads, -1).permute(1, 2, 0, 3).contiguous().unsqueeze(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)[0].transpose(0, 1).flatten(1)


class EncoderFeedForward:
    """down(activation(up(x)))"""

    def __init__(
        self, ops: Ops, config: EncoderConfig, weights: Weights, up_name: str, down_name: str
    ) -> None:
        self._up = encoder_linear(ops, weights, config.hidden_size, {up_name: config.intermediate_size})
        self._down = encoder_linear(ops, weights, config.intermediate_size, {down_name: config.hidden_size})
        self._activation = ACTIVATIONS[config.activation]

    def __call__(self, x: Tensor, batch: VarlenBatch) -> Tensor:
        """[T, H] -> [T, H]"""
        return self._down(batch.map_texts(self._activation, self._up(x)))


class PostNormLayer:
    """Attention and feed-forward, each with a residual connection and a norm after it."""

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
        """[T, H] -> [T, H]; biases as in EncoderAttention"""
        x = self._attention_norm(self._attention(x, batch, biases) + x)
        return self._mlp_norm(self._mlp(x, batch) + x)


class ClassificationHead:
    """out(activation(dense(x)))"""

    def __init__(self, dense: Linear, activation: Callable[[Tensor], Tensor], out: Linear) -> None:
        self._dense = dense
        self._activation = activation
        self._out = out

    def __call__(self, vector: Tensor) -> Tensor:
        """[1, H] -> [1, 1]"""
        return self._out(self._activation(self._dense(vector)))
