"""Reads RoPE options of config.json, in the layouts of transformers 4 and 5."""

from __future__ import annotations

import math
from dataclasses import replace

from foreword.kernels.ops import MRopeSections
from foreword.layers.rope import ROPE_TYPES, RopeConfig
from foreword.weights.config_reader import MAX_INT, ConfigReader

ROPE_TYPE_NAMES = {name: name for name in ROPE_TYPES} | {"su": "longrope", "mrope": "default"}


def read_rope(
    config: ConfigReader,
    head_dim: int,
    context_length: int,
    default_theta: float = 10000.0,
    mrope_sections: MRopeSections | None = None,
) -> RopeConfig:
    """Read `rope_parameters`, or `rope_theta` and `rope_scaling`; mrope_sections is M-RoPE's default."""
    theta = config.get_float("rope_theta", default_theta)
    share = config.get_float("partial_rotary_factor", 1.0)
    original = config.get_optional_int("original_max_position_embeddings")
    options = config.get_section("rope_parameters")
    older = config.get_section("rope_scaling")
    section = options or older or ConfigReader({}, config.source)
    if mrope_sections is not None:
        mrope_sections = _read_mrope_sections(section, mrope_sections)
    rope = read_rope_section(section, head_dim, context_length, theta, share, original)
    if mrope_sections is not None and sum(mrope_sections.sections) != rope.rotary_dim // 2:
        reason = f"has {sum(mrope_sections.sections)} angles, and a head has {rope.rotary_dim // 2}"
        raise section.error("mrope_section", reason)
    return replace(rope, mrope_sections=mrope_sections)


def read_local_and_global_rope(
    config: ConfigReader, head_dim: int, local_theta: float, global_theta: float
) -> tuple[RopeConfig, RopeConfig]:
    """RoPE of layers with a window and of the others, in either layout: `rope_scaling` is for the latter."""
    context_length = config.get_int("max_position_embeddings")
    nested, scaling = config.get_section("rope_parameters"), config.get_section("rope_scaling")
    empty = ConfigReader({}, config.source)
    local_options = (nested and nested.get_section("sliding_attention")) or empty
    global_options = (nested and nested.get_section("full_attention")) or scaling or empty
    if nested is not None:
        nested.check_all_read()
    return (
        read_rope_section(local_options, head_dim, context_length, local_theta),
        read_rope_section(global_options, head_dim, context_length, global_theta),
    )


def read_query_scaled_rope(config: ConfigReader, head_dim: int, context_length: int) -> RopeConfig:
    """YaRN with `llama_4_scaling_beta`, the growth of queries with their position."""
    options = config.get_section("rope_parameters") or config.get_section("rope_scaling")
    if options is None:
        raise config.error("rope_parameters", "is missing")
    options.require_value("max_position_embeddings", context_length)
    beta = options.get_float("llama_4_scaling_beta")
    theta = config.get_float("rope_theta", 10000.0)
    rope = read_rope_section(options, head_dim, context_length, theta)
    if rope.rope_type != "yarn" or rope.rotary_dim != head_dim:
        raise options.error("rope_type", "must be yarn here, with all values of a head rotated")
    return replace(rope, query_beta=beta)


def read_rope_section(
    options: ConfigReader,
    head_dim: int,
    context_length: int,
    theta: float,
    partial_rotary_factor: float = 1.0,
    original_max_position: int | None = None,
) -> RopeConfig:
    """Read one section of RoPE options; theta and the parameters after it are defaults."""
    key = "rope_type" if "rope_type" in options else "type"
    rope_type = options.get_choice(key, ROPE_TYPE_NAMES, "default")
    if options.get_choice("type", ROPE_TYPE_NAMES, rope_type) != rope_type:
        raise options.error("type", f"must be equal to rope_type, {rope_type}")
    rotary_dim = _read_rotary_dim(options, head_dim, partial_rotary_factor)
    rope = RopeConfig(rope_type, _read_theta(options, theta), rotary_dim)
    if original_max_position is None:
        original_max_position = options.get_int("original_max_position_embeddings", context_length)
    if rope_type in ("linear", "dynamic", "llama3", "yarn"):
        original = context_length if rope_type == "dynamic" else original_max_position
        rope = replace(rope, factor=options.get_float("factor"), original_max_position=original)
    if rope_type == "llama3":
        low, high = options.get_float("low_freq_factor"), options.get_float("high_freq_factor")
        if low == high:
            raise options.error("high_freq_factor", f"must not be low_freq_factor, {low}")
        rope = replace(rope, low_freq_factor=low, high_freq_factor=high)
    if rope_type == "dynamic" and rope.rotary_dim < 4:
        raise options.error("rope_type", f"dynamic needs at least 4 rotated values, got {rope.rotary_dim}")
    if rope_type == "yarn":
        rope = _with_yarn(rope, options)
    if rope_type == "longrope":
        rope = _with_longrope(rope, options, context_length, original_max_position)
    options.check_all_read()
    return rope


def _read_mrope_sections(options: ConfigReader, default: MRopeSections) -> MRopeSections:
    """`mrope_section`. The architecture fixes whether axes are interleaved; the file can only repeat it."""
    options.require_value("mrope_interleaved", default.interleaved)
    sections = options.get("mrope_section", list(default.sections))
    is_list = isinstance(sections, list) and len(sections) == 3
    if not is_list or not all(type(size) is int and size >= 0 for size in sections):
        raise options.error("mrope_section", f"must be a list of 3 whole numbers, got {sections!r:.60}")
    time, row, column = sections
    return MRopeSections((time, row, column), default.interleaved)


def _read_theta(options: ConfigReader, default: float) -> float:
    theta = options.get_float("rope_theta", default)
    if theta <= 1:
        raise options.error("rope_theta", f"must be above 1, got {theta:g}")
    return theta


def _read_rotary_dim(options: ConfigReader, head_dim: int, partial_rotary_factor: float) -> int:
    rotary_dim = int(head_dim * options.get_float("partial_rotary_factor", partial_rotary_factor))
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise options.error("partial_rotary_factor", f"makes {rotary_dim} of {head_dim} values rotate")
    return rotary_dim


def _with_yarn(rope: RopeConfig, options: ConfigReader) -> RopeConfig:
    return replace(
        rope,
        attention_factor=options.get_optional_float("attention_factor"),
        beta_fast=options.get_float("beta_fast", 32.0),
        beta_slow=options.get_float("beta_slow", 1.0),
        mscale=options.get_optional_float("mscale") or 0.0,
        mscale_all_dim=options.get_optional_float("mscale_all_dim") or 0.0,
        truncate=options.get_bool("truncate", True),
    )


def _with_longrope(
    rope: RopeConfig, options: ConfigReader, context_length: int, original_max_position: int
) -> RopeConfig:
    length = rope.rotary_dim // 2
    if original_max_position < 2:
        raise options.error("original_max_position_embeddings", "must be at least 2 for longrope, got 1")
    return replace(
        rope,
        original_max_position=original_max_position,
        factor=options.get_float("factor", context_length / original_max_position),
        attention_factor=options.get_optional_float("attention_factor"),
        short_factor=options.get_floats("short_factor", length),
        long_factor=options.get_floats("long_factor", length),
    )


def scaled_context_length(rope: RopeConfig, context_length: int) -> int:
    """Context length of the model: dynamic and yarn extend max_position_embeddings."""
    if rope.rope_type == "dynamic":
        return min(math.floor(context_length * rope.factor), MAX_INT)
    if rope.rope_type == "yarn":
        return min(max(context_length, math.floor(rope.original_max_position * rope.factor)), MAX_INT)
    return context_length
