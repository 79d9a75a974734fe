"""Per-layer embeddings (Gemma 3n, Gemma 4): an input of each layer beside the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor

from foreword.kernels.ops import Ops
from foreword.layers.linear import Embedding, Linear, load_linear
from foreword.layers.norm import Norm, RMSNorm
from foreword.layers.weights import Weights


class PerLayerEmbedding:
    """embedding(ids) + norm(projection(x)), [T, L * P]: P values for each of L layers, normed each."""

    def __init__(self, ops: Ops, embedding: Embedding, projection: Linear, norm: RMSNorm, size: int) -> None:
        """size  P"""
        self._ops = ops
        self._embedding = embedding
        self._projection = projection
        self._norm = norm
        self._size = size

    def __call__(self, token_ids: Tensor, x: Tensor) -> Tensor:
        """token_ids int64 [T], their embeddings x [T, H] -> [T, L * P]"""
        projected = self._projection(x)
        normed = self._norm(projected.view(x.shape[0], -1, self._size)).view(projected.shape)
        return self._ops.add(normed, self._embedding(token_ids))


def load_per_layer_embedding(
    ops: Ops,
    weights: Weights,
    dtype: torch.dtype,
    formats: tuple[str, str],
    sizes: tuple[int, int, int, int],
    eps: float,
) -> PerLayerEmbedding:
    """(sqrt(P) * embedding + norm(projection / sqrt(H))) / sqrt(2).

    dtype    activations
    formats  of the embedding and of the projection, as in Ops.pack_linear
    sizes    V, H, L and P
    """
    vocab, hidden, layers, size = sizes
    names = {"embed_tokens_per_layer": vocab}, {"per_layer_model_projection": layers * size}
    table = load_linear(ops, weights, formats[0], layers * size, names[0])
    projection = load_linear(ops, weights, formats[1], hidden, names[1])
    scale = torch.tensor(size**0.5, dtype=dtype).item() * 2**-0.5
    weight = weights.tensor("per_layer_projection_norm.weight", size) * 2**-0.5
    norm = RMSNorm(ops, weight, eps * hidden)  # as if its input were divided by sqrt(H)
    return PerLayerEmbedding(ops, Embedding(ops, table, dtype, scale), Linear(ops, projection), norm, size)


class PerLayerInput:
    """Adds norm(projection(gelu(gate(x)) * input)) to x, with the input of this layer, then scales."""

    def __init__(
        self, ops: Ops, gate: Linear, projection: Linear, norm: Norm, columns: slice, scale: float
    ) -> None:
        """columns  of this layer in PerLayerEmbedding's"""
        self._ops = ops
        self._gate = gate
        self._projection = projection
        self._norm = norm
        self._columns = columns
        self._scale = scale

    def __call__(self, x: Tensor, inputs: Tensor) -> Tensor:
        """x [T, H], inputs [T, L * P] -> [T, H]"""
        gated = self._ops.gate(inputs[:, self._columns], self._gate(x), "gelu_tanh")
        return self._ops.add(x, self._norm(self._projection(gated)), self._scale)
