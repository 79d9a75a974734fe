"""MPNet: scores of attention get a bias by how far apart two tokens are."""

from __future__ import annotations

import math
from types import MappingProxyType

import torch
from torch import Tensor

from foreword.encoders.base import Encoder, EncoderConfig, Head, Rows
from foreword.encoders.options import read_shape
from foreword.encoders.parts import Attention, Dense, FeedForward, LayerNorm, PostNormLayer, ScoreHead, Table, words
from foreword.layers.weights import Weights
from foreword.models.config import ConfigReader

__all__ = ["MPNet"]

FIRST_POSITION = 2  # behind the id of padding, which is fixed
BUCKETS, FARTHEST = 32, 128  # of distances, half of them for either side; those beyond the farthest share one


class MPNet(Encoder):
    """Absolute positions and relative ones, no token types."""

    prefix = "mpnet."
    unused = MappingProxyType(
        {
            "lm_head.": "head of pre-training",
            "pooler.": "neither vectors nor scores read it",
            "embeddings.position_ids": "counted here",
        }
    )

    @classmethod
    def read(cls, config: ConfigReader) -> EncoderConfig:
        """config.json of model_type `mpnet`"""
        config.expect("relative_attention_num_buckets", BUCKETS)
        return read_shape(config, "mpnet", types=0, first_position=FIRST_POSITION)

    def load(self, body: Weights) -> None:
        """Build the model."""
        config, inner = self.config, body.within("embeddings.")
        self._words = words(self.ops, inner, "word_embeddings", config)
        self._positions = Table(inner, "position_embeddings", config.positions, config.hidden)
        self._norm = LayerNorm(inner, "LayerNorm", config)
        self._biases = Table(body, "encoder.relative_attention_bias", BUCKETS, config.heads)
        self._layers = [self._layer(body.within(f"encoder.layer.{index}.")) for index in range(config.layers)]

    def load_head(self, body: Weights, whole: Weights) -> Head:
        """Two layers."""
        hidden = self.config.hidden
        dense = Dense(self.ops, whole, hidden, {"classifier.dense": hidden})
        return ScoreHead(dense, torch.tanh, Dense(self.ops, whole, hidden, {"classifier.out_proj": 1}))

    def forward(self, rows: Rows) -> Tensor:
        """-> [T, H]"""
        of_size = {size: self._bias(size) for size in set(rows.sizes)}
        biases = [of_size[size] for size in rows.sizes]
        x = self._norm(self._words(rows.token_ids) + self._positions(rows.positions))
        for layer in self._layers:
            x = layer(x, rows, biases)
        return x

    def _bias(self, size: int) -> Tensor:
        """[heads, size, size]: row i, column j is what i adds to the score of j."""
        distances = torch.arange(1 - size, size)
        by_distance = self._biases(_bucket(distances))
        index = torch.arange(size)[None, :] - torch.arange(size)[:, None] + size - 1
        return by_distance[index].permute(2, 0, 1).contiguous()

    def _layer(self, weights: Weights) -> PostNormLayer:
        config = self.config
        return PostNormLayer(
            Attention(self.ops, config, weights.within("attention.attn."), ("q", "k", "v"), "o"),
            LayerNorm(weights, "attention.LayerNorm", config),
            FeedForward(self.ops, config, weights, "intermediate.dense", "output.dense"),
            LayerNorm(weights, "output.LayerNorm", config),
        )


def _bucket(distances: Tensor) -> Tensor:
    """Near distances have a bucket each, far ones share them on a logarithmic scale (as T5 does it)."""
    half = BUCKETS // 2
    near = half // 2
    ahead = (distances > 0).long() * half
    size = distances.abs()
    scale = torch.log(size.clamp(min=1).float() / near) / math.log(FARTHEST / near)
    far = (near + (scale * (half - near)).long()).clamp(max=half - 1)
    return ahead + torch.where(size < near, size, far)
