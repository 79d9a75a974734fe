"""Qwen3-Next: Gated DeltaNet in most layers, gated attention in the others, a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from foreword.core.states import HEAD_DIM_MULTIPLE, MAX_KERNEL_SIZE, StateShape
from foreword.models.decoder import Decoder
from foreword.models.decoder_config import (
    MAX_HIDDEN_SIZE,
    DecoderConfig,
    LayerType,
    QKNorm,
    read_attention_layers,
    read_decoder_config,
    read_head_dim,
    read_moe_config,
    read_num_layers,
    read_rope,
)
from foreword.models.expert_weights import ExpertNames, MoEConfig
from foreword.models.layer_builder import DecoderLayer, LayerBuilder
from foreword.models.llama import LlamaLayer
from foreword.models.qwen3_moe import read_expert_layers
from foreword.weights.config_reader import ConfigReader

HEAD_DIM = 256
ROTARY_FACTOR = 0.25
INTERVAL = 4  # every n-th layer has attention
MTP_KEYS = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
NAMES = ExpertNames(shared_gate="mlp.shared_expert_gate")


class Qwen3Next(Decoder):
    """Projections of a Gated DeltaNet are joined by key head."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `qwen3_next`"""
        has_experts = read_expert_layers(config)
        renormalize = config.get_bool("norm_topk_prob", True)
        base = read_hybrid_config(
            config, "qwen3_next", config.get_int("intermediate_size", high=MAX_HIDDEN_SIZE)
        )
        return replace(base, moe=read_hybrid_moe(config, has_experts, renormalize))

    def build_layer(self, builder: LayerBuilder) -> DecoderLayer:
        """Build one layer."""
        has_state = builder.state_shape is not None
        return LlamaLayer(builder, builder.gated_delta_net("linear_attn", fused=True) if has_state else None)


def read_hybrid_config(config: ConfigReader, architecture: str, intermediate_size: int) -> DecoderConfig:
    """All options but those of experts."""
    head_dim, context_length = read_head_dim(config, HEAD_DIM), config.get_int("max_position_embeddings")
    rope = read_rope(
        config, head_dim, context_length, partial_rotary_factor=ROTARY_FACTOR, ignores_mrope=True
    )
    base = read_decoder_config(
        config,
        architecture,
        layer_types=(LayerType(None, rope),) * read_num_layers(config),
        head_dim=head_dim,
        bias_key="attention_bias",
        qk_norm=QKNorm(),
        intermediate_size=intermediate_size,
    )
    interval = config.get_int("full_attention_interval", INTERVAL)
    flags = read_attention_layers(config, "linear_attention", lambda index: (index + 1) % interval == 0)
    shape = _read_state_shape(config)
    if base.activation != "silu":
        raise config.error("hidden_act", "must be silu here")
    for key in MTP_KEYS:  # the files decide
        config.get(key, None)
    shapes = tuple(None if has_attention else shape for has_attention in flags)
    return replace(base.with_states(shapes), attn_gate=True, norm_offset=1.0)


def read_hybrid_moe(config: ConfigReader, has_experts: list[bool], renormalize: bool) -> MoEConfig:
    """A shared expert behind a sigmoid."""
    return read_moe_config(
        config,
        NAMES,
        renormalize=renormalize,
        size_key="moe_intermediate_size",
        has_experts=has_experts,
        shared_intermediate_size=config.get_int("shared_expert_intermediate_size"),
    )


def _read_state_shape(config: ConfigReader) -> StateShape:
    key_heads, value_heads = (
        config.get_int("linear_num_key_heads", 16),
        config.get_int("linear_num_value_heads", 32),
    )
    key_dim, value_dim = (
        config.get_int("linear_key_head_dim", 128),
        config.get_int("linear_value_head_dim", 128),
    )
    if value_heads % key_heads:
        raise config.error(
            "linear_num_value_heads", f"must be a multiple of linear_num_key_heads, {key_heads}"
        )
    for key, size in (("linear_key_head_dim", key_dim), ("linear_value_head_dim", value_dim)):
        if size % HEAD_DIM_MULTIPLE:
            raise config.error(key, f"must be a multiple of {HEAD_DIM_MULTIPLE} here, got {size}")
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    if channels > MAX_HIDDEN_SIZE:
        raise config.error("linear_num_value_heads", f"makes {channels} channels; at most {MAX_HIDDEN_SIZE}")
    kernel_size = config.get_int("linear_conv_kernel_dim", 4, low=2, high=MAX_KERNEL_SIZE)
    return StateShape(channels, kernel_size, key_heads, value_heads, key_dim, value_dim)
