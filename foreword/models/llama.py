"""Llama 2, 3, 3.x and models of their shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from foreword.core.batch import KVLayer
from foreword.layers.attention import Attention, ForwardContext
from foreword.layers.latent_attention import LatentAttention
from foreword.layers.mlp import MLP, MoE, UngatedMLP
from foreword.models.decoder import Decoder
from foreword.models.decoder_config import DecoderConfig, read_decoder_config
from foreword.models.layer_builder import DecoderLayer, LayerBuilder
from foreword.weights.config_reader import ConfigReader

# Attention, or a layer with state: x, context, the layer's cache, residual -> x
Mixer = Callable[[Tensor, ForwardContext, Any, Tensor | None], Tensor]


class LlamaLayer:
    """Norm, attention, norm, gated MLP or mixture of experts, with a residual around each branch."""

    def __init__(
        self,
        builder: LayerBuilder,
        mixer: Mixer | None = None,
        mlp: MLP | MoE | UngatedMLP | None = None,
        norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
    ) -> None:
        """mixer, mlp  instead of attention and of the feed-forward layer under Llama's names"""
        self._mixer_norm = builder.norm(norms[0])
        self._mixer: Mixer = mixer or builder.attention("self_attn")
        self._mlp_norm = builder.norm(norms[1])
        self._mlp = mlp or builder.feed_forward()

    def __call__(self, x: Tensor, context: ForwardContext, cache: Any) -> Tensor:
        """x [T, H] -> [T, H]"""
        x = self._mixer(self._mixer_norm(x), context, cache, x)
        return self._mlp(self._mlp_norm(x), x)

    def write_kv(self, x: Tensor, context: ForwardContext, cache: KVLayer) -> None:
        """K and V of x [T, H] alone, of the layer of a trained head."""
        assert isinstance(self._mixer, Attention | LatentAttention)
        self._mixer.write_kv(self._mixer_norm(x), context, cache)


class Llama(Decoder):
    """RoPE of any type; biases if the config has them."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `llama`"""
        mlp_bias = config.get_bool("mlp_bias", False)
        return read_decoder_config(config, "llama", bias_key="attention_bias", mlp_bias=mlp_bias)

    def build_layer(self, builder: LayerBuilder) -> DecoderLayer:
        """Build one layer."""
        return LlamaLayer(builder)
