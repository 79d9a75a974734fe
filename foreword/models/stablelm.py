"""StableLM 2 and 3B: Llama's layers with layer norms, RoPE on a part of each head."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.decoder_config import DecoderConfig, read_decoder_config
from foreword.models.llama import Llama
from foreword.weights.config_reader import ConfigReader


class StableLm(Llama):
    """StableLM 2 12B norms its heads, each by weights of its own, and has parallel branches: refused."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `stablelm`"""
        for key in ("qk_layernorm", "use_parallel_residual"):
            config.require_value(key, False)
        base = read_decoder_config(
            config,
            "stablelm",
            qkv_bias=config.get_bool("use_qkv_bias", False),
            eps=1e-5,
            eps_key="layer_norm_eps",
            partial_rotary_factor=config.get_float("rope_pct", 0.25),
        )
        return replace(base, norm_type="layer", norm_bias=True)
