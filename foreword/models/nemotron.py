"""Families whose MLP is a squared ReLU without a gate: Nemotron-4 and Minitron, Arcee's AFM."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.decoder import Decoder
from foreword.models.decoder_config import DecoderConfig, read_decoder_config
from foreword.models.layer_builder import DecoderLayer, LayerBuilder
from foreword.models.llama import LlamaLayer
from foreword.weights.config_reader import ConfigReader


class Arcee(Decoder):
    """AFM-4.5B: Llama's layers but for the MLP."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `arcee`"""
        return read_decoder_config(
            config,
            "arcee",
            bias_key="attention_bias",
            mlp_bias=config.get_bool("mlp_bias", False),
            eps=1e-5,
        )

    def build_layer(self, builder: LayerBuilder) -> DecoderLayer:
        """Build one layer."""
        return LlamaLayer(builder, mlp=builder.ungated_mlp())


class Nemotron(Arcee):
    """Nemotron-4, Minitron: layer norms whose weights have offset 1, RoPE on half of each head."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `nemotron`"""
        base = read_decoder_config(
            config,
            "nemotron",
            bias_key="attention_bias",
            mlp_bias=config.get_bool("mlp_bias", False),
            eps=1e-5,
            eps_key="norm_eps",
            partial_rotary_factor=config.get_float("rope_percent", config.get_float("rope_percentage", 0.5)),
        )
        return replace(base, norm_type="layer", norm_bias=True, norm_offset=1.0)
