"""EXAONE 3.0 and 3.5: Llama's layers under other names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from foreword.models.decoder import Decoder
from foreword.models.decoder_config import DecoderConfig, read_decoder_config
from foreword.models.layer_builder import DecoderLayer, LayerBuilder
from foreword.models.llama import LlamaLayer
from foreword.weights.config_reader import ConfigReader

THETA = 500_000.0


class Exaone(Decoder):
    """Options have GPT-2's names, or those of transformers 5."""

    WEIGHT_PREFIXES: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            "model.layers.": ("transformer.h.",),
            "model.embed_tokens.": ("transformer.wte.",),
            "model.norm.": ("transformer.ln_f.",),
        }
    )

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `exaone`"""
        if "num_layers" in config:
            config = config.with_defaults({"num_hidden_layers": config.get_int("num_layers")})
        return read_decoder_config(
            config,
            "exaone",
            bias_key="attention_bias",
            mlp_bias=config.get_bool("mlp_bias", False),
            eps=1e-5,
            eps_key="layer_norm_epsilon" if "layer_norm_epsilon" in config else "rms_norm_eps",
            activation_key="activation_function" if "activation_function" in config else "hidden_act",
            theta=THETA,
        )

    def build_layer(self, builder: LayerBuilder) -> DecoderLayer:
        """Build one layer."""
        attention = builder.attention("attn.attention", out="out_proj")
        mlp = builder.mlp("mlp", down_name="c_proj", gate_up_names=("c_fc_0", "c_fc_1"))
        return LlamaLayer(builder, attention, mlp, ("ln_1", "ln_2"))
