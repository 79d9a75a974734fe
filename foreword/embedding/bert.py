"""BERT, and what shares its shape: MiniLM, BGE, E5, GTE, ..."""

from __future__ import annotations

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
from foreword.kernels.ops import Ops
from foreword.layers.weights import Weights
from foreword.models.config import ConfigReader

__all__ = ["Bert", "build_bert_layer"]


class Bert(TextEncoder):
    """Learned positions, token types, norms behind each branch."""

    prefix = "bert."
    unused_prefixes = MappingProxyType(
        {
            "cls.": "heads of pre-training",
            "pooler.": "sentence vectors do not read it",
            "embeddings.position_ids": "counted here",
        }
    )

    @classmethod
    def read_config(cls, config: ConfigReader) -> EncoderConfig:
        """config.json of model_type `bert`"""
        return read_bert_config(config, "bert")

    def load(self, body: Weights) -> None:
        """Build the model."""
        config, inner = self.config, body.prefixed("embeddings.")
        self._word_embeddings = word_embeddings(self.ops, inner, "word_embeddings", config)
        self._position_embeddings = EmbeddingTable(
            inner, "position_embeddings", config.num_positions, config.hidden_size
        )
        self._type_embeddings = EmbeddingTable(
            inner, "token_type_embeddings", config.num_types, config.hidden_size
        )
        self._norm = EncoderLayerNorm(inner, "LayerNorm", config)
        self._layers = [
            build_bert_layer(self.ops, config, body.prefixed(f"encoder.layer.{index}."))
            for index in range(config.num_layers)
        ]

    def load_head(self, body: Weights, checkpoint: Weights) -> RankerHead:
        """The pooler, and a classifier of one class."""
        hidden = self.config.hidden_size
        pooler = EncoderLinear(self.ops, body, hidden, {"pooler.dense": hidden})
        return ClassificationHead(
            pooler, torch.tanh, EncoderLinear(self.ops, checkpoint, hidden, {"classifier": 1})
        )

    def forward(self, batch: VarlenBatch) -> Tensor:
        """-> [T, H]"""
        x = self._norm(
            self._word_embeddings(batch.token_ids)
            + self._type_embeddings(batch.type_ids)
            + self._position_embeddings(batch.positions)
        )
        for layer in self._layers:
            x = layer(x, batch)
        return x


def build_bert_layer(ops: Ops, config: EncoderConfig, weights: Weights) -> PostNormLayer:
    """One layer under BERT's names."""
    return PostNormLayer(
        EncoderAttention(
            ops,
            config,
            weights.prefixed("attention."),
            ("self.query", "self.key", "self.value"),
            "output.dense",
        ),
        EncoderLayerNorm(weights, "attention.output.LayerNorm", config),
        EncoderFeedForward(ops, config, weights, "intermediate.dense", "output.dense"),
        EncoderLayerNorm(weights, "output.LayerNorm", config),
    )
