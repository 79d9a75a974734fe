"""BERT, and what shares its shape: MiniLM, BGE, E5, GTE, ..."""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

from foreword.encoders.base import Encoder, EncoderConfig, Head, Rows
from foreword.encoders.options import read_shape
from foreword.encoders.parts import Attention, Dense, FeedForward, LayerNorm, PostNormLayer, ScoreHead, Table, words
from foreword.kernels.ops import Ops
from foreword.layers.weights import Weights
from foreword.models.config import ConfigReader

__all__ = ["Bert", "bert_layer"]


class Bert(Encoder):
    """Learned positions, token types, norms behind each branch."""

    prefix = "bert."
    unused = MappingProxyType(
        {
            "cls.": "heads of pre-training",
            "pooler.": "sentence vectors do not read it",
            "embeddings.position_ids": "counted here",
        }
    )

    @classmethod
    def read(cls, config: ConfigReader) -> EncoderConfig:
        """config.json of model_type `bert`"""
        return read_shape(config, "bert")

    def load(self, body: Weights) -> None:
        """Build the model."""
        config, inner = self.config, body.within("embeddings.")
        self._words = words(self.ops, inner, "word_embeddings", config)
        self._positions = Table(inner, "position_embeddings", config.positions, config.hidden)
        self._types = Table(inner, "token_type_embeddings", config.types, config.hidden)
        self._norm = LayerNorm(inner, "LayerNorm", config)
        self._layers = [bert_layer(self.ops, config, body.within(f"encoder.layer.{index}.")) for index in range(config.layers)]

    def load_head(self, body: Weights, whole: Weights) -> Head:
        """The pooler, and a classifier of one class."""
        hidden = self.config.hidden
        pooler = Dense(self.ops, body, hidden, {"pooler.dense": hidden})
        return ScoreHead(pooler, torch.tanh, Dense(self.ops, whole, hidden, {"classifier": 1}))

    def forward(self, rows: Rows) -> Tensor:
        """-> [T, H]"""
        x = self._norm(self._words(rows.token_ids) + self._types(rows.type_ids) + self._positions(rows.positions))
        for layer in self._layers:
            x = layer(x, rows)
        return x


def bert_layer(ops: Ops, config: EncoderConfig, weights: Weights) -> PostNormLayer:
    """One layer under BERT's names."""
    return PostNormLayer(
        Attention(
            ops,
            config,
            weights.within("attention."),
            ("self.query", "self.key", "self.value"),
            "output.dense",
        ),
        LayerNorm(weights, "attention.output.LayerNorm", config),
        FeedForward(ops, config, weights, "intermediate.dense", "output.dense"),
        LayerNorm(weights, "output.LayerNorm", config),
    )
