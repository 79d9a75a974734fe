"""Qwen3-MoE (30B-A3B, Coder): Qwen3's layers with a mixture of experts in most of them."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.decoder_config import (
    DecoderConfig,
    QKNorm,
    read_decoder_config,
    read_moe_config,
    read_num_layers,
    read_window,
)
from foreword.models.expert_weights import ExpertNames
from foreword.models.llama import Llama
from foreword.weights.config_reader import ConfigReader


def read_expert_layers(config: ConfigReader) -> list[bool]:
    """Whether each layer has experts: every n-th one that is not in `mlp_only_layers`."""
    num_layers, step = read_num_layers(config), config.get_int("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(index) is int for index in dense):
        raise config.error("mlp_only_layers", f"must be a list of whole numbers, got {dense!r:.60}")
    return [(index + 1) % step == 0 and index not in dense for index in range(num_layers)]


class Qwen3Moe(Llama):
    """The default head size is hidden_size / heads, unlike Qwen3's."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `qwen3_moe`"""
        window = read_window(config)
        if not config.get_bool("use_sliding_window", False):
            window = None
        config.get("max_window_layers", None)  # without effect in this architecture
        for key, value in (
            ("qkv_bias", False),
            ("use_qk_norm", True),
            ("shared_expert_intermediate_size", 0),
        ):
            config.require_value(key, value)  # in the files of Qwen3-Coder
        base = read_decoder_config(
            config,
            "qwen3_moe",
            windows=(window,) * read_num_layers(config),
            bias_key="attention_bias",
            qk_norm=QKNorm(),
        )
        moe = read_moe_config(
            config,
            ExpertNames(),
            renormalize=config.get_bool("norm_topk_prob", False),
            size_key="moe_intermediate_size",
            has_experts=read_expert_layers(config),
        )
        return replace(base, moe=moe)
