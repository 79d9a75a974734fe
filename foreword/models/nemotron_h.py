"""Nemotron-H, Nemotron Nano 2 and 3: layers of Mamba-2, attention, an MLP or a mixture of experts alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor

from foreword.core.batch import CacheShape, HybridShape, KVShape
from foreword.core.states import StateShape
from foreword.layers.attention import ForwardContext
from foreword.layers.rope import NO_ROPE
from foreword.layers.states import Mamba2Config
from foreword.models.decoder import Decoder
from foreword.models.decoder_config import (
    MAX_LAYERS,
    DecoderConfig,
    LayerType,
    read_decoder_config,
    read_moe_config,
)
from foreword.models.expert_weights import ExpertNames, MoEConfig
from foreword.models.layer_builder import DecoderLayer, LayerBuilder
from foreword.models.llama import Mixer
from foreword.models.mamba2 import Mamba2Keys, read_mamba2_shape, read_time_step_limits
from foreword.weights.config_reader import ConfigReader

MAMBA, ATTENTION, MLP, MOE = "linear_attention", "full_attention", "mlp", "moe"
KINDS = {
    "M": MAMBA,
    "*": ATTENTION,
    "-": MLP,
    "E": MOE,  # hybrid_override_pattern
    "mamba": MAMBA,
    "attention": ATTENTION,  # older names
    **{kind: kind for kind in (MAMBA, ATTENTION, MLP, MOE)},
}
NAMES = ExpertNames(module="mixer", projections=("up_proj", "down_proj"), shared="mixer.shared_experts")
KEYS = Mamba2Keys("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
DEFAULTS = {"head_dim": 128, "num_key_value_heads": 8, "mlp_hidden_act": "relu2"}
UNUSED_KEYS = (  # without effect: RoPE, which no layer has, training, and how others compute
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "expand", "chunk_size"),
    *("time_step_floor", "time_step_max", "time_step_min", "time_step_rank", "rescale_prenorm_residual"),
    *("use_mamba_kernels", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "num_logits_to_keep"),
    *("num_nextn_predict_layers", "mtp_hybrid_override_pattern", "mtp_layers_block_type", "n_shared_experts"),
)
MOE_KEYS = (
    *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "n_group"),
    *("topk_group", "routed_scaling_factor", "moe_shared_expert_intermediate_size", "output_router_logits"),
)


class NemotronHLayer:
    """Norm and one branch: a mixer with its cache, or what each row computes alone."""

    def __init__(self, builder: LayerBuilder) -> None:
        self._norm = builder.norm("norm")
        self._mixer: Mixer | None = None
        if isinstance(builder.cache_shape, StateShape):
            self._mixer = builder.mamba2("mixer")
        elif isinstance(builder.cache_shape, KVShape):
            self._mixer = builder.attention("mixer")
        else:
            self._feed_forward = builder.moe() or builder.ungated_mlp("mixer")

    def __call__(self, x: Tensor, context: ForwardContext, cache: Any) -> Tensor:
        """x [T, H] -> [T, H]"""
        if self._mixer is None:
            return self._feed_forward(self._norm(x), x)
        return self._mixer(self._norm(x), context, cache, x)


class NemotronH(Decoder):
    """MLPs and experts have no gates. Attention has no positional encoding."""

    NORM: ClassVar[str] = "norm_f"
    EMBEDDING: ClassVar[str] = "embeddings"
    WEIGHT_PREFIXES: ClassVar = MappingProxyType({"model.": ("backbone.", "model.")})

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `nemotron_h`"""
        kinds = _read_kinds(config)
        config = config.with_defaults({"num_hidden_layers": len(kinds), **DEFAULTS})
        config.require_value("num_hidden_layers", len(kinds))
        for key in UNUSED_KEYS:
            config.get(key, None)
        config.require_value("attention_bias", False)
        base = read_decoder_config(
            config,
            "nemotron_h",
            layer_types=(LayerType(None, NO_ROPE),) * len(kinds),
            mlp_bias=config.get_bool("mlp_bias", False),
            eps=1e-5,
            eps_key="layer_norm_epsilon",
            activation_key="mlp_hidden_act",
        )
        if ATTENTION not in kinds:
            raise config.error("hybrid_override_pattern", "has no layer with attention, which is needed here")
        config.require_value("residual_in_fp32", False)
        config.require_value("sliding_window", None)
        config.require_value("norm_eps", base.eps)
        shape, mamba = _read_mamba(config, base.eps)
        caches: dict[str, CacheShape] = {MAMBA: shape, ATTENTION: base.kv_shapes[0]}
        return replace(
            base,
            cache_shapes=tuple(caches.get(kind, HybridShape()) for kind in kinds),
            mamba=mamba,
            moe=_read_moe(config, base.activation, kinds),
        )

    def build_layer(self, builder: LayerBuilder) -> DecoderLayer:
        """Build one layer."""
        return NemotronHLayer(builder)


def _read_kinds(config: ConfigReader) -> list[str]:
    """Kind of each layer, from the first of three options that is there."""
    keys = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    key = next((key for key in keys if key in config), keys[-1])
    names, kinds = config.get(key), []
    if not isinstance(names, list | str) or not 0 < len(names) <= MAX_LAYERS:
        raise config.error(key, f"must be a pattern or a list of 1 to {MAX_LAYERS} names")
    for name in names:
        if not isinstance(name, str) or name not in KINDS:
            raise config.error(key, f"has {name!r:.40}; known: {', '.join(KINDS)}")
        kinds.append(KINDS[name])
    for other in keys:
        config.get(other, None)
    return kinds


def _read_mamba(config: ConfigReader, eps: float) -> tuple[StateShape, Mamba2Config]:
    config.require_value("mamba_hidden_act", "silu")
    bias = config.get_bool("use_bias", False)
    config.require_value("mamba_proj_bias", bias)
    shape = read_mamba2_shape(config, KEYS, None, groups=8, state_dim=128)
    mamba = Mamba2Config(
        eps=eps,
        norm_groups=shape.key_heads,
        time_step_limits=read_time_step_limits(config),
        conv_bias=config.get_bool("use_conv_bias", True),
        bias=bias,
        out_bias=bias,
    )
    return shape, mamba


def _read_moe(config: ConfigReader, activation: str, kinds: Sequence[str]) -> MoEConfig | None:
    if MOE not in kinds:
        for key in MOE_KEYS:
            config.get(key, None)
        return None
    config.require_value("moe_latent_size", None)
    moe = read_moe_config(
        config.with_defaults({"num_experts": config.get_int("n_routed_experts", 8)}),
        NAMES,
        renormalize=config.get_bool("norm_topk_prob", True),
        activation=activation,
        size_key="moe_intermediate_size",
        has_experts=[kind == MOE for kind in kinds],
        shared_intermediate_size=config.get_int("moe_shared_expert_intermediate_size", 7688),
        scoring="sigmoid",
        score_bias="gate.e_score_correction_bias",
        scale=1.0,
        groups=(1, 1),
    )
    return replace(moe, experts=replace(moe.experts, gated=False))
