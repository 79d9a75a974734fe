"""MPNet: scores of attention get a bias by how far apart two tokens are."""

from __future__ import annotations

import math
from types import MappingProxyType

import torch
from torch import Tensor

from foreword.embedding.base import EncoderConfig, RankerHead, TextEncoder, VarlenBatch
from foreword.embedding.config import read_bert_config
from foreword.embedding.layers import (
    ClassificationHead,
    EmbeddingTable,
    EncoderAttention,
    EncoderFeedForward,
    EncoderLayerNorm,
    EncoderLinear,
    PostNormLayer,
    word_embeddings,
)
from foreword.layers.weights import Weights
from foreword.models.config import ConfigReader

__all__ = ["MPNet"]

FIRST_POSITION = 2  # behind the id of padding, which is fixed
NUM_BUCKETS, MAX_DISTANCE = (
    32,
    128,
)  # of distances, half of them for either side; those beyond the farthest share one


class MPNet(TextEncoder):
    """Absolute positions and relative ones, no token types."""

    prefix = "mpnet."
    unused_prefixes = MappingProxyType(
        {
            "lm_head.": "head of pre-training",
            "pooler.": "neither vectors nor scores read it",
            "embeddings.position_ids": "counted here",
        }
    )

    @classmethod
    def read_config(cls, config: ConfigReader) -> EncoderConfig:
        """config.json of model_type `mpnet`"""
        config.require_value("relative_attention_num_buckets", NUM_BUCKETS)
        return read_bert_config(config, "mpnet", num_types=0, first_position=FIRST_POSITION)

    def load(self, body: Weights) -> None:
        """Build the model."""
        config, inner = self.config, body.prefixed("embeddings.")
        self._word_embeddings = word_embeddings(self.ops, inner, "word_embeddings", config)
        self._position_embeddings = EmbeddingTable(
            inner, "position_embeddings", config.num_positions, config.hidden_size
        )
        self._norm = EncoderLayerNorm(inner, "LayerNorm", config)
        self._relative_bias_table = EmbeddingTable(
            body, "encoder.relative_attention_bias", NUM_BUCKETS, config.num_heads
        )
        self._layers = [
            self._build_layer(body.prefixed(f"encoder.layer.{index}.")) for index in range(config.num_layers)
        ]

    def load_head(self, body: Weights, checkpoint: Weights) -> RankerHead:
        """Two layers."""
        hidden = self.config.hidden_size
        dense = EncoderLinear(self.ops, checkpoint, hidden, {"classifier.dense": hidden})
        return ClassificationHead(
            dense, torch.tanh, EncoderLinear(self.ops, checkpoint, hidden, {"classifier.out_proj": 1})
        )

    def forward(self, batch: VarlenBatch) -> Tensor:
        """-> [T, H]"""
        of_size = {size: self._relative_bias(size) for size in set(batch.seq_lens)}
        biases = [of_size[size] for size in batch.seq_lens]
        x = self._norm(self._word_embeddings(batch.token_ids) + self._position_embeddings(batch.positions))
        for layer in self._layers:
            x = layer(x, batch, biases)
        return x

    def _relative_bias(self, seq_len: int) -> Tensor:
        """[heads, size, size]: row i, column j is what i adds to the score of j."""
        distances = torch.arange(1 - seq_len, seq_len)
        by_distance = self._relative_bias_table(_relative_position_bucket(distances))
        index = torch.arange(seq_len)[None, :] - torch.arange(seq_len)[:, None] + seq_len - 1
        return by_distance[index].permute(2, 0, 1).contiguous()

    def _build_layer(self, weights: Weights) -> PostNormLayer:
        config = self.config
        return PostNormLayer(
            EncoderAttention(self.ops, config, weights.prefixed("attention.attn."), ("q", "k", "v"), "o"),
            EncoderLayerNorm(weights, "attention.LayerNorm", config),
            EncoderFeedForward(self.ops, config, weights, "intermediate.dense", "output.dense"),
            EncoderLayerNorm(weights, "output.LayerNorm", config),
        )


def _relative_position_bucket(distances: Tensor) -> Tensor:
    """Near distances have a bucket each, far ones share them on a logarithmic scale (as T5 does it)."""
    half = NUM_BUCKETS // 2
    near = half // 2
    ahead = (distances > 0).long() * half
    size = distances.abs()
    scale = torch.log(size.clamp(min=1).float() / near) / math.log(MAX_DISTANCE / near)
    far = (near + (scale * (half - near)).long()).clamp(max=half - 1)
    return ahead + torch.where(size < near, size, far)
