"""Per-layer embeddings (Gemma 3n, Gemma 4): an input of each layer beside the residual stream."""

from __future__ import annotations

from torch import Tensor

from foreword.kernels.ops import Ops
from foreword.layers.linear import Embedding, Linear
from foreword.layers.norm import RMSNorm


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


class PerLayerInput:
    """Adds norm(projection(gelu(gate(x)) * input)) to x, with the input of this layer, then scales."""

    def __init__(
        self, ops: Ops, gate: Linear, projection: Linear, norm: RMSNorm, columns: slice, scale: float
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
