"""RoPE options of a checkpoint, in the layouts of transformers 4 and 5."""

from __future__ import annotations

import math
from dataclasses import replace

from foreword.kernels.ops import Axes
from foreword.layers.rope import ROPE_TYPES, RopeConfig
from foreword.models.config import ConfigReader

__all__ = ["read_rope", "rope_from_table", "scaled_context"]

NAMES = {name: name for name in ROPE_TYPES} | {"su": "longrope", "mrope": "default"}


def read_rope(
    config: ConfigReader, head_dim: int, context: int, default_theta: float = 10000.0, axes: Axes | None = None
) -> RopeConfig:
    """From `rope_parameters`, or from `rope_theta` and `rope_scaling` beside each other.

    context  the checkpoint's max_position_embeddings
    axes     of models with M-RoPE: theirs, where the checkpoint does not say how many angles each direction has
    """
    theta = config.number("rope_theta", default_theta)
    share = config.number("partial_rotary_factor", 1.0)
    original = config.optional_whole("original_max_position_embeddings")
    options = config.table("rope_parameters")
    older = config.table("rope_scaling")
    table = options or older or ConfigReader({}, config.source)
    own = None if axes is None else _read_axes(table, axes)
    rope = rope_from_table(table, head_dim, context, theta, share, original)
    if own is not None and sum(own.sections) != rope.rotary_dim // 2:
        raise table.refuse("mrope_section", f"has {sum(own.sections)} angles, and a head has {rope.rotary_dim // 2}")
    return replace(rope, axes=own)


def rope_from_table(
    options: ConfigReader, head_dim: int, context: int, theta: float, share: float = 1.0, original: int | None = None
) -> RopeConfig:
    """One table of RoPE options; `theta`, `share` and `original` hold where it does not say otherwise."""
    rope_type = options.choice("rope_type" if "rope_type" in options else "type", NAMES, "default")
    if options.choice("type", NAMES, rope_type) != rope_type:
        raise options.refuse("type", f"must be rope_type, {rope_type}")
    rope = RopeConfig(rope_type, _theta(options, theta), _rotary_dim(options, head_dim, share))
    original = original or options.whole("original_max_position_embeddings", context)
    if rope_type in ("linear", "dynamic", "llama3", "yarn"):
        rope = replace(rope, factor=options.number("factor"), original=context if rope_type == "dynamic" else original)
    if rope_type == "llama3":
        low, high = options.number("low_freq_factor"), options.number("high_freq_factor")
        if low == high:
            raise options.refuse("high_freq_factor", f"must not be low_freq_factor, {low}")
        rope = replace(rope, low_freq_factor=low, high_freq_factor=high)
    if rope_type == "dynamic" and rope.rotary_dim < 4:
        raise options.refuse("rope_type", f"dynamic needs heads of at least 4 values that rotate, got {rope.rotary_dim}")
    if rope_type == "yarn":
        rope = _with_yarn(rope, options)
    if rope_type == "longrope":
        rope = _with_longrope(rope, options, context, original)
    options.finish()
    return rope


def _read_axes(options: ConfigReader, axes: Axes) -> Axes:
    """`mrope_section`; whether directions take turns is the architecture's affair, the file can only repeat it."""
    options.expect("mrope_interleaved", axes.interleaved)
    sections = options.raw("mrope_section", list(axes.sections))
    if not isinstance(sections, list) or len(sections) != 3 or not all(type(item) is int and item >= 0 for item in sections):
        raise options.refuse("mrope_section", f"must be a list of 3 whole numbers, got {sections!r:.60}")
    time, row, column = sections
    return Axes((time, row, column), axes.interleaved)


def _theta(options: ConfigReader, default: float) -> float:
    theta = options.number("rope_theta", default)
    if theta <= 1:
        raise options.refuse("rope_theta", f"must be above 1, got {theta:g}")
    return theta


def _rotary_dim(options: ConfigReader, head_dim: int, share: float) -> int:
    rotary_dim = int(head_dim * options.number("partial_rotary_factor", share))
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise options.refuse("partial_rotary_factor", f"makes {rotary_dim} of {head_dim} values rotate")
    return rotary_dim


def _with_yarn(rope: RopeConfig, options: ConfigReader) -> RopeConfig:
    return replace(
        rope,
        attention_factor=options.optional_number("attention_factor"),
        beta_fast=options.number("beta_fast", 32.0),
        beta_slow=options.number("beta_slow", 1.0),
        mscale=options.optional_number("mscale") or 0.0,
        mscale_all_dim=options.optional_number("mscale_all_dim") or 0.0,
        truncate=options.flag("truncate", True),
    )


def _with_longrope(rope: RopeConfig, options: ConfigReader, context: int, original: int) -> RopeConfig:
    length = rope.rotary_dim // 2
    if original < 2:
        raise options.refuse("original_max_position_embeddings", "must be at least 2 for longrope, got 1")
    return replace(
        rope,
        original=original,
        factor=options.number("factor", context / original),
        attention_factor=options.optional_number("attention_factor"),
        short_factor=options.numbers("short_factor", length),
        long_factor=options.numbers("long_factor", length),
    )


def scaled_context(rope: RopeConfig, context: int) -> int:
    """Positions that the model was made for: dynamic and yarn reach beyond max_position_embeddings."""
    if rope.rope_type == "dynamic":
        return math.floor(context * rope.factor)
    if rope.rope_type == "yarn":
        return max(context, math.floor(rope.original * rope.factor))
    return context
