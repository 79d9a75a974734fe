"""RoPE options of a GGUF file, as config.json would name them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foreword.models.gguf.metadata import MetadataReader

__all__ = ["TensorReader", "read_rope_theta", "rope_options"]

Options = dict[str, Any]
TensorReader = Callable[[str], list[float]]  # the values of a small tensor, by name

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
ROPE_FREQS, ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT = ROPE_TENSORS
SCALING_TYPES = ("none", "linear", "yarn", "longrope")


def rope_options(metadata: MetadataReader, read_tensor: TensorReader) -> Options:
    """`rope_theta`, `rope_scaling` and, where only a part of each head turns, `partial_rotary_factor`."""
    options = {"rope_theta": read_rope_theta(metadata, "rope.freq_base", 10000.0)} | _partial_rotary_options(
        metadata
    )
    metadata.ignore("rope.scaling.finetuned")
    scaling = _scaling_options(metadata, read_tensor)
    return options | {"rope_scaling": scaling} if scaling else options


def read_rope_theta(metadata: MetadataReader, key: str, default: float) -> float:
    """The waves' lengths are powers of it."""
    base = metadata.get_float(key, default)
    if base <= 1:
        raise metadata.error(key, f"must be above 1, got {base:g}")
    return base


def _partial_rotary_options(metadata: MetadataReader) -> Options:
    head_dim = metadata.get_head_dim()
    rotated = metadata.get_int("rope.dimension_count", head_dim)
    if rotated == head_dim:
        return {}
    if metadata.architecture != "phi3":
        raise metadata.error("rope.dimension_count", f"must be {head_dim}, the size of a head, got {rotated}")
    if rotated > head_dim or rotated % 2:
        raise metadata.error(
            "rope.dimension_count", f"must be even and at most {head_dim}, the size of a head, got {rotated}"
        )
    return {"partial_rotary_factor": (rotated + 0.5) / head_dim}  # who multiplies by the size rounds down


def _scaling_options(metadata: MetadataReader, read_tensor: TensorReader) -> Options:
    kind = metadata.get_choice("rope.scaling.type", SCALING_TYPES, "linear")
    original = metadata.get_int("rope.scaling.original_context_length", metadata.get_int("context_length"))
    if ROPE_FREQS in metadata.tensors:
        return _frequency_scaling(metadata, kind, read_tensor)
    if ROPE_FACTORS_LONG in metadata.tensors:
        return _longrope_scaling(metadata, kind, original, read_tensor)
    if kind == "longrope":
        raise metadata.error(
            "rope.scaling.type", f"is longrope, but there is no tensor `{ROPE_FACTORS_LONG}`"
        )
    if kind == "yarn":
        return _yarn_scaling(metadata, original)
    return _linear_scaling(metadata) if kind == "linear" else {}


def _linear_scaling(metadata: MetadataReader) -> Options:
    """Older files call it `rope.scale_linear`; 0 means that nothing is scaled."""
    older = metadata.get_optional_float("rope.scale_linear")
    factor = (
        metadata.get_optional_float("rope.scaling.factor") if "rope.scaling.factor" in metadata else older
    )
    return {} if factor in (None, 1.0) else {"type": "linear", "factor": factor}


def _yarn_scaling(metadata: MetadataReader, original_max_position: int) -> Options:
    """Its scale of cosine and sine is derived from the factor: versions of llama.cpp differ in what another one means."""
    for key in ("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor"):
        metadata.require_value(key, 1.0)
    options = {
        "type": "yarn",
        "factor": metadata.get_float("rope.scaling.factor"),
        "original_max_position_embeddings": original_max_position,
    }
    betas = [name for name in ("beta_fast", "beta_slow") if f"rope.scaling.yarn_{name}" in metadata]
    return options | {name: metadata.get_float(f"rope.scaling.yarn_{name}") for name in betas}


def _frequency_scaling(metadata: MetadataReader, scaling_type: str, read_tensor: TensorReader) -> Options:
    """Llama 3's scaling comes as a divisor for each frequency: factors of longrope that are the same at any length."""
    if scaling_type not in ("none", "linear") or _linear_scaling(metadata):
        raise metadata.error("rope.scaling.type", f"asks for more than the tensor `{ROPE_FREQS}` does")
    divisors = read_tensor(ROPE_FREQS)
    return {"type": "longrope", "short_factor": divisors, "long_factor": divisors, "attention_factor": 1.0}


def _longrope_scaling(
    metadata: MetadataReader, scaling_type: str, original_max_position: int, read_tensor: TensorReader
) -> Options:
    if scaling_type == "yarn" or (scaling_type == "linear" and _linear_scaling(metadata)):
        raise metadata.error("rope.scaling.type", f"asks for more than the tensor `{ROPE_FACTORS_LONG}` does")
    metadata.tensor_info(ROPE_FACTORS_SHORT)
    options: Options = {
        "type": "longrope",
        "short_factor": read_tensor(ROPE_FACTORS_SHORT),
        "long_factor": read_tensor(ROPE_FACTORS_LONG),
    }
    scale = (
        {"attention_factor": metadata.get_float("rope.scaling.attn_factor")}
        if "rope.scaling.attn_factor" in metadata
        else {}
    )
    return options | {"original_max_position_embeddings": original_max_position} | scale
