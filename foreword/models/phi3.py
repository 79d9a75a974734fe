"""Phi-3: fused projections, partial or long RoPE, optional sliding window."""

from __future__ import annotations

from foreword.models.decoder import Decoder
from foreword.models.decoder_config import DecoderConfig, read_decoder_config, read_layer_windows, read_window
from foreword.models.layer_builder import DecoderLayer, LayerBuilder
from foreword.models.llama import LlamaLayer
from foreword.weights.config_reader import ConfigReader


class Phi3(Decoder):
    """Phi-3, 3.5 and 4-mini; no vision or mixture-of-experts variants."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `phi3`"""
        config.require_value("attention_bias", False)
        window = read_window(config)
        windows = read_layer_windows(config, window, lambda index: window is not None)
        return read_decoder_config(config, "phi3", windows=windows)

    def build_layer(self, builder: LayerBuilder) -> DecoderLayer:
        """Build one layer."""
        attention = builder.attention("self_attn", fused="qkv_proj")
        return LlamaLayer(builder, attention, builder.mlp("mlp", fused="gate_up_proj"))
