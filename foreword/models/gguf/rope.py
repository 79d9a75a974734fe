"""RoPE options of a GGUF file, as config.json would name them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foreword.models.gguf.keys import Keys

__all__ = ["Factors", "frequency_base", "rope_options"]

Options = dict[str, Any]
Factors = Callable[[str], list[float]]  # the values of a small tensor, by name

TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
FREQUENCIES, LONG, SHORT = TENSORS
SCALINGS = ("none", "linear", "yarn", "longrope")


def rope_options(keys: Keys, factors: Factors) -> Options:
    """`rope_theta`, `rope_scaling` and, where only a part of each head turns, `partial_rotary_factor`."""
    options = {"rope_theta": frequency_base(keys, "rope.freq_base", 10000.0)} | _rotated_share(keys)
    keys.ignore("rope.scaling.finetuned")
    scaling = _scaling(keys, factors)
    return options | {"rope_scaling": scaling} if scaling else options


def frequency_base(keys: Keys, key: str, default: float) -> float:
    """The waves' lengths are powers of it."""
    base = keys.number(key, default)
    if base <= 1:
        raise keys.refuse(key, f"must be above 1, got {base:g}")
    return base


def _rotated_share(keys: Keys) -> Options:
    head_dim = keys.head_dim()
    rotated = keys.whole("rope.dimension_count", head_dim)
    if rotated == head_dim:
        return {}
    if keys.architecture != "phi3":
        raise keys.refuse("rope.dimension_count", f"must be {head_dim}, the size of a head, got {rotated}")
    if rotated > head_dim or rotated % 2:
        raise keys.refuse("rope.dimension_count", f"must be even and at most {head_dim}, the size of a head, got {rotated}")
    return {"partial_rotary_factor": (rotated + 0.5) / head_dim}  # who multiplies by the size rounds down


def _scaling(keys: Keys, factors: Factors) -> Options:
    kind = keys.choice("rope.scaling.type", SCALINGS, "linear")
    original = keys.whole("rope.scaling.original_context_length", keys.whole("context_length"))
    if FREQUENCIES in keys.tensors:
        return _divided(keys, kind, factors)
    if LONG in keys.tensors:
        return _long(keys, kind, original, factors)
    if kind == "longrope":
        raise keys.refuse("rope.scaling.type", f"is longrope, but there is no tensor `{LONG}`")
    if kind == "yarn":
        return _yarn(keys, original)
    return _linear(keys) if kind == "linear" else {}


def _linear(keys: Keys) -> Options:
    """Older files call it `rope.scale_linear`; 0 means that nothing is scaled."""
    older = keys.optional_number("rope.scale_linear")
    factor = keys.optional_number("rope.scaling.factor") if "rope.scaling.factor" in keys else older
    return {} if factor in (None, 1.0) else {"type": "linear", "factor": factor}


def _yarn(keys: Keys, original: int) -> Options:
    """Its scale of cosine and sine is derived from the factor: versions of llama.cpp differ in what another one means."""
    for key in ("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor"):
        keys.expect(key, 1.0)
    options = {"type": "yarn", "factor": keys.number("rope.scaling.factor"), "original_max_position_embeddings": original}
    betas = [name for name in ("beta_fast", "beta_slow") if f"rope.scaling.yarn_{name}" in keys]
    return options | {name: keys.number(f"rope.scaling.yarn_{name}") for name in betas}


def _divided(keys: Keys, kind: str, factors: Factors) -> Options:
    """Llama 3's scaling comes as a divisor for each frequency: factors of longrope that are the same at any length."""
    if kind not in ("none", "linear") or _linear(keys):
        raise keys.refuse("rope.scaling.type", f"asks for more than the tensor `{FREQUENCIES}` does")
    divisors = factors(FREQUENCIES)
    return {"type": "longrope", "short_factor": divisors, "long_factor": divisors, "attention_factor": 1.0}


def _long(keys: Keys, kind: str, original: int, factors: Factors) -> Options:
    if kind == "yarn" or (kind == "linear" and _linear(keys)):
        raise keys.refuse("rope.scaling.type", f"asks for more than the tensor `{LONG}` does")
    keys.tensor(SHORT)
    options: Options = {"type": "longrope", "short_factor": factors(SHORT), "long_factor": factors(LONG)}
    scale = {"attention_factor": keys.number("rope.scaling.attn_factor")} if "rope.scaling.attn_factor" in keys else {}
    return options | {"original_max_position_embeddings": original} | scale
