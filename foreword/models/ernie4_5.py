"""ERNIE 4.5 (dense): Llama's layers with interleaved RoPE."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.decoder import Decoder
from foreword.models.decoder_config import DecoderConfig, read_decoder_config, read_head_dim
from foreword.models.layer_builder import DecoderLayer, LayerBuilder
from foreword.models.llama import LlamaLayer
from foreword.weights.config_reader import ConfigReader

HEAD_DIM = 128
EPS = 1e-5
THETA = 500_000.0


class Ernie45(Decoder):
    """All linear layers have biases or none."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `ernie4_5`"""
        bias = config.get_bool("use_bias", False)
        base = read_decoder_config(
            config,
            "ernie4_5",
            head_dim=HEAD_DIM,
            eps=EPS,
            theta=THETA,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
            tie_word_embeddings=True,
        )
        if any(
            layer_type.rope.rotary_dim != read_head_dim(config, HEAD_DIM) for layer_type in base.layer_types
        ):
            raise config.error("partial_rotary_factor", "must be 1 here")
        return replace(base, interleaved_rope=True)

    def build_layer(self, builder: LayerBuilder) -> DecoderLayer:
        """Build one layer."""
        return LlamaLayer(builder)
