"""DistilBERT."""

from __future__ import annotations

from types import MappingProxyType

from torch import Tensor
from torch.nn import functional as F

from foreword.encoders.base import Encoder, EncoderConfig, Head, Rows
from foreword.encoders.options import read_activation, read_score, skip_without_influence
from foreword.encoders.parts import Attention, Dense, FeedForward, LayerNorm, PostNormLayer, ScoreHead, Table, words
from foreword.layers.weights import Weights
from foreword.models.common import MAX_LAYERS, MAX_WIDTH
from foreword.models.config import ConfigReader

__all__ = ["DistilBert"]

EPS = 1e-12
INITIAL = ("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_weights_")  # matter in training alone


class DistilBert(Encoder):
    """BERT without token types, under names of its own."""

    prefix = "distilbert."
    unused = MappingProxyType({"vocab_": "head of pre-training"})

    @classmethod
    def read(cls, config: ConfigReader) -> EncoderConfig:
        """config.json of model_type `distilbert`"""
        skip_without_influence(config)
        for key in INITIAL:
            config.raw(key, None)
        hidden, heads = config.whole("dim", high=MAX_WIDTH), config.whole("n_heads")
        if hidden % heads:
            raise config.refuse("n_heads", f"{heads} does not divide dim {hidden}")
        positions = config.whole("max_position_embeddings")
        return EncoderConfig(
            architecture="distilbert",
            vocab_size=config.whole("vocab_size"),
            hidden=hidden,
            intermediate=config.whole("hidden_dim", high=MAX_WIDTH),
            layers=config.whole("n_layers", high=MAX_LAYERS),
            heads=heads,
            eps=EPS,
            activation=read_activation(config, "activation"),
            max_tokens=positions,
            positions=positions,
            score=read_score(config),
        )

    def load(self, body: Weights) -> None:
        """Build the model."""
        config, inner = self.config, body.within("embeddings.")
        self._words = words(self.ops, inner, "word_embeddings", config)
        self._positions = Table(inner, "position_embeddings", config.positions, config.hidden)
        self._norm = LayerNorm(inner, "LayerNorm", config)
        self._layers = [self._layer(body.within(f"transformer.layer.{index}.")) for index in range(config.layers)]

    def load_head(self, body: Weights, whole: Weights) -> Head:
        """Two layers."""
        hidden = self.config.hidden
        dense = Dense(self.ops, whole, hidden, {"pre_classifier": hidden})
        return ScoreHead(dense, F.relu, Dense(self.ops, whole, hidden, {"classifier": 1}))

    def forward(self, rows: Rows) -> Tensor:
        """-> [T, H]"""
        x = self._norm(self._words(rows.token_ids) + self._positions(rows.positions))
        for layer in self._layers:
            x = layer(x, rows)
        return x

    def _layer(self, weights: Weights) -> PostNormLayer:
        config = self.config
        return PostNormLayer(
            Attention(self.ops, config, weights.within("attention."), ("q_lin", "k_lin", "v_lin"), "out_lin"),
            LayerNorm(weights, "sa_layer_norm", config),
            FeedForward(self.ops, config, weights.within("ffn."), "lin1", "lin2"),
            LayerNorm(weights, "output_layer_norm", config),
        )
