"""The text of Qwen3.5, 3.6 and 3.8: Qwen3-Next's layers with an MLP or a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.decoder import Decoder
from foreword.models.decoder_config import MAX_HIDDEN_SIZE, DecoderConfig, read_num_layers
from foreword.models.layer_builder import DecoderLayer, LayerBuilder
from foreword.models.llama import LlamaLayer
from foreword.models.qwen3_next import read_hybrid_config, read_hybrid_moe
from foreword.weights.config_reader import ConfigReader


class Qwen35(Decoder):
    """Projections of a Gated DeltaNet are separate. Positions of text are equal on all axes of its M-RoPE."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `qwen3_5_text`"""
        size = config.get_int("intermediate_size", high=MAX_HIDDEN_SIZE)
        return read_hybrid_config(config, "qwen3_5", size)

    def build_layer(self, builder: LayerBuilder) -> DecoderLayer:
        """Build one layer."""
        has_state = builder.state_shape is not None
        return LlamaLayer(builder, builder.gated_delta_net("linear_attn") if has_state else None)


class Qwen35Moe(Qwen35):
    """A mixture of experts in every layer."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `qwen3_5_moe_text`"""
        config.get("intermediate_size", None)  # no layer uses it
        size = config.get_int("moe_intermediate_size", high=MAX_HIDDEN_SIZE)
        base = read_hybrid_config(config, "qwen3_5_moe", size)
        return replace(base, moe=read_hybrid_moe(config, [True] * read_num_layers(config), renormalize=True))
