"""GLM-4 (dense): interleaved RoPE on half of each head; norms behind the branches too in 0414."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.decoder import Decoder
from foreword.models.decoder_config import DecoderConfig, read_decoder_config
from foreword.models.gemma2 import Gemma2Layer
from foreword.models.layer_builder import DecoderLayer, LayerBuilder
from foreword.models.llama import LlamaLayer
from foreword.weights.config_reader import ConfigReader

HEAD_DIM = 128
EPS = 1.5625e-7
NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


class Glm(Decoder):
    """glm-4-9b, glm-edge. Biases are on q, k and v only."""

    ARCHITECTURE = "glm"

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `glm`"""
        base = read_decoder_config(
            config,
            cls.ARCHITECTURE,
            head_dim=HEAD_DIM,
            qkv_bias=config.get_bool("attention_bias", True),
            eps=EPS,
            partial_rotary_factor=0.5,
        )
        return replace(base, interleaved_rope=True)

    def build_layer(self, builder: LayerBuilder) -> DecoderLayer:
        """Build one layer."""
        return LlamaLayer(builder, mlp=builder.mlp("mlp", "gate_up_proj"))


class Glm4(Glm):
    """GLM-4-0414, GLM-Z1: model_type `glm4`."""

    ARCHITECTURE = "glm4"

    def build_layer(self, builder: LayerBuilder) -> DecoderLayer:
        """Build one layer."""
        return Gemma2Layer(builder, NORMS, builder.mlp("mlp", "gate_up_proj"))
