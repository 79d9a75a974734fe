"""Gemma 3 (text): Gemma 2's layers with QK norm and two RoPEs; every sixth layer has full attention."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from foreword.core.batch import KVLayer
from foreword.layers.attention import ForwardContext
from foreword.layers.rope import RopeConfig
from foreword.models.common import read_decoder_config, read_head_dim, read_layer_windows
from foreword.models.config import ConfigReader
from foreword.models.decoder import Decoder, DecoderConfig, DecoderLayer, LayerBuilder, LayerType
from foreword.models.gemma2 import HEAD_DIM, WINDOW, apply_gemma_options
from foreword.models.rope import read_rope_section

__all__ = ["Gemma3Text"]

WINDOW_PERIOD = 6  # every n-th layer is global
GLOBAL_THETA = 1_000_000.0
LOCAL_THETA = 10_000.0


class Gemma3Layer:
    """Each branch: norm, attention or MLP, norm, residual."""

    def __init__(self, builder: LayerBuilder) -> None:
        self._add = builder.ops.add
        self._input_norm = builder.norm("input_layernorm")
        self._attention = builder.attention("self_attn", qk_norm=True)
        self._post_attention_norm = builder.norm("post_attention_layernorm")
        self._pre_mlp_norm = builder.norm("pre_feedforward_layernorm")
        self._mlp = builder.mlp("mlp")
        self._post_mlp_norm = builder.norm("post_feedforward_layernorm")

    def __call__(self, x: Tensor, context: ForwardContext, cache: KVLayer) -> Tensor:
        """x [T, H] -> [T, H]"""
        x = self._add(x, self._post_attention_norm(self._attention(self._input_norm(x), context, cache)))
        return self._add(x, self._post_mlp_norm(self._mlp(self._pre_mlp_norm(x))))


class Gemma3Text(Decoder):
    """Local layers have a window and their own RoPE; RoPE scaling applies to global layers."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `gemma3_text`"""
        bias = config.get_bool("attention_bias", False)
        window = config.get_int("sliding_window", WINDOW)
        period = config.get_int("sliding_window_pattern", WINDOW_PERIOD)
        windows = read_layer_windows(config, window, lambda index: (index + 1) % period != 0)
        ropes = _read_ropes(config)
        base = read_decoder_config(
            config,
            "gemma3_text",
            layer_types=[LayerType(window, ropes[window is not None]) for window in windows],
            head_dim=HEAD_DIM,
            qkv_bias=bias,
            out_bias=bias,
            activation_key="hidden_activation",
            tie_word_embeddings=True,
        )
        return replace(
            apply_gemma_options(config, base),
            attn_softcap=config.get_optional_float("attn_logit_softcapping"),
            logit_softcap=config.get_optional_float("final_logit_softcapping"),
        )

    def build_layer(self, builder: LayerBuilder) -> DecoderLayer:
        """Build one layer."""
        return Gemma3Layer(builder)


def _read_ropes(config: ConfigReader) -> tuple[RopeConfig, RopeConfig]:
    """RoPE of global and of local layers, in either layout of the config."""
    head_dim, context = read_head_dim(config, HEAD_DIM), config.get_int("max_position_embeddings")
    nested = config.get_section("rope_parameters")
    global_theta = config.get_float("rope_theta", GLOBAL_THETA)
    local_theta = config.get_float("rope_local_base_freq", LOCAL_THETA)
    empty = ConfigReader({}, config.source)
    scaling = config.get_section("rope_scaling")
    global_section = (nested and nested.get_section("full_attention")) or scaling or empty
    local_section = (nested and nested.get_section("sliding_attention")) or empty
    if nested is not None:
        nested.check_all_read()
    global_rope = read_rope_section(global_section, head_dim, context, global_theta)
    return global_rope, read_rope_section(local_section, head_dim, context, local_theta)
