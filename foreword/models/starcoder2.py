"""StarCoder 2: layer norms, biases, and an MLP without a gate."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.decoder import Decoder
from foreword.models.decoder_config import DecoderConfig, read_decoder_config, read_num_layers, read_window
from foreword.models.layer_builder import DecoderLayer, LayerBuilder
from foreword.models.llama import LlamaLayer
from foreword.weights.config_reader import ConfigReader


class Starcoder2(Decoder):
    """A window, if any, is in all layers."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `starcoder2`"""
        bias = config.get_bool("use_bias", True)
        for key in ("residual_dropout", "embedding_dropout"):
            config.get(key, None)  # for training only
        for key, value in (("mlp_type", "default"), ("norm_type", "layer_norm")):
            config.require_value(key, value)
        base = read_decoder_config(
            config,
            "starcoder2",
            windows=(read_window(config),) * read_num_layers(config),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
            eps=1e-5,
            eps_key="norm_epsilon",
            tie_word_embeddings=True,
        )
        return replace(base, norm_type="layer", norm_bias=True)

    def build_layer(self, builder: LayerBuilder) -> DecoderLayer:
        """Build one layer."""
        return LlamaLayer(builder, mlp=builder.ungated_mlp("mlp", "c_fc", "c_proj"))
