"""OLMo 2: norms after attention and MLP instead of before them, and of all heads of q and of k together."""

from __future__ import annotations

from torch import Tensor

from foreword.core.batch import KVLayer
from foreword.layers.attention import ForwardContext
from foreword.models.decoder import Decoder
from foreword.models.decoder_config import DecoderConfig, QKNorm, read_decoder_config
from foreword.models.layer_builder import DecoderLayer, LayerBuilder
from foreword.weights.config_reader import ConfigReader

EPS = 1e-5


class Olmo2Layer:
    """Each branch: attention or MLP, norm, residual."""

    def __init__(self, builder: LayerBuilder) -> None:
        self._add = builder.ops.add
        self._attention = builder.attention("self_attn")
        self._attention_norm = builder.norm("post_attention_layernorm")
        self._mlp = builder.mlp("mlp")
        self._mlp_norm = builder.norm("post_feedforward_layernorm")

    def __call__(self, x: Tensor, context: ForwardContext, cache: KVLayer) -> Tensor:
        """x [T, H] -> [T, H]"""
        x = self._add(x, self._attention_norm(self._attention(x, context, cache)))
        return self._add(x, self._mlp_norm(self._mlp(x)))


class Olmo2(Decoder):
    """Full attention in all layers."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `olmo2`"""
        return read_decoder_config(
            config, "olmo2", eps=EPS, bias_key="attention_bias", qk_norm=QKNorm(all_heads=True)
        )

    def build_layer(self, builder: LayerBuilder) -> DecoderLayer:
        """Build one layer."""
        return Olmo2Layer(builder)
