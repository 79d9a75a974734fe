"""Options of config.json for the experts of GGUF architectures."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from foreword.weights.gguf.latent_config import LATENT_ARCHITECTURES, has_score_bias
from foreword.weights.gguf.metadata import MetadataReader
from foreword.weights.gguf.state_config import (
    NEMOTRON_H_ARCHITECTURES,
    ROUTED_ARCHITECTURES,
    SHARED_SIZE,
    nemotron_h_expert_options,
    read_num_dense_layers,
)

SIZED_EXPERT_ARCHITECTURES = (
    *("lfm2moe", "qwen2moe", "qwen35moe", "qwen3moe", "qwen3next"),
    *ROUTED_ARCHITECTURES,
)
NORM_OPTION_ARCHITECTURES = ("lfm2moe", "olmoe", "qwen2moe", "qwen3moe", "qwen3next")  # `norm_topk_prob`
SHARED_EXPERT_ARCHITECTURES = ("qwen2moe", "qwen35moe", "qwen3next")  # in all layers
MOE_ARCHITECTURES = (
    *LATENT_ARCHITECTURES,
    *("ernie4_5-moe", "gpt-oss", "granitemoe", "hunyuan-moe", "lfm2moe", "minimax-m2", "olmoe"),
    *ROUTED_ARCHITECTURES,
    *("qwen2moe", "qwen35moe", "qwen3moe", "qwen3next"),
)
EXPERTS_TENSOR, SHARED_TENSOR = "blk.{}.ffn_down_exps.weight", "blk.0.ffn_down_shexp.weight"
SIGMOID_ARCHITECTURES = ("lfm2moe", "minimax-m2", *ROUTED_ARCHITECTURES)
SHARED_EXPERT_OPTIONS: Mapping[str, str] = MappingProxyType({"bailingmoe2": "num_shared_experts"})
SOFTMAX_GATING, SIGMOID_GATING = 1, 2
SHARED_COUNT = "expert_shared_count"
Options = dict[str, Any]


def is_mixtral(metadata: MetadataReader) -> bool:
    return metadata.architecture == "llama" and has_experts(metadata)


def has_experts(metadata: MetadataReader) -> bool:
    if metadata.architecture in ("granitehybrid", "llama"):
        return metadata.get_int("expert_count", 0, low=0) > 0
    return metadata.architecture in MOE_ARCHITECTURES


def check_experts(metadata: MetadataReader) -> None:
    """The first layer decides: in GGUF files all layers have experts, but LFM2's first ones."""
    num_dense = read_num_dense_layers(metadata)
    if num_dense:
        size = metadata.get_int("feed_forward_length")
        metadata.check_dimension("feed_forward_length", "blk.0.ffn_up.weight", 0, size)
    if "blk.0.ffn_up.0.weight" in metadata.tensors:
        hint = "tensors for each expert are of files from before 2024; convert the model again"
        raise metadata.error("expert_count", hint)
    for key, dimension, expected in (
        ("expert_count", 0, metadata.get_int("expert_count")),
        (expert_size_key(metadata), 2, metadata.get_int(expert_size_key(metadata))),
    ):
        metadata.check_dimension(key, EXPERTS_TENSOR.format(num_dense), dimension, expected, 3)
    if SHARED_TENSOR in metadata.tensors and SHARED_COUNT not in metadata:  # see _read_num_shared()
        metadata.check_dimension(SHARED_SIZE, SHARED_TENSOR, 1, metadata.get_int(SHARED_SIZE, low=0))


def expert_size_key(metadata: MetadataReader) -> str:
    key = "expert_feed_forward_length"
    return key if key in metadata else "feed_forward_length"


def expert_options(metadata: MetadataReader) -> Options:
    """The architecture fixes the router's rule; keys can only repeat it."""
    if metadata.architecture in NEMOTRON_H_ARCHITECTURES:
        return nemotron_h_expert_options(metadata)
    if not has_experts(metadata):
        for key in ("expert_count", "expert_used_count"):
            metadata.require_value(key, 0)
        return {}
    name = metadata.architecture
    count, used = metadata.get_int("expert_count"), metadata.get_int("expert_used_count")
    if used > count:
        raise metadata.error("expert_used_count", f"must be at most expert_count, {count}, got {used}")
    options: Options = {"num_experts": count, "num_experts_per_tok": used}
    if name in LATENT_ARCHITECTURES:
        return options | _latent_options(metadata)
    gating = SIGMOID_GATING if name in SIGMOID_ARCHITECTURES else SOFTMAX_GATING
    metadata.require_value("expert_gating_func", gating)
    if name in ROUTED_ARCHITECTURES:
        return options | _routed_options(metadata)
    if name == "ernie4_5-moe":
        return _ernie_options(metadata, count, used)
    renormalizes = name not in ("olmoe", "qwen2moe")
    metadata.require_value("expert_weights_norm", renormalizes)
    metadata.require_value("expert_weights_scale", 1.0)
    if name in SIZED_EXPERT_ARCHITECTURES:
        options["moe_intermediate_size"] = metadata.get_int(expert_size_key(metadata))
    if name in NORM_OPTION_ARCHITECTURES:
        options["norm_topk_prob"] = renormalizes
    if name in SHARED_EXPERT_ARCHITECTURES:
        options["shared_expert_intermediate_size"] = metadata.get_int(SHARED_SIZE)
    if name in ("granitehybrid", "granitemoe") and metadata.get_int(SHARED_SIZE, 0, low=0):
        options["shared_intermediate_size"] = metadata.get_int(SHARED_SIZE)
    return options


def _routed_options(metadata: MetadataReader) -> Options:
    """Experts as in DeepSeek-V3: keys for the weights' sum and scale, groups, and shared experts."""
    size = metadata.get_int(expert_size_key(metadata))
    shared = _read_num_shared(metadata, size)
    metadata.require_value(SHARED_SIZE, shared * size)
    return {
        "moe_intermediate_size": size,
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", False)),
        "routed_scaling_factor": metadata.get_optional_float("expert_weights_scale") or 1.0,
        **_group_options(metadata),
        "first_k_dense_replace": read_num_dense_layers(metadata),
        SHARED_EXPERT_OPTIONS.get(metadata.architecture, "n_shared_experts"): shared,
    }


def _latent_options(metadata: MetadataReader) -> dict[str, Any]:
    """The router's rule: a softmax, or with a bias sigmoids."""
    is_sigmoid = has_score_bias(metadata)
    metadata.require_value("expert_gating_func", SIGMOID_GATING if is_sigmoid else SOFTMAX_GATING)
    size = metadata.get_int("expert_feed_forward_length")
    options: dict[str, Any] = {
        "first_k_dense_replace": read_num_dense_layers(metadata),
        "moe_intermediate_size": size,
        "n_shared_experts": _read_num_shared(metadata, size),
        "routed_scaling_factor": metadata.get_float("expert_weights_scale", 1.0),
        **_group_options(metadata),
    }
    if is_sigmoid:
        norm = metadata.get("expert_weights_norm", False)
        if type(norm) is not bool:
            raise metadata.error("expert_weights_norm", f"must be a flag, got {norm!r:.60}")
        return options | {"norm_topk_prob": norm, "num_nextn_predict_layers": 0}
    metadata.require_value("expert_weights_norm", False)
    return options | {"topk_method": "greedy" if options["n_group"] == 1 else "group_limited_greedy"}


def _ernie_options(metadata: MetadataReader, count: int, used: int) -> dict[str, Any]:
    """Options of ernie4_5-moe, which have names of their own; the size of shared experts is the tensors'."""
    size, first = metadata.get_int("expert_feed_forward_length"), read_num_dense_layers(metadata)
    shared = _read_num_shared(metadata, size)
    metadata.ignore("expert_shared_feed_forward_length")  # the converter derives it from other sizes
    for key, value in (("expert_weights_norm", True), ("expert_weights_scale", 1.0)):
        metadata.require_value(key, value)
    metadata.require_value("interleave_moe_layer_step", 1)
    return {
        "moe_num_experts": count,
        "moe_k": used,
        "moe_intermediate_size": size,
        "moe_num_shared_experts": shared,
        "moe_layer_start_index": first,
    }


def _group_options(metadata: MetadataReader) -> dict[str, Any]:
    """Groups of experts, and how many of them a row chooses from."""
    count, used = metadata.get_int("expert_count"), metadata.get_int("expert_used_count")
    groups, topk = metadata.get_int("expert_group_count", 1), metadata.get_int("expert_group_used_count", 1)
    if count % groups or (groups > 1 and count == groups):
        raise metadata.error("expert_group_count", f"{groups} does not divide {count} experts into groups")
    if topk > groups or used > topk * (count // groups):
        reason = f"{topk} of {groups} groups do not have expert_used_count {used} experts"
        raise metadata.error("expert_group_used_count", reason)
    return {"n_group": groups, "topk_group": topk}


def _read_num_shared(metadata: MetadataReader, size: int) -> int:
    """Shared experts of this size, compared with the tensors of the first layer with experts."""
    count = metadata.get_int(SHARED_COUNT, 0, low=0)
    tensor = f"blk.{read_num_dense_layers(metadata)}.ffn_down_shexp.weight"
    if count:
        metadata.check_dimension(SHARED_COUNT, tensor, 1, count * size)
    elif tensor in metadata.tensors:
        raise metadata.error(SHARED_COUNT, f"is 0, but tensor `{tensor}` is there")
    return count
