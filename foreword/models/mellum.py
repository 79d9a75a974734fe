"""Mellum 2 (12B-A2.5B): Qwen3-MoE's layers, with windows and a RoPE of its own in some of them."""

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
    read_moe_config,
    read_window,
)
from foreword.models.deepseek_v2 import read_mlp_types
from foreword.models.expert_weights import ExpertNames
from foreword.models.llama import Llama
from foreword.weights.config_reader import ConfigReader

HEAD_DIM = 128
WINDOW = 1024
LOCAL_THETA, GLOBAL_THETA = 10_000.0, 500_000.0


class Mellum(Llama):
    """The MTP head is not loaded."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `mellum`"""
        windows = read_layer_windows(config, read_window(config, WINDOW), lambda index: False)
        local, full = read_local_and_global_rope(
            config, read_head_dim(config, HEAD_DIM), LOCAL_THETA, GLOBAL_THETA
        )
        for key in ("num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types"):
            config.get(key, None)
        base = read_decoder_config(
            config,
            "mellum",
            layer_types=[LayerType(window, local if window else full) for window in windows],
            head_dim=HEAD_DIM,
            bias_key="attention_bias",
            qk_norm=QKNorm(),
        )
        moe = read_moe_config(
            config,
            ExpertNames(),
            renormalize=config.get_bool("norm_topk_prob", True),
            size_key="moe_intermediate_size",
            has_experts=read_mlp_types(config),
        )
        return replace(base, moe=moe)
