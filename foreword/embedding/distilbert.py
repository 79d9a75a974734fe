"""DistilBERT."""

from __future__ import annotations

from types import MappingProxyType

from torch import Tensor
from torch.nn import functional as F

from foreword.embedding.base import EncoderConfig, RankerHead, TextEncoder, VarlenBatch
from foreword.embedding.config import ignore_unused, read_activation, read_score_activation
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
from foreword.models.common import MAX_HIDDEN_SIZE, MAX_LAYERS
from foreword.models.config import ConfigReader

__all__ = ["DistilBert"]

EPS = 1e-12
TRAINING_OPTIONS = (
    "sinusoidal_pos_embds",
    "qa_dropout",
    "seq_classif_dropout",
    "tie_weights_",
)  # matter in training alone


class DistilBert(TextEncoder):
    """BERT without token types, under names of its own."""

    prefix = "distilbert."
    unused_prefixes = MappingProxyType({"vocab_": "head of pre-training"})

    @classmethod
    def read_config(cls, config: ConfigReader) -> EncoderConfig:
        """config.json of model_type `distilbert`"""
        ignore_unused(config)
        for key in TRAINING_OPTIONS:
            config.get(key, None)
        hidden, heads = config.get_int("dim", high=MAX_HIDDEN_SIZE), config.get_int("n_heads")
        if hidden % heads:
            raise config.error("n_heads", f"{heads} does not divide dim {hidden}")
        positions = config.get_int("max_position_embeddings")
        return EncoderConfig(
            architecture="distilbert",
            vocab_size=config.get_int("vocab_size"),
            hidden_size=hidden,
            intermediate_size=config.get_int("hidden_dim", high=MAX_HIDDEN_SIZE),
            num_layers=config.get_int("n_layers", high=MAX_LAYERS),
            num_heads=heads,
            eps=EPS,
            activation=read_activation(config, "activation"),
            max_tokens=positions,
            num_positions=positions,
            score_activation=read_score_activation(config),
        )

    def load(self, body: Weights) -> None:
        """Build the model."""
        config, inner = self.config, body.prefixed("embeddings.")
        self._word_embeddings = word_embeddings(self.ops, inner, "word_embeddings", config)
        self._position_embeddings = EmbeddingTable(
            inner, "position_embeddings", config.num_positions, config.hidden_size
        )
        self._norm = EncoderLayerNorm(inner, "LayerNorm", config)
        self._layers = [
            self._build_layer(body.prefixed(f"transformer.layer.{index}."))
            for index in range(config.num_layers)
        ]

    def load_head(self, body: Weights, checkpoint: Weights) -> RankerHead:
        """Two layers."""
        hidden = self.config.hidden_size
        dense = EncoderLinear(self.ops, checkpoint, hidden, {"pre_classifier": hidden})
        return ClassificationHead(
            dense, F.relu, EncoderLinear(self.ops, checkpoint, hidden, {"classifier": 1})
        )

    def forward(self, batch: VarlenBatch) -> Tensor:
        """-> [T, H]"""
        x = self._norm(self._word_embeddings(batch.token_ids) + self._position_embeddings(batch.positions))
        for layer in self._layers:
            x = layer(x, batch)
        return x

    def _build_layer(self, weights: Weights) -> PostNormLayer:
        config = self.config
        return PostNormLayer(
            EncoderAttention(
                self.ops, config, weights.prefixed("attention."), ("q_lin", "k_lin", "v_lin"), "out_lin"
            ),
            EncoderLayerNorm(weights, "sa_layer_norm", config),
            EncoderFeedForward(self.ops, config, weights.prefixed("ffn."), "lin1", "lin2"),
            EncoderLayerNorm(weights, "output_layer_norm", config),
        )
