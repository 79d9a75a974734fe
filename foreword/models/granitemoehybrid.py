"""Granite 4: Granite's layers and multipliers, with Mamba-2 instead of attention in most layers or none."""

from __future__ import annotations

from dataclasses import replace

from foreword.layers.rope import NO_ROPE
from foreword.layers.states import Mamba2Config
from foreword.models.decoder_config import (
    MAX_HIDDEN_SIZE,
    DecoderConfig,
    LayerType,
    read_attention_layers,
    read_moe_config,
)
from foreword.models.granite import Granite
from foreword.models.granitemoe import NAMES
from foreword.models.layer_builder import DecoderLayer, LayerBuilder
from foreword.models.llama import LlamaLayer
from foreword.models.mamba2 import Mamba2Keys, read_mamba2_shape, read_time_step_limits
from foreword.weights.config_reader import ConfigReader

SHARED_SIZE = "shared_intermediate_size"


class GraniteMoeHybrid(Granite):
    """The shared expert is in every layer; without experts it is the MLP."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `granitemoehybrid`"""
        has_experts = config.get_int("num_local_experts", 8, low=0) > 0
        shared_size = config.get_int(SHARED_SIZE, 1024, low=int(not has_experts), high=MAX_HIDDEN_SIZE)
        for key in ("mamba_chunk_size", "init_method", "normalization_function"):
            config.get(key, None)  # without effect
        base = replace(super().read_config(config), architecture="granitemoehybrid")
        if has_experts:
            moe = read_moe_config(config, NAMES, renormalize=True, shared_intermediate_size=shared_size)
            base = replace(base, moe=moe)
        else:
            for key in ("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef"):
                config.get(key, None)
            base = replace(base, intermediate_size=shared_size)
        if config.get_choice("position_embedding_type", ("rope", "nope"), "nope") == "nope":
            base = replace(base, layer_types=(LayerType(None, NO_ROPE),) * len(base.layer_types))
        return cls._with_mamba(config, base)

    @staticmethod
    def _with_mamba(config: ConfigReader, base: DecoderConfig) -> DecoderConfig:
        has_attention = read_attention_layers(config, "linear_attention", lambda index: False)
        inner_size = config.get_int("mamba_expand", 2) * base.hidden_size
        shape = read_mamba2_shape(config, Mamba2Keys(), inner_size, groups=1, state_dim=256)
        if base.activation != "silu":
            raise config.error("hidden_act", "must be silu here")
        bias = config.get_bool("mamba_proj_bias", False)
        mamba = Mamba2Config(
            eps=config.get_float("rms_norm_eps", 1e-6),
            norm_groups=shape.key_heads,
            time_step_limits=read_time_step_limits(config),
            conv_bias=config.get_bool("mamba_conv_bias", True),
            bias=bias,
            out_bias=bias,
        )
        return replace(base.with_states([None if flag else shape for flag in has_attention]), mamba=mamba)

    def build_layer(self, builder: LayerBuilder) -> DecoderLayer:
        """Build one layer."""
        mixer = builder.mamba2("mamba") if builder.state_shape is not None else None
        if self.config.moe is not None:
            return LlamaLayer(builder, mixer)
        if builder.has("shared_mlp.input_linear.weight"):
            mlp = builder.mlp("shared_mlp", "input_linear", "output_linear")
        else:  # GGUF files
            mlp = builder.mlp("mlp")
        return LlamaLayer(builder, mixer, mlp)
