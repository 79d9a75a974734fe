"""Qwen3: every head of q and k is normed before it is turned."""

from __future__ import annotations

from torch import Tensor

from foreword.core.kv import KVLayer
from foreword.layers.attention import Pass
from foreword.models.common import read_common
from foreword.models.config import ConfigReader
from foreword.models.decoder import Decoder, DecoderConfig, Layer, Parts
from foreword.models.qwen2 import read_qwen_windows

__all__ = ["Qwen3"]

HEAD_DIM = 128


class Qwen3Layer:
    """Norm, attention with normed heads, norm, gated MLP; each branch is added to what it read."""

    def __init__(self, parts: Parts) -> None:
        self._attention_norm = parts.norm("input_layernorm")
        self._attention = parts.attention("self_attn", head_norms=True)
        self._mlp_norm = parts.norm("post_attention_layernorm")
        self._mlp = parts.mlp("mlp")

    def __call__(self, x: Tensor, shared: Pass, cache: KVLayer) -> Tensor:
        """x [T, H] -> [T, H]"""
        x = self._attention(self._attention_norm(x), shared, cache, x)
        return self._mlp(self._mlp_norm(x), x)


class Qwen3(Decoder):
    """Heads of 128 unless the config says otherwise, whatever hidden_size is."""

    @classmethod
    def read(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `qwen3`"""
        bias = config.flag("attention_bias", False)
        windows = read_qwen_windows(config)
        return read_common(config, "qwen3", windows=windows, head_dim=HEAD_DIM, qkv_bias=bias, out_bias=bias)

    def layer(self, parts: Parts) -> Layer:
        """Build one layer."""
        return Qwen3Layer(parts)
