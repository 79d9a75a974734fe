"""Qwen3: Llama's layers with QK norm before RoPE."""

from __future__ import annotations

from torch import Tensor

from foreword.core.batch import KVLayer
from foreword.layers.attention import ForwardContext
from foreword.models.common import read_decoder_config
from foreword.models.config import ConfigReader
from foreword.models.decoder import Decoder, DecoderConfig, DecoderLayer, LayerBuilder
from foreword.models.qwen2 import read_qwen_layer_windows

__all__ = ["Qwen3"]

HEAD_DIM = 128


class Qwen3Layer:
    """Norm, attention with QK norm, norm, gated MLP, with a residual around each branch."""

    def __init__(self, builder: LayerBuilder) -> None:
        self._attention_norm = builder.norm("input_layernorm")
        self._attention = builder.attention("self_attn", qk_norm=True)
        self._mlp_norm = builder.norm("post_attention_layernorm")
        self._mlp = builder.mlp("mlp")

    def __call__(self, x: Tensor, context: ForwardContext, cache: KVLayer) -> Tensor:
        """x [T, H] -> [T, H]"""
        x = self._attention(self._attention_norm(x), context, cache, x)
        return self._mlp(self._mlp_norm(x), x)


class Qwen3(Decoder):
    """The default head size is 128 for any hidden_size."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `qwen3`"""
        bias = config.get_bool("attention_bias", False)
        windows = read_qwen_layer_windows(config)
        return read_decoder_config(
            config, "qwen3", windows=windows, head_dim=HEAD_DIM, qkv_bias=bias, out_bias=bias
        )

    def build_layer(self, builder: LayerBuilder) -> DecoderLayer:
        """Build one layer."""
        return Qwen3Layer(builder)
