"""Phi-3: projections stored fused, a partial or long RoPE, perhaps a sliding window."""

from __future__ import annotations

from torch import Tensor

from foreword.core.kv import KVLayer
from foreword.layers.attention import Pass
from foreword.models.common import read_common, read_windows
from foreword.models.config import ConfigReader
from foreword.models.decoder import Decoder, DecoderConfig, Layer, Parts

__all__ = ["Phi3"]


class Phi3Layer:
    """Llama's layer; q, k, v and gate, up each lie in one tensor."""

    def __init__(self, parts: Parts) -> None:
        self._attention_norm = parts.norm("input_layernorm")
        self._attention = parts.attention("self_attn", fused="qkv_proj")
        self._mlp_norm = parts.norm("post_attention_layernorm")
        self._mlp = parts.mlp("mlp", fused="gate_up_proj")

    def __call__(self, x: Tensor, shared: Pass, cache: KVLayer) -> Tensor:
        """x [T, H] -> [T, H]"""
        x = self._attention(self._attention_norm(x), shared, cache, x)
        return self._mlp(self._mlp_norm(x), x)


class Phi3(Decoder):
    """Phi-3, 3.5 and 4-mini without images or mixtures."""

    @classmethod
    def read(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `phi3`"""
        config.expect("attention_bias", False)
        window = config.optional_whole("sliding_window")
        windows = read_windows(config, window, lambda index: window is not None)
        return read_common(config, "phi3", windows=windows)

    def layer(self, parts: Parts) -> Layer:
        """Build one layer."""
        return Phi3Layer(parts)
