"""Cohere's Command R, R7B and A: attention and MLP side by side behind one layer norm, interleaved RoPE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from foreword.layers.attention import Attention, ForwardContext
from foreword.layers.mlp import MLP, MoE, UngatedMLP
from foreword.layers.rope import NO_ROPE
from foreword.models.decoder import Decoder
from foreword.models.decoder_config import (
    DecoderConfig,
    LayerType,
    QKNorm,
    read_decoder_config,
    read_head_dim,
    read_layer_windows,
    read_moe_config,
    read_rope,
    read_window,
)
from foreword.models.deepseek_v2 import NAMES, read_mlp_types
from foreword.models.expert_weights import MoEConfig
from foreword.models.layer_builder import DecoderLayer, LayerBuilder
from foreword.weights.config_reader import ConfigReader

LOGIT_SCALE = 0.0625
HEAD_DIM = 128  # cohere2_moe's default
WINDOW = 4096
WINDOW_PERIOD = 4  # every n-th layer has full attention


class ParallelLayer:
    """x + attention(norm(x)) + mlp(norm(x)), added in this order."""

    def __init__(self, builder: LayerBuilder, attention: Attention, mlp: MLP | MoE | UngatedMLP) -> None:
        self._norm = builder.norm("input_layernorm")
        self._attention = attention
        self._mlp = mlp

    def __call__(self, x: Tensor, context: ForwardContext, cache: Any) -> Tensor:
        """x [T, H] -> [T, H]"""
        normed = self._norm(x)
        return self._mlp(normed, self._attention(normed, context, cache, x))


class Cohere(Decoder):
    """Command R (08-2024 too), and R+, which norms its heads, each by weights of its own."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `cohere`"""
        base = _read_cohere_config(config, "cohere", None)
        norms_heads = config.get_bool("use_qk_norm", False)
        return replace(base, qk_norm=QKNorm(by_head=True)) if norms_heads else base

    def build_layer(self, builder: LayerBuilder) -> DecoderLayer:
        """Build one layer."""
        return ParallelLayer(builder, builder.attention("self_attn"), builder.feed_forward())


class Cohere2(Cohere):
    """Command R7B and A, Aya: windows in three of four layers; the others have no RoPE."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `cohere2`"""
        for key, value in (("use_qk_norm", False), ("use_gated_activation", True)):
            config.require_value(key, value)
        for key, value in (("use_parallel_block", True), ("use_parallel_embedding", False)):
            config.require_value(key, value)
        for key in (
            "position_embedding_type",
            "rotary_pct",
            "order_of_interleaved_layers",
            "use_embedding_sharing",
        ):
            config.get(key, None)
        window = read_window(config, WINDOW)
        period = config.get_int("sliding_window_pattern", WINDOW_PERIOD)
        windows = read_layer_windows(
            config, window, lambda index: window is not None and (index + 1) % period != 0
        )
        rope = read_rope(config, read_head_dim(config), config.get_int("max_position_embeddings"))
        return _read_cohere_config(
            config, "cohere2", [LayerType(item, rope if item else NO_ROPE) for item in windows]
        )


class Cohere2Moe(Cohere):
    """Experts in all but the first layers, which have RoPE even without a window. Norms may be RMS norms."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `cohere2_moe`"""
        num_dense = config.get_int("first_k_dense_replace", 0, low=0)
        has_experts = read_mlp_types(config, num_dense)
        window, period = read_window(config, WINDOW), config.get_int("sliding_window_pattern", WINDOW_PERIOD)
        prefix_period = config.get_int("prefix_dense_sliding_window_pattern", 1)

        def is_sliding(index: int) -> bool:
            if index < num_dense:
                return (index + 1) % prefix_period != 0
            return (index - num_dense + 1) % period != 0

        windows = read_layer_windows(config, window, lambda index: window is not None and is_sliding(index))
        rope = read_rope(config, read_head_dim(config, HEAD_DIM), config.get_int("max_position_embeddings"))
        has_rope = [
            window is not None or (prefix_period == 1 and not sparse)
            for window, sparse in zip(windows, has_experts, strict=True)
        ]
        layer_types = [
            LayerType(item, rope if on else NO_ROPE) for item, on in zip(windows, has_rope, strict=True)
        ]
        size = config.get_optional_int("prefix_dense_intermediate_size")
        base = _read_cohere_config(config, "cohere2_moe", layer_types, HEAD_DIM, size)
        if "rms_norm_eps" in config:
            base = replace(base, norm_type="rms", eps=config.get_float("rms_norm_eps"))
        moe = _read_moe(config, has_experts)
        num_mtp_layers = config.get_int("num_nextn_predict_layers", 0, low=0)
        strategy = config.get_choice("shared_expert_combination_strategy", ("average", "sum"), "average")
        if moe.shared_intermediate_size and strategy == "average":
            moe = replace(moe, experts=replace(moe.experts, scale=0.5))
            base = replace(base, row_scales={f"{NAMES.shared}.down_proj.weight": 0.5})
        return replace(base, moe=moe, num_mtp_layers=num_mtp_layers)


def _read_moe(config: ConfigReader, has_experts: list[bool]) -> MoEConfig:
    shared = config.get_int("num_shared_experts", 0, low=0)
    scoring = config.get_choice("expert_selection_fn", ("softmax", "sigmoid"), "softmax")
    renormalizes = config.get_bool("norm_topk_prob", True)
    return read_moe_config(
        config,
        NAMES,
        renormalize=renormalizes or scoring == "softmax",
        has_experts=has_experts,
        shared_intermediate_size=shared * config.get_int("intermediate_size"),
        scoring=scoring,
    )


def _read_cohere_config(
    config: ConfigReader,
    architecture: str,
    layer_types: list[LayerType] | None,
    head_dim: int | None = None,
    intermediate_size: int | None = None,
) -> DecoderConfig:
    base = read_decoder_config(
        config,
        architecture,
        layer_types=layer_types,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        bias_key="attention_bias",
        eps=1e-5,
        eps_key="layer_norm_eps",
        tie_word_embeddings=True,
    )
    scale = config.get_float("logit_scale", LOGIT_SCALE)
    return replace(base, norm_type="layer", interleaved_rope=True, logit_scale=scale)
