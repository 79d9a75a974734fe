"""Gemma 3 (text): Gemma 2's layers with QK norm and two RoPEs; every sixth layer has full attention."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.decoder_config import (
    DecoderConfig,
    LayerType,
    QKNorm,
    read_decoder_config,
    read_head_dim,
    read_layer_windows,
    read_local_and_global_rope,
    read_window,
)
from foreword.models.gemma2 import HEAD_DIM, WINDOW, Gemma2, apply_gemma_options
from foreword.weights.config_reader import ConfigReader

WINDOW_PERIOD = 6  # every n-th layer is global
GLOBAL_THETA = 1_000_000.0
LOCAL_THETA = 10_000.0


class Gemma3Text(Gemma2):
    """Local layers have a window and their own RoPE; RoPE scaling applies to global layers."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `gemma3_text`"""
        window = read_window(config, WINDOW)
        period = config.get_int("sliding_window_pattern", WINDOW_PERIOD)
        windows = read_layer_windows(config, window, lambda index: (index + 1) % period != 0)
        local_rope, global_rope = read_local_and_global_rope(
            config,
            read_head_dim(config, HEAD_DIM),
            config.get_float("rope_local_base_freq", LOCAL_THETA),
            config.get_float("rope_theta", GLOBAL_THETA),
        )
        base = read_decoder_config(
            config,
            "gemma3_text",
            layer_types=[LayerType(window, local_rope if window else global_rope) for window in windows],
            head_dim=HEAD_DIM,
            bias_key="attention_bias",
            qk_norm=QKNorm(),
            activation_key="hidden_activation",
            tie_word_embeddings=True,
        )
        return replace(
            apply_gemma_options(config, base),
            attn_softcap=config.get_optional_float("attn_logit_softcapping"),
            logit_softcap=config.get_optional_float("final_logit_softcapping"),
        )
