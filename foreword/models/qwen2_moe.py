"""Qwen2-MoE: Qwen2's layers with a mixture of experts and a shared expert behind a sigmoid."""

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
from foreword.models.qwen3_moe import read_expert_layers
from foreword.weights.config_reader import ConfigReader

WINDOW = 4096
MAX_WINDOW_LAYERS = 28
NAMES = ExpertNames(shared_gate="mlp.shared_expert_gate")


class Qwen2Moe(Llama):
    """Windows, if enabled, are in every second one of the first `max_window_layers` layers."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `qwen2_moe`"""
        window = read_window(config, WINDOW)
        window_layers = config.get_int("max_window_layers", MAX_WINDOW_LAYERS, low=0)
        if not config.get_bool("use_sliding_window", False):
            window = None
        windows = read_layer_windows(
            config, window, lambda index: window is not None and index % 2 == 0 and index < window_layers
        )
        base = read_decoder_config(
            config, "qwen2_moe", windows=windows, qkv_bias=config.get_bool("qkv_bias", True)
        )
        moe = read_moe_config(
            config,
            NAMES,
            renormalize=config.get_bool("norm_topk_prob", False),
            size_key="moe_intermediate_size",
            has_experts=read_expert_layers(config),
            shared_intermediate_size=config.get_int("shared_expert_intermediate_size"),
        )
        return replace(base, moe=moe)
