"""Gemma 3, its text part: Gemma 2's layers with normed heads and two RoPEs, five local layers to a global one."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from foreword.core.kv import KVLayer
from foreword.layers.attention import Pass
from foreword.layers.rope import RopeConfig
from foreword.models.common import read_common, read_head_dim, read_windows
from foreword.models.config import ConfigReader
from foreword.models.decoder import Decoder, DecoderConfig, Kind, Layer, Parts
from foreword.models.gemma2 import HEAD_DIM, WINDOW, gemma_options
from foreword.models.rope import rope_from_table

__all__ = ["Gemma3Text"]

PERIOD = 6  # every sixth layer is global
GLOBAL_THETA = 1_000_000.0
LOCAL_THETA = 10_000.0


class Gemma3Layer:
    """Each branch: norm, attention or MLP, norm; then it is added to what it read."""

    def __init__(self, parts: Parts) -> None:
        self._add = parts.ops.add
        self._before_attention = parts.norm("input_layernorm")
        self._attention = parts.attention("self_attn", head_norms=True)
        self._after_attention = parts.norm("post_attention_layernorm")
        self._before_mlp = parts.norm("pre_feedforward_layernorm")
        self._mlp = parts.mlp("mlp")
        self._after_mlp = parts.norm("post_feedforward_layernorm")

    def __call__(self, x: Tensor, shared: Pass, cache: KVLayer) -> Tensor:
        """x [T, H] -> [T, H]"""
        x = self._add(x, self._after_attention(self._attention(self._before_attention(x), shared, cache)))
        return self._add(x, self._after_mlp(self._mlp(self._before_mlp(x))))


class Gemma3Text(Decoder):
    """Local layers have a window and a RoPE of their own; scaling applies to the global ones alone."""

    @classmethod
    def read(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `gemma3_text`"""
        bias = config.flag("attention_bias", False)
        window = config.whole("sliding_window", WINDOW)
        period = config.whole("sliding_window_pattern", PERIOD)
        windows = read_windows(config, window, lambda index: (index + 1) % period != 0)
        ropes = _read_ropes(config)
        base = read_common(
            config,
            "gemma3_text",
            kinds=[Kind(window, ropes[window is not None]) for window in windows],
            head_dim=HEAD_DIM,
            qkv_bias=bias,
            out_bias=bias,
            activation_key="hidden_activation",
            tied=True,
        )
        return replace(
            gemma_options(config, base),
            score_softcap=config.optional_number("attn_logit_softcapping"),
            logit_softcap=config.optional_number("final_logit_softcapping"),
        )

    def layer(self, parts: Parts) -> Layer:
        """Build one layer."""
        return Gemma3Layer(parts)


def _read_ropes(config: ConfigReader) -> tuple[RopeConfig, RopeConfig]:
    """For global and for local layers, in either layout of the config."""
    head_dim, context = read_head_dim(config, HEAD_DIM), config.whole("max_position_embeddings")
    nested = config.table("rope_parameters")
    wide_theta = config.number("rope_theta", GLOBAL_THETA)
    local_theta = config.number("rope_local_base_freq", LOCAL_THETA)
    empty = ConfigReader({}, config.source)
    wide = (nested and nested.table("full_attention")) or config.table("rope_scaling") or empty
    local = (nested and nested.table("sliding_attention")) or empty
    if nested is not None:
        nested.finish()
    return rope_from_table(wide, head_dim, context, wide_theta), rope_from_table(local, head_dim, context, local_theta)
