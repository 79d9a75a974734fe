"""ModernBERT: rotary positions, pre-norm layers, full and sliding-window attention."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from foreword.embedding.encoder import (
    ACTIVATIONS,
    EncoderConfig,
    RankerHead,
    TextEncoder,
    VarlenBatch,
    ignore_unused,
    read_activation,
    read_score_activation,
)
from foreword.embedding.encoder_layers import encoder_linear, word_embeddings
from foreword.kernels.ops import Ops
from foreword.layers.norm import EncoderLayerNorm
from foreword.layers.rope import Rope, RopeConfig
from foreword.layers.weights import Weights
from foreword.models.decoder_config import ACTIVATIONS as GATED_ACTIVATIONS
from foreword.models.decoder_config import LAYER_TYPES, MAX_HIDDEN_SIZE, MAX_LAYERS
from foreword.weights.config_reader import ConfigReader, read_vocab_size

FULL, SLIDING = LAYER_TYPES
ROPE_THETA_KEYS = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}
QUERY_BLOCK = 256  # queries computed together
IGNORED_OPTIONS = (
    *("classifier_dropout", "cls_token_id", "decoder_bias", "deterministic_flash_attn"),
    *("embedding_dropout", "initializer_cutoff_factor", "mlp_dropout", "reference_compile"),
    *("repad_logits_with_grad", "sep_token_id", "sparse_pred_ignore_index", "sparse_prediction"),
)


@dataclass(frozen=True, slots=True)
class ModernBertConfig(EncoderConfig):
    """Options of ModernBERT."""

    layer_types: tuple[str, ...] = ()  # FULL or SLIDING
    rope_thetas: tuple[tuple[str, float], ...] = ()  # (layer type, theta)
    half_window: int = 0  # attention distance of SLIDING layers to each side
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    head_activation: str = "gelu"


class ModernBert(TextEncoder):
    """No position table, no token types."""

    config: ModernBertConfig
    prefix = "model."
    unused_prefixes = MappingProxyType({"head.": "head of pre-training", "decoder.": "head of pre-training"})

    @classmethod
    def read_config(cls, config: ConfigReader) -> EncoderConfig:
        """config.json of model_type `modernbert`"""
        ignore_unused(config)
        for key in IGNORED_OPTIONS:
            config.get(key, None)
        hidden = config.get_int("hidden_size", high=MAX_HIDDEN_SIZE)
        heads = config.get_int("num_attention_heads")
        if hidden % (2 * heads):  # RoPE rotates pairs
            limit = f"{heads} must divide hidden_size {hidden} into heads of an even size"
            raise config.error("num_attention_heads", limit)
        layers = config.get_int("num_hidden_layers", high=MAX_LAYERS)
        positions = config.get_int("max_position_embeddings")
        config.require_value("position_embedding_type", "absolute")  # inherited and unused
        return ModernBertConfig(
            architecture="modernbert",
            vocab_size=read_vocab_size(config),
            hidden_size=hidden,
            intermediate_size=config.get_int("intermediate_size", high=MAX_HIDDEN_SIZE),
            num_layers=layers,
            num_heads=heads,
            eps=config.get_float("norm_eps", 1e-5),
            activation=config.get_choice("hidden_activation", GATED_ACTIVATIONS, "gelu"),
            max_tokens=positions,
            num_positions=positions,
            score_activation=read_score_activation(config),
            head_pooling=config.get_choice("classifier_pooling", ("cls", "mean"), "cls"),
            layer_types=_read_layer_types(config, layers),
            rope_thetas=_read_rope_thetas(config),
            half_window=config.get_int("local_attention", 128) // 2,
            norm_bias=config.get_bool("norm_bias", False),
            attention_bias=config.get_bool("attention_bias", False),
            mlp_bias=config.get_bool("mlp_bias", False),
            head_bias=config.get_bool("classifier_bias", False),
            head_activation=read_activation(config, "classifier_activation"),
        )

    def load(self, body: Weights) -> None:
        """Build the model."""
        config = self.config
        head_dim = config.hidden_size // config.num_heads
        self._rope_tables = {
            kind: Rope(RopeConfig("default", theta, head_dim), config.max_tokens, "cpu").cos_sin
            for kind, theta in config.rope_thetas
        }
        inner = body.prefixed("embeddings.")
        self._word_embeddings = word_embeddings(self.ops, inner, "tok_embeddings", config)
        self._norm = EncoderLayerNorm(inner, "norm", config.hidden_size, config.eps, config.norm_bias)
        self._layers = [ModernBertLayer(self.ops, config, body, index) for index in range(config.num_layers)]
        self._final_norm = EncoderLayerNorm(
            body, "final_norm", config.hidden_size, config.eps, config.norm_bias
        )

    def load_head(self, body: Weights, checkpoint: Weights) -> RankerHead:
        """A dense layer, a norm and a classifier of one class."""
        return ModernBertHead(self.ops, self.config, checkpoint)

    def forward(self, batch: VarlenBatch) -> Tensor:
        """-> [T, H]"""
        x = self._norm(self._word_embeddings(batch.token_ids))
        for layer, kind in zip(self._layers, self.config.layer_types, strict=True):
            x = layer(x, batch, self._rope_tables[kind])
        return self._final_norm(x)


class ModernBertLayer:
    """Pre-norm attention and gated feed-forward. The first layer has no attention norm."""

    def __init__(self, ops: Ops, config: ModernBertConfig, body: Weights, index: int) -> None:
        weights, hidden = body.prefixed(f"layers.{index}."), config.hidden_size
        self._ops = ops
        self._heads = config.num_heads
        self._activation = config.activation
        self._half_window = config.half_window if config.layer_types[index] == SLIDING else None
        self._attention_norm: EncoderLayerNorm | None = None
        if index:
            self._attention_norm = EncoderLayerNorm(
                weights, "attn_norm", hidden, config.eps, config.norm_bias
            )
        self._qkv = encoder_linear(ops, weights, hidden, {"attn.Wqkv": 3 * hidden}, config.attention_bias)
        self._out = encoder_linear(ops, weights, hidden, {"attn.Wo": hidden}, config.attention_bias)
        self._mlp_norm = EncoderLayerNorm(weights, "mlp_norm", hidden, config.eps, config.norm_bias)
        inner = config.intermediate_size
        self._up = encoder_linear(ops, weights, hidden, {"mlp.Wi": 2 * inner}, config.mlp_bias)
        self._down = encoder_linear(ops, weights, inner, {"mlp.Wo": hidden}, config.mlp_bias)

    def __call__(self, x: Tensor, batch: VarlenBatch, rope_table: Tensor) -> Tensor:
        """[T, H] -> [T, H]; rope_table as in Ops.rope"""
        normed = x if self._attention_norm is None else self._attention_norm(x)
        x = x + self._out(batch.map_texts(self._attend, self._rotate(self._qkv(normed), batch, rope_table)))
        return x + self._down(self._ops.gated_act(self._up(self._mlp_norm(x)), self._activation))

    def _rotate(self, qkv: Tensor, batch: VarlenBatch, rope_table: Tensor) -> Tensor:
        """[T, 3H] -> [T, 3 heads, D] with q and k rotated"""
        heads = qkv.view(len(qkv), 3 * self._heads, -1)
        rotated = self._ops.rope(heads[:, : 2 * self._heads], rope_table, batch.positions)
        return torch.cat((rotated, heads[:, 2 * self._heads :]), 1)

    def _attend(self, qkv: Tensor) -> Tensor:
        """[t, 3 heads, D] of one text -> [t, H]"""
        q, k, v = qkv.transpose(0, 1).contiguous()[None].chunk(3, 1)
        if self._half_window is None or len(qkv) <= self._half_window:
            attended = F.scaled_dot_product_attention(q, k, v)
        else:
            attended = _attend_window(q, k, v, self._half_window)
        return attended[0].transpose(0, 1).flatten(1)


class ModernBertHead:
    """out(norm(activation(dense(x))))"""

    def __init__(self, ops: Ops, config: ModernBertConfig, checkpoint: Weights) -> None:
        hidden = config.hidden_size
        self._dense = encoder_linear(ops, checkpoint, hidden, {"head.dense": hidden}, config.head_bias)
        self._activation = ACTIVATIONS[config.head_activation]
        self._norm = EncoderLayerNorm(checkpoint, "head.norm", hidden, config.eps, config.norm_bias)
        self._out = encoder_linear(ops, checkpoint, hidden, {"classifier": 1})

    def __call__(self, vector: Tensor) -> Tensor:
        """[1, H] -> [1, 1]"""
        return self._out(self._norm(self._activation(self._dense(vector))))


def _attend_window(q: Tensor, k: Tensor, v: Tensor, half_window: int) -> Tensor:
    """q, k, v [1, heads, t, D] -> the same shape; row i attends to rows i ± half_window."""
    size = q.shape[2]
    outputs = []
    for begin in range(0, size, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, size)
        first, last = max(begin - half_window, 0), min(end + half_window, size)
        distances = torch.arange(first, last)[None, :] - torch.arange(begin, end)[:, None]
        mask = distances.abs() <= half_window
        block = q[:, :, begin:end], k[:, :, first:last], v[:, :, first:last]
        outputs.append(F.scaled_dot_product_attention(*block, attn_mask=mask))
    return torch.cat(outputs, 2)


def _read_layer_types(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    every = config.get_int("global_attn_every_n_layers", 3)
    kinds = config.get_strs("layer_types", num_layers) or tuple(
        SLIDING if index % every else FULL for index in range(num_layers)
    )
    for kind in kinds:
        if kind not in LAYER_TYPES:
            raise config.error("layer_types", f"holds {kind!r}; known: {', '.join(LAYER_TYPES)}")
    return kinds


def _read_rope_thetas(config: ConfigReader) -> tuple[tuple[str, float], ...]:
    """(layer type, theta) pairs from `rope_parameters`, or from the older options."""
    nested = config.get_section("rope_parameters")
    thetas = []
    for kind, (older, default) in ROPE_THETA_KEYS.items():
        theta = config.get_float(older, default)
        parameters = nested.get_section(kind) if nested is not None else None
        if parameters is not None:
            parameters.require_value("rope_type", "default")
            theta = parameters.get_float("rope_theta", theta)
            parameters.check_all_read()
        thetas.append((kind, theta))
    if nested is not None:
        nested.check_all_read()
    return tuple(thetas)
