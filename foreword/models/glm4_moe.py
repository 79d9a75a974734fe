"""GLM-4.5, 4.6 and 4.7: Llama's layers with experts as in DeepSeek-V3, in all but the first layers."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.decoder_config import DecoderConfig, QKNorm, read_decoder_config
from foreword.models.deepseek_v2 import read_shared_moe
from foreword.models.llama import Llama
from foreword.weights.config_reader import ConfigReader


class Glm4Moe(Llama):
    """RoPE on half of each head. The layers of the MTP head are not loaded."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `glm4_moe`"""
        base = read_decoder_config(
            config,
            "glm4_moe",
            qkv_bias=config.get_bool("attention_bias", False),
            qk_norm=QKNorm() if config.get_bool("use_qk_norm", False) else None,
            eps=1e-5,
            partial_rotary_factor=0.5,
        )
        num_mtp_layers = config.get_int("num_nextn_predict_layers", 1, low=0)
        return replace(base, moe=read_shared_moe(config, num_dense=1), num_mtp_layers=num_mtp_layers)


class SolarOpen(Llama):
    """Solar Open: experts in all layers, RoPE on whole heads."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `solar_open`"""
        for key, value in (("first_k_dense_replace", 0), ("use_qk_norm", False)):
            config.require_value(key, value)
        config.get("intermediate_size", None)  # no layer uses it
        base = read_decoder_config(
            config,
            "solar_open",
            head_dim=128,
            qkv_bias=config.get_bool("attention_bias", False),
            eps=1e-5,
            theta=1_000_000.0,
            intermediate_size=config.get_int("moe_intermediate_size"),
        )
        return replace(base, moe=read_shared_moe(config))
