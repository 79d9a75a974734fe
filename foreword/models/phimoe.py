"""Phi-3.5-MoE and Phi-mini-MoE: layer norms, biases and SparseMixer's weights of experts."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.decoder_config import (
    DecoderConfig,
    read_decoder_config,
    read_moe_config,
    read_num_layers,
    read_window,
)
from foreword.models.llama import Llama
from foreword.models.mixtral import NAMES
from foreword.weights.config_reader import ConfigReader

JITTER = 0.01  # training's noise: logits within it count as near each other


class PhiMoe(Llama):
    """A window, if any, is in all layers."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `phimoe`"""
        config.require_value("num_experts_per_tok", 2)
        window = read_window(config)
        base = read_decoder_config(
            config,
            "phimoe",
            windows=(window,) * read_num_layers(config),
            bias_key="attention_bias",
            eps=1e-5,
            theta=1e6,
        )
        moe = read_moe_config(config, NAMES, renormalize=True, scoring="sparse_mixer")
        tolerance = 2 * config.get_float("router_jitter_noise", JITTER, allows_zero=True)
        return replace(
            base,
            norm_type="layer",
            norm_bias=True,
            head_bias=config.get_bool("lm_head_bias", False),
            moe=replace(moe, experts=replace(moe.experts, tolerance=tolerance)),
        )
