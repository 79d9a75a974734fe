"""ModernBERT: rotary positions, norms before each branch, and layers that look no farther than a window."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from foreword.encoders.base import Encoder, EncoderConfig, Head, Rows
from foreword.encoders.options import read_activation, read_score, skip_without_influence
from foreword.encoders.parts import ACTIVATIONS, Dense, LayerNorm, words
from foreword.kernels.ops import Ops
from foreword.layers.rope import Rope, RopeConfig
from foreword.layers.weights import Weights
from foreword.models.common import ACTIVATIONS as GATED
from foreword.models.common import LAYER_TYPES, MAX_LAYERS, MAX_WIDTH
from foreword.models.config import ConfigReader

__all__ = ["ModernBert"]

FULL, SLIDING = LAYER_TYPES
THETAS = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}
BLOCK = 256  # rows of a text that look around together
WITHOUT_INFLUENCE = (
    "classifier_dropout",
    "cls_token_id",
    "decoder_bias",
    "deterministic_flash_attn",
    "embedding_dropout",
    "initializer_cutoff_factor",
    "mlp_dropout",
    "reference_compile",
    "repad_logits_with_grad",
    "sep_token_id",
    "sparse_pred_ignore_index",
    "sparse_prediction",
)


@dataclass(frozen=True, slots=True)
class ModernBertConfig(EncoderConfig):
    """kinds: of each layer, FULL or SLIDING; thetas: bases of the rotary positions of either;
    window: how far a layer of kind SLIDING looks to each side."""

    kinds: tuple[str, ...] = ()
    thetas: tuple[tuple[str, float], ...] = ()
    window: int = 0
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    head_activation: str = "gelu"


class ModernBert(Encoder):
    """Neither a table of positions nor token types."""

    config: ModernBertConfig
    prefix = "model."
    unused = MappingProxyType({"head.": "head of pre-training", "decoder.": "head of pre-training"})

    @classmethod
    def read(cls, config: ConfigReader) -> EncoderConfig:
        """config.json of model_type `modernbert`"""
        skip_without_influence(config)
        for key in WITHOUT_INFLUENCE:
            config.raw(key, None)
        hidden, heads = config.whole("hidden_size", high=MAX_WIDTH), config.whole("num_attention_heads")
        if hidden % heads:
            raise config.refuse("num_attention_heads", f"{heads} does not divide hidden_size {hidden}")
        layers = config.whole("num_hidden_layers", high=MAX_LAYERS)
        positions = config.whole("max_position_embeddings")
        config.expect("position_embedding_type", "absolute")  # an inherited option, which the model does not read
        return ModernBertConfig(
            architecture="modernbert",
            vocab_size=config.whole("vocab_size"),
            hidden=hidden,
            intermediate=config.whole("intermediate_size", high=MAX_WIDTH),
            layers=layers,
            heads=heads,
            eps=config.number("norm_eps", 1e-5),
            activation=config.choice("hidden_activation", GATED, "gelu"),
            max_tokens=positions,
            positions=positions,
            score=read_score(config),
            head_pooling=config.choice("classifier_pooling", {"cls": "cls", "mean": "mean"}, "cls"),
            kinds=_read_kinds(config, layers),
            thetas=_read_thetas(config),
            window=config.whole("local_attention", 128) // 2,
            norm_bias=config.flag("norm_bias", False),
            attention_bias=config.flag("attention_bias", False),
            mlp_bias=config.flag("mlp_bias", False),
            head_bias=config.flag("classifier_bias", False),
            head_activation=read_activation(config, "classifier_activation"),
        )

    def load(self, body: Weights) -> None:
        """Build the model."""
        config = self.config
        head_dim = config.hidden // config.heads
        self._tables = {
            kind: Rope(RopeConfig("default", theta, head_dim), config.max_tokens, "cpu").table for kind, theta in config.thetas
        }
        inner = body.within("embeddings.")
        self._words = words(self.ops, inner, "tok_embeddings", config)
        self._norm = LayerNorm(inner, "norm", config, config.norm_bias)
        self._layers = [ModernBertLayer(self.ops, config, body, index) for index in range(config.layers)]
        self._last_norm = LayerNorm(body, "final_norm", config, config.norm_bias)

    def load_head(self, body: Weights, whole: Weights) -> Head:
        """A dense layer, a norm, and a classifier of one class."""
        return ModernBertHead(self.ops, self.config, whole)

    def forward(self, rows: Rows) -> Tensor:
        """-> [T, H]"""
        x = self._norm(self._words(rows.token_ids))
        for layer, kind in zip(self._layers, self.config.kinds, strict=True):
            x = layer(x, rows, self._tables[kind])
        return self._last_norm(x)


class ModernBertLayer:
    """Norm, attention, norm, gated feed-forward; each branch is added to what it read. The first layer reads what was normed."""

    def __init__(self, ops: Ops, config: ModernBertConfig, body: Weights, index: int) -> None:
        weights, hidden = body.within(f"layers.{index}."), config.hidden
        self._ops = ops
        self._heads = config.heads
        self._activation = config.activation
        self._window = config.window if config.kinds[index] == SLIDING else None
        self._attention_norm = LayerNorm(weights, "attn_norm", config, config.norm_bias) if index else None
        self._qkv = Dense(ops, weights, hidden, {"attn.Wqkv": 3 * hidden}, config.attention_bias)
        self._out = Dense(ops, weights, hidden, {"attn.Wo": hidden}, config.attention_bias)
        self._mlp_norm = LayerNorm(weights, "mlp_norm", config, config.norm_bias)
        self._up = Dense(ops, weights, hidden, {"mlp.Wi": 2 * config.intermediate}, config.mlp_bias)
        self._down = Dense(ops, weights, config.intermediate, {"mlp.Wo": hidden}, config.mlp_bias)

    def __call__(self, x: Tensor, rows: Rows, table: Tensor) -> Tensor:
        """[T, H] -> [T, H]; table as in Ops.rope"""
        normed = x if self._attention_norm is None else self._attention_norm(x)
        x = x + self._out(rows.each(self._attend, self._turned(self._qkv(normed), rows, table)))
        return x + self._down(self._ops.gated(self._up(self._mlp_norm(x)), self._activation))

    def _turned(self, qkv: Tensor, rows: Rows, table: Tensor) -> Tensor:
        """[T, 3H] -> [T, 3 heads, D] with q and k rotated"""
        heads = qkv.view(len(qkv), 3 * self._heads, -1)
        turned = self._ops.rope(heads[:, : 2 * self._heads], table, rows.positions)
        return torch.cat((turned, heads[:, 2 * self._heads :]), 1)

    def _attend(self, qkv: Tensor) -> Tensor:
        """[t, 3 heads, D] of one text -> [t, H]"""
        q, k, v = qkv.transpose(0, 1).contiguous()[None].chunk(3, 1)
        far = self._window is None or len(qkv) <= self._window
        seen = F.scaled_dot_product_attention(q, k, v) if far else _attend_near(q, k, v, self._window or 0)
        return seen[0].transpose(0, 1).flatten(1)


class ModernBertHead:
    """out(norm(activation(dense(x))))"""

    def __init__(self, ops: Ops, config: ModernBertConfig, whole: Weights) -> None:
        hidden = config.hidden
        self._dense = Dense(ops, whole, hidden, {"head.dense": hidden}, config.head_bias)
        self._activation = ACTIVATIONS[config.head_activation]
        self._norm = LayerNorm(whole, "head.norm", config, config.norm_bias)
        self._out = Dense(ops, whole, hidden, {"classifier": 1})

    def __call__(self, vector: Tensor) -> Tensor:
        """[1, H] -> [1, 1]"""
        return self._out(self._norm(self._activation(self._dense(vector))))


def _attend_near(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """q, k, v [1, heads, t, D] -> the same: row i sees the rows from i - window to i + window."""
    size = q.shape[2]
    seen = []
    for begin in range(0, size, BLOCK):
        end = min(begin + BLOCK, size)
        first, last = max(begin - window, 0), min(end + window, size)
        distances = torch.arange(first, last)[None, :] - torch.arange(begin, end)[:, None]
        mask = distances.abs() <= window
        seen.append(F.scaled_dot_product_attention(q[:, :, begin:end], k[:, :, first:last], v[:, :, first:last], attn_mask=mask))
    return torch.cat(seen, 2)


def _read_kinds(config: ConfigReader, layers: int) -> tuple[str, ...]:
    every = config.whole("global_attn_every_n_layers", 3)
    kinds = config.texts("layer_types", layers) or tuple(SLIDING if index % every else FULL for index in range(layers))
    for kind in kinds:
        if kind not in LAYER_TYPES:
            raise config.refuse("layer_types", f"holds {kind!r}; known: {', '.join(LAYER_TYPES)}")
    return kinds


def _read_thetas(config: ConfigReader) -> tuple[tuple[str, float], ...]:
    """Of either kind of layer: from `rope_parameters`, or else under the older names."""
    nested = config.table("rope_parameters")
    thetas = []
    for kind, (older, default) in THETAS.items():
        theta = config.number(older, default)
        parameters = nested.table(kind) if nested is not None else None
        if parameters is not None:
            parameters.expect("rope_type", "default")
            theta = parameters.number("rope_theta", theta)
            parameters.finish()
        thetas.append((kind, theta))
    if nested is not None:
        nested.finish()
    return tuple(thetas)
