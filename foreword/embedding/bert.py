"""BERT (MiniLM, BGE, E5, GTE, ...) and its variants RoBERTa, DistilBERT and MPNet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from foreword.embedding.encoder import (
    EncoderConfig,
    RankerHead,
    TextEncoder,
    VarlenBatch,
    ignore_unused,
    read_activation,
    read_score_activation,
)
from foreword.embedding.encoder_layers import (
    ClassificationHead,
    EmbeddingTable,
    EncoderAttention,
    EncoderFeedForward,
    PostNormLayer,
    encoder_linear,
    word_embeddings,
)
from foreword.layers.norm import EncoderLayerNorm
from foreword.layers.weights import Weights
from foreword.models.decoder_config import MAX_HIDDEN_SIZE, MAX_LAYERS
from foreword.weights.config_reader import ConfigReader, read_vocab_size

PRETRAINING_HEAD = "head of pre-training"
UNUSED_POOLER = "neither vectors nor scores read it"
COMPUTED_POSITIONS = "positions are computed"
DISTILBERT_EPS = 1e-12
DISTILBERT_TRAINING_OPTIONS = ("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_weights_")
MPNET_FIRST_POSITION = 2  # after the padding id, which is fixed
MPNET_BUCKETS = 32  # buckets of relative distances, half of them for each direction
MPNET_MAX_DISTANCE = 128  # larger distances share a bucket


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Tensor names of a layer."""

    prefix: str = "encoder.layer."
    attention: str = "attention."
    qkv: tuple[str, str, str] = ("self.query", "self.key", "self.value")
    out: str = "output.dense"  # after `attention`
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"


class Bert(TextEncoder):
    """Learned positions, token types, norms after each branch."""

    prefix = "bert."
    unused_prefixes = MappingProxyType(
        {
            "cls.": PRETRAINING_HEAD,
            "pooler.": "sentence vectors do not read it",
            "embeddings.position_ids": COMPUTED_POSITIONS,
        }
    )
    layer_names: ClassVar[LayerNames] = LayerNames()

    @classmethod
    def read_config(cls, config: ConfigReader) -> EncoderConfig:
        """config.json of model_type `bert`"""
        return read_bert_config(config, "bert")

    def load(self, body: Weights) -> None:
        """Build the model."""
        config, hidden, embeddings = self.config, self.config.hidden_size, body.prefixed("embeddings.")
        self._word_embeddings = word_embeddings(self.ops, embeddings, "word_embeddings", config)
        self._positions = EmbeddingTable(embeddings, "position_embeddings", config.num_positions, hidden)
        self._types: EmbeddingTable | None = None
        if config.num_types:
            self._types = EmbeddingTable(embeddings, "token_type_embeddings", config.num_types, hidden)
        self._norm = EncoderLayerNorm(embeddings, "LayerNorm", hidden, config.eps)
        prefix = self.layer_names.prefix
        self._layers = [self._build_layer(body.prefixed(f"{prefix}{i}.")) for i in range(config.num_layers)]

    def load_head(self, body: Weights, checkpoint: Weights) -> RankerHead:
        """The pooler and a classifier of one class."""
        hidden = self.config.hidden_size
        pooler = encoder_linear(self.ops, body, hidden, {"pooler.dense": hidden})
        classifier = encoder_linear(self.ops, checkpoint, hidden, {"classifier": 1})
        return ClassificationHead(pooler, torch.tanh, classifier)

    def forward(self, batch: VarlenBatch) -> Tensor:
        """-> [T, H]"""
        x = self._word_embeddings(batch.token_ids)
        if self._types is not None:
            x = x + self._types(batch.type_ids)
        x = self._norm(x + self._positions(batch.positions))
        biases = self._attention_biases(batch)
        for layer in self._layers:
            x = layer(x, batch, biases)
        return x

    def _attention_biases(self, batch: VarlenBatch) -> Sequence[Tensor] | None:
        """[heads, t, t] of each text, or None."""
        return None

    def _build_layer(self, weights: Weights) -> PostNormLayer:
        config, names, attention = self.config, self.layer_names, weights.prefixed(self.layer_names.attention)
        return PostNormLayer(
            EncoderAttention(self.ops, config, attention, names.qkv, names.out),
            EncoderLayerNorm(weights, names.attention_norm, config.hidden_size, config.eps),
            EncoderFeedForward(self.ops, config, weights, names.up, names.down),
            EncoderLayerNorm(weights, names.mlp_norm, config.hidden_size, config.eps),
        )


class Roberta(Bert):
    """RoBERTa, XLM-RoBERTa and CamemBERT (multilingual E5, BGE-M3): positions start after the padding id."""

    prefix = "roberta."
    unused_prefixes = MappingProxyType(
        {
            "lm_head.": PRETRAINING_HEAD,
            "pooler.": UNUSED_POOLER,
            "embeddings.position_ids": COMPUTED_POSITIONS,
        }
    )

    @classmethod
    def read_config(cls, config: ConfigReader) -> EncoderConfig:
        """config.json of model_type `roberta`, `xlm-roberta` or `camembert`"""
        pad_id = config.get_int("pad_token_id", 1, low=0)
        return read_bert_config(config, str(config.get("model_type")), first_position=pad_id + 1)

    def load_head(self, body: Weights, checkpoint: Weights) -> RankerHead:
        """Two layers."""
        hidden = self.config.hidden_size
        dense = encoder_linear(self.ops, checkpoint, hidden, {"classifier.dense": hidden})
        out = encoder_linear(self.ops, checkpoint, hidden, {"classifier.out_proj": 1})
        return ClassificationHead(dense, torch.tanh, out)


class DistilBert(Bert):
    """BERT without token types, with other names."""

    prefix = "distilbert."
    unused_prefixes = MappingProxyType({"vocab_": PRETRAINING_HEAD})
    layer_names = LayerNames(
        prefix="transformer.layer.",
        qkv=("q_lin", "k_lin", "v_lin"),
        out="out_lin",
        attention_norm="sa_layer_norm",
        up="ffn.lin1",
        down="ffn.lin2",
        mlp_norm="output_layer_norm",
    )

    @classmethod
    def read_config(cls, config: ConfigReader) -> EncoderConfig:
        """config.json of model_type `distilbert`"""
        ignore_unused(config)
        for key in DISTILBERT_TRAINING_OPTIONS:
            config.get(key, None)
        hidden, heads = config.get_int("dim", high=MAX_HIDDEN_SIZE), config.get_int("n_heads")
        if hidden % heads:
            raise config.error("n_heads", f"{heads} does not divide dim {hidden}")
        positions = config.get_int("max_position_embeddings")
        return EncoderConfig(
            architecture="distilbert",
            vocab_size=read_vocab_size(config),
            hidden_size=hidden,
            intermediate_size=config.get_int("hidden_dim", high=MAX_HIDDEN_SIZE),
            num_layers=config.get_int("n_layers", high=MAX_LAYERS),
            num_heads=heads,
            eps=DISTILBERT_EPS,
            activation=read_activation(config, "activation"),
            max_tokens=positions,
            num_positions=positions,
            score_activation=read_score_activation(config),
        )

    def load_head(self, body: Weights, checkpoint: Weights) -> RankerHead:
        """Two layers."""
        hidden = self.config.hidden_size
        dense = encoder_linear(self.ops, checkpoint, hidden, {"pre_classifier": hidden})
        out = encoder_linear(self.ops, checkpoint, hidden, {"classifier": 1})
        return ClassificationHead(dense, F.relu, out)


class MPNet(Roberta):
    """Absolute positions and T5's relative attention bias, no token types."""

    prefix = "mpnet."
    layer_names = LayerNames(
        attention="attention.attn.", qkv=("q", "k", "v"), out="o", attention_norm="attention.LayerNorm"
    )

    @classmethod
    def read_config(cls, config: ConfigReader) -> EncoderConfig:
        """config.json of model_type `mpnet`"""
        config.require_value("relative_attention_num_buckets", MPNET_BUCKETS)
        return read_bert_config(config, "mpnet", num_types=0, first_position=MPNET_FIRST_POSITION)

    def load(self, body: Weights) -> None:
        """Build the model."""
        super().load(body)
        heads = self.config.num_heads
        self._bias_table = EmbeddingTable(body, "encoder.relative_attention_bias", MPNET_BUCKETS, heads)

    def _attention_biases(self, batch: VarlenBatch) -> Sequence[Tensor] | None:
        by_length = {length: self._relative_bias(length) for length in set(batch.seq_lens)}
        return [by_length[length] for length in batch.seq_lens]

    def _relative_bias(self, seq_len: int) -> Tensor:
        """[heads, t, t]: bias of query row i and key column j"""
        by_distance = self._bias_table(_relative_position_bucket(torch.arange(1 - seq_len, seq_len)))
        index = torch.arange(seq_len)[None, :] - torch.arange(seq_len)[:, None] + seq_len - 1
        return by_distance[index].permute(2, 0, 1).contiguous()


def _relative_position_bucket(distances: Tensor) -> Tensor:
    """T5's buckets: one for each small distance, logarithmic for large ones."""
    half = MPNET_BUCKETS // 2
    near = half // 2
    ahead = (distances > 0).long() * half
    size = distances.abs()
    scale = torch.log(size.clamp(min=1).float() / near) / math.log(MPNET_MAX_DISTANCE / near)
    far = (near + (scale * (half - near)).long()).clamp(max=half - 1)
    return ahead + torch.where(size < near, size, far)


def read_bert_config(
    config: ConfigReader, architecture: str, *, num_types: int | None = None, first_position: int = 0
) -> EncoderConfig:
    """The config of a checkpoint with BERT's option names.

    `num_types` overrides type_vocab_size; `first_position` is the position of a text's first token.
    """
    ignore_unused(config)
    hidden, heads = config.get_int("hidden_size", high=MAX_HIDDEN_SIZE), config.get_int("num_attention_heads")
    if hidden % heads:
        raise config.error("num_attention_heads", f"{heads} does not divide hidden_size {hidden}")
    config.require_value("position_embedding_type", "absolute")
    config.require_value("is_decoder", False)
    config.require_value("add_cross_attention", False)
    positions = config.get_int("max_position_embeddings", low=first_position + 1)
    return EncoderConfig(
        architecture=architecture,
        vocab_size=read_vocab_size(config),
        hidden_size=hidden,
        intermediate_size=config.get_int("intermediate_size", high=MAX_HIDDEN_SIZE),
        num_layers=config.get_int("num_hidden_layers", high=MAX_LAYERS),
        num_heads=heads,
        eps=config.get_float("layer_norm_eps", 1e-12),
        activation=read_activation(config, "hidden_act"),
        max_tokens=positions - first_position,
        num_positions=positions,
        score_activation=read_score_activation(config),
        first_position=first_position,
        pad_id=first_position - 1 if first_position else None,
        num_types=config.get_int("type_vocab_size", 2) if num_types is None else num_types,
    )
