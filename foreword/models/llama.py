"""Llama 2, 3, 3.x and what shares their shape."""

from __future__ import annotations

from torch import Tensor

from foreword.core.kv import KVLayer
from foreword.layers.attention import Pass
from foreword.models.common import read_common
from foreword.models.config import ConfigReader
from foreword.models.decoder import Decoder, DecoderConfig, Layer, Parts

__all__ = ["Llama"]


class LlamaLayer:
    """Norm, attention, norm, gated MLP; each branch is added to what it read."""

    def __init__(self, parts: Parts) -> None:
        self._attention_norm = parts.norm("input_layernorm")
        self._attention = parts.attention("self_attn")
        self._mlp_norm = parts.norm("post_attention_layernorm")
        self._mlp = parts.mlp("mlp")

    def __call__(self, x: Tensor, shared: Pass, cache: KVLayer) -> Tensor:
        """x [T, H] -> [T, H]"""
        x = self._attention(self._attention_norm(x), shared, cache, x)
        return self._mlp(self._mlp_norm(x), x)


class Llama(Decoder):
    """RoPE of any type; biases on request."""

    @classmethod
    def read(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `llama`"""
        bias = config.flag("attention_bias", False)
        mlp_bias = config.flag("mlp_bias", False)
        return read_common(config, "llama", qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)

    def layer(self, parts: Parts) -> Layer:
        """Build one layer."""
        return LlamaLayer(parts)
