"""gpt-oss: experts with a clamped activation, attention with sinks, a window in every second layer, YaRN."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.decoder_config import (
    DecoderConfig,
    read_decoder_config,
    read_layer_windows,
    read_moe_config,
    read_window,
)
from foreword.models.expert_weights import ExpertNames
from foreword.models.llama import Llama
from foreword.weights.config_reader import ConfigReader

WINDOW = 128
HEAD_DIM = 64
THETA = 150000.0
NAMES = ExpertNames(router="router")


class GptOss(Llama):
    """Experts are floats, or MXFP4, which stays packed."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `gpt_oss`"""
        window = read_window(config, WINDOW)
        windows = read_layer_windows(config, window, lambda index: window is not None and index % 2 == 0)
        config.require_value("hidden_act", "silu")  # named so, but "gpt_oss" is what it does
        config.require_value("swiglu_alpha", 1.702)
        config.require_value("swiglu_limit", 7.0)
        config.require_value("experts_per_token", config.get("num_experts_per_tok"))
        config.get("initial_context_length", None)  # repeated in the options of RoPE
        if "rope_parameters" not in config and "rope_scaling" not in config:
            raise config.error("rope_scaling", "is missing")
        bias = config.get_bool("attention_bias", True)
        base = read_decoder_config(
            config,
            "gpt_oss",
            windows=windows,
            head_dim=HEAD_DIM,
            qkv_bias=bias,
            out_bias=bias,
            eps=1e-5,
            theta=THETA,
        )
        moe = read_moe_config(config, NAMES, renormalize=True, activation="gpt_oss", is_gpt_oss=True)
        return replace(base, attn_sinks=True, moe=moe)
