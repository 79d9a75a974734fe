"""LFM2: gated short convolutions, and attention in some of the layers."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from foreword.core.states import MAX_KERNEL_SIZE, StateShape
from foreword.models.decoder import Decoder
from foreword.models.decoder_config import (
    MAX_HIDDEN_SIZE,
    DecoderConfig,
    QKNorm,
    read_attention_layers,
    read_decoder_config,
)
from foreword.models.layer_builder import DecoderLayer, LayerBuilder
from foreword.models.llama import LlamaLayer, Mixer
from foreword.weights.config_reader import ConfigReader

THETA = 1_000_000.0
QK_NORM = QKNorm(("q_layernorm", "k_layernorm"))
TRAINING_KEYS = (
    "block_mlp_init_scale",
    "block_out_init_scale",
    "block_use_xavier_init",
    "conv_use_xavier_init",
)


class Lfm2(Decoder):
    """The MLP has two thirds of `intermediate_size`, rounded up, unless block_auto_adjust_ff_dim is off."""

    NORM: ClassVar[str] = "embedding_norm"

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `lfm2`"""
        for key in ("block_norm_eps", *TRAINING_KEYS):
            config.get(key, None)  # without effect
        base = read_conv_decoder(config, "lfm2", _read_intermediate_size(config))
        for key in ("block_dim", "conv_dim", "conv_dim_out"):
            config.require_value(key, base.hidden_size)
        for key, value in (("num_heads", base.num_heads), ("block_use_swiglu", True), ("use_pos_enc", True)):
            config.require_value(key, value)
        return base

    def build_layer(self, builder: LayerBuilder) -> DecoderLayer:
        """Build one layer."""
        mixer: Mixer
        if builder.state_shape is None:
            mixer = builder.attention("self_attn", out="out_proj")
        else:
            mixer = builder.short_conv("conv")
        mlp = builder.feed_forward("feed_forward", down_name="w2", gate_up_names=("w1", "w3"))
        return LlamaLayer(builder, mixer, mlp, norms=("operator_norm", "ffn_norm"))


def read_conv_decoder(config: ConfigReader, architecture: str, intermediate_size: int) -> DecoderConfig:
    """Layers have attention or a convolution: by `layer_types`, or else by `full_attn_idxs`."""
    base = read_decoder_config(
        config,
        architecture,
        qk_norm=QK_NORM,
        eps=1e-5,
        eps_key="norm_eps",
        theta=THETA,
        activation="silu",
        intermediate_size=intermediate_size,
        tie_word_embeddings=config.get_bool("tie_embedding", True),
    )
    shape = StateShape(base.hidden_size, config.get_int("conv_L_cache", 3, low=2, high=MAX_KERNEL_SIZE))
    indexes = config.get("full_attn_idxs", None)
    if indexes is not None and (not isinstance(indexes, list) or any(type(i) is not int for i in indexes)):
        raise config.error("full_attn_idxs", f"must be a list of whole numbers, got {indexes!r:.60}")
    flags = read_attention_layers(config, "conv", lambda index: indexes is None or index in indexes)
    states = base.with_states([None if has_attention else shape for has_attention in flags])
    return replace(states, conv_bias=config.get_bool("conv_bias", False))


def _read_intermediate_size(config: ConfigReader) -> int:
    key = "block_ff_dim" if "block_ff_dim" in config else "intermediate_size"
    config.get("intermediate_size", None)
    size = config.get_int(key, high=MAX_HIDDEN_SIZE)
    multiple = config.get_int("block_multiple_of", 256, high=MAX_HIDDEN_SIZE)
    factor = config.get_float("block_ffn_dim_multiplier", 1.0)
    if not config.get_bool("block_auto_adjust_ff_dim", True):
        return size
    size = -(-int(factor * int(2 * size / 3)) // multiple) * multiple
    if not 0 < size <= MAX_HIDDEN_SIZE:
        raise config.error("block_ffn_dim_multiplier", f"makes an MLP of {size} values")
    return size
