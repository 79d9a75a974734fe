"""Granite: Llama's layers with multipliers of embedding, scores, branches and logits."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.decoder import Decoder, DecoderLayer, LayerBuilder
from foreword.models.decoder_config import DecoderConfig, read_decoder_config
from foreword.models.llama import LlamaLayer
from foreword.weights.config_reader import ConfigReader


class Granite(Decoder):
    """The residual stream is kept divided by `residual_multiplier`, so branches are added as they are.

    Each branch and the head begin with a norm, which ignores the scale of its input, but for its epsilon.
    """

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `granite`"""
        bias = config.get_bool("attention_bias", False)
        mlp_bias = config.get_bool("mlp_bias", False)
        base = read_decoder_config(config, "granite", qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)
        residual_multiplier = config.get_float("residual_multiplier", 1.0)
        return replace(
            base,
            attn_scale=config.get_float("attention_multiplier", 1.0),
            input_scale=config.get_float("embedding_multiplier", 1.0) / residual_multiplier,
            eps=base.eps / residual_multiplier**2,
            logit_scale=1 / config.get_float("logits_scaling", 1.0),
        )

    def build_layer(self, builder: LayerBuilder) -> DecoderLayer:
        """Build one layer."""
        return LlamaLayer(builder)
