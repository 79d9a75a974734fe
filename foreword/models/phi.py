"""Phi-1, 1.5 and 2: attention and an MLP without a gate side by side, biases everywhere."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.cohere2 import ParallelLayer
from foreword.models.decoder import Decoder
from foreword.models.decoder_config import DecoderConfig, read_decoder_config
from foreword.models.layer_builder import DecoderLayer, LayerBuilder
from foreword.weights.config_reader import ConfigReader


class Phi(Decoder):
    """RoPE on a part of each head."""

    NORM = "final_layernorm"

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `phi`"""
        config.require_value("qk_layernorm", False)
        base = read_decoder_config(
            config,
            "phi",
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            eps=1e-5,
            eps_key="layer_norm_eps",
            partial_rotary_factor=0.5,
        )
        return replace(base, norm_type="layer", norm_bias=True, head_bias=True)

    def build_layer(self, builder: LayerBuilder) -> DecoderLayer:
        """Build one layer."""
        fused = "qkv_proj" if builder.has("self_attn.qkv_proj.weight") else None  # older GGUF files have it
        attention = builder.attention("self_attn", fused, out="dense")
        return ParallelLayer(builder, attention, builder.ungated_mlp("mlp", "fc1", "fc2"))
