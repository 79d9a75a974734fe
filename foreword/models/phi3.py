"""Phi-3: fused projections, partial or long RoPE, optional sliding window."""

from __future__ import annotations

from torch import Tensor

from foreword.core.batch import KVLayer
from foreword.layers.attention import ForwardContext
from foreword.models.decoder import Decoder
from foreword.models.decoder_config import DecoderConfig, read_decoder_config, read_layer_windows, read_window
from foreword.models.layer_builder import DecoderLayer, LayerBuilder
from foreword.weights.config_reader import ConfigReader


class Phi3Layer:
    """Llama's layer with fused tensors: q, k and v in one, gate and up in one."""

    def __init__(self, builder: LayerBuilder) -> None:
        self._attention_norm = builder.norm("input_layernorm")
        self._attention = builder.attention("self_attn", fused="qkv_proj")
        self._mlp_norm = builder.norm("post_attention_layernorm")
        self._mlp = builder.mlp("mlp", fused="gate_up_proj")

    def __call__(self, x: Tensor, context: ForwardContext, cache: KVLayer) -> Tensor:
        """x [T, H] -> [T, H]"""
        x = self._attention(self._attention_norm(x), context, cache, x)
        return self._mlp(self._mlp_norm(x), x)


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
        return Phi3Layer(builder)
