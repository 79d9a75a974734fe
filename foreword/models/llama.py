"""Llama 2, 3, 3.x and models of their shape."""

from __future__ import annotations

from torch import Tensor

from foreword.core.batch import KVLayer
from foreword.layers.attention import ForwardContext
from foreword.models.decoder import Decoder, DecoderLayer, LayerBuilder
from foreword.models.decoder_config import DecoderConfig, read_decoder_config
from foreword.weights.config_reader import ConfigReader


class LlamaLayer:
    """Norm, attention, norm, gated MLP or mixture of experts, with a residual around each branch."""

    def __init__(self, builder: LayerBuilder) -> None:
        self._attention_norm = builder.norm("input_layernorm")
        self._attention = builder.attention("self_attn")
        self._mlp_norm = builder.norm("post_attention_layernorm")
        self._mlp = builder.feed_forward()

    def __call__(self, x: Tensor, context: ForwardContext, cache: KVLayer) -> Tensor:
        """x [T, H] -> [T, H]"""
        x = self._attention(self._attention_norm(x), context, cache, x)
        return self._mlp(self._mlp_norm(x), x)


class Llama(Decoder):
    """RoPE of any type; biases if the config has them."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `llama`"""
        bias = config.get_bool("attention_bias", False)
        mlp_bias = config.get_bool("mlp_bias", False)
        return read_decoder_config(config, "llama", qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)

    def build_layer(self, builder: LayerBuilder) -> DecoderLayer:
        """Build one layer."""
        return LlamaLayer(builder)
