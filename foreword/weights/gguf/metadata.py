"""Strict reader of one architecture's keys in GGUF metadata, and RoPE options as in config.json."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from foreword.errors import CheckpointError
from foreword.weights.config_reader import MISSING, ConfigReader
from foreword.weights.gguf.header import GGUFFile, TensorInfo

Options = dict[str, Any]
TensorReader = Callable[[str], list[float]]  # reads the values of a small tensor by name

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
ROPE_FREQS, ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT = ROPE_TENSORS
YARN_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
MIN_LOG_MULTIPLIER, MAX_LOG_MULTIPLIER = 1e-6, 1e3
DEFAULT_THETA, LOGIT_SOFTCAP = 10000.0, 30.0  # the format's defaults
SCALING_TYPES = ("none", "linear", "yarn", "longrope")
PARTIAL_ROPE_ARCHITECTURES = (
    *("bailingmoe2", "glm4", "glm4moe", "minimax-m2", "nemotron", "phi2", "phi3"),
    *("qwen35", "qwen35moe", "qwen3next", "stablelm"),
)


class MetadataReader:
    """Reads keys without their prefix `architecture.`; errors name the full key."""

    def __init__(self, gguf: GGUFFile, architecture: str, key_prefix: str = "") -> None:
        """key_prefix: if it is not the architecture"""
        prefix = f"{key_prefix or architecture}."
        values = {
            key: _collapse_uniform(value) for key, value in gguf.metadata.items() if key.startswith(prefix)
        }
        self.architecture = architecture
        self.tensors = gguf.tensors
        self.gguf = gguf
        self._general = ConfigReader(gguf.metadata, str(gguf.path))
        self._reader = ConfigReader(values, str(gguf.path))
        self._prefix = prefix

    def __contains__(self, key: str) -> bool:
        return self._prefix + key in self._reader

    def get(self, key: str, *default: Any) -> Any:
        return self._reader.get(self._prefix + key, *default)

    def get_int(self, key: str, default: int | None = None, low: int = 1) -> int:
        """A whole number of at least `low`; required unless there is a default."""
        return self._reader.get_int(self._prefix + key, MISSING if default is None else default, low)

    def get_float(self, key: str, default: float | None = None) -> float:
        """A positive number; required unless there is a default."""
        return self._reader.get_float(self._prefix + key, MISSING if default is None else default)

    def get_optional_float(self, key: str, default: float | None = None) -> float | None:
        """A positive number; None if it is 0, or missing without a default."""
        return self.get_float(key, default) if self.get(key, default or 0) != 0 else None

    def get_choice(self, key: str, names: tuple[str, ...], default: str) -> str:
        return self._reader.get_choice(self._prefix + key, names, default)

    def require_value(self, key: str, value: Any) -> None:
        """The key must be missing or have this value, the only supported one."""
        self._reader.require_value(self._prefix + key, value)

    def require_general_value(self, key: str, value: Any) -> None:
        """Like require_value, for a full key."""
        self._general.require_value(key, value)

    def get_general_numbers(self, key: str, count: int) -> list[float]:
        """A number for each of `count` layers, or one for all, of a full key."""
        value = self._general.get(key)
        values = value if isinstance(value, list) else [value] * count
        if len(values) != count or not all(
            type(each) in (int, float) and math.isfinite(each) for each in values
        ):
            raise self._general.error(key, f"must be a number or {count} numbers, got {value!s:.60}")
        return [float(each) for each in values]

    def ignore(self, key: str) -> None:
        self.get(key, None)

    def error(self, key: str, reason: str) -> CheckpointError:
        return self._reader.error(self._prefix + key, reason)

    def check_all_read(self) -> None:
        """Raises CheckpointError for keys that were not read."""
        self._reader.check_all_read()

    def get_head_dim(self) -> int:
        share = self.get_int("embedding_length") // self.get_int("attention.head_count")
        return self.get_int("attention.key_length", share)

    def tensor_info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise CheckpointError(f"{self._reader.source}: tensor `{name}` is missing", "model")
        return self.tensors[name]

    def check_dimension(
        self, key: str, tensor_name: str, dimension: int, expected: int, num_dims: int = 2
    ) -> None:
        """The tensor must have `expected` matrices, rows or columns (last dimension), as `key` implies."""
        shape = self.tensor_info(tensor_name).shape
        if len(shape) != num_dims or shape[dimension] != expected:
            axis = ("matrices", "rows", "columns")[3 - max(num_dims, 2) + dimension]
            raise self.error(
                key, f"makes {expected} {axis} of tensor `{tensor_name}`, which is {list(shape)}"
            )


def _collapse_uniform(value: Any) -> Any:
    """Replace a list of equal numbers, one per layer, by the number."""
    if not isinstance(value, list) or not value or isinstance(value[0], bool):
        return value
    return value[0] if value.count(value[0]) == len(value) else value


def rope_options(metadata: MetadataReader, read_tensor: TensorReader) -> Options:
    """`rope_theta`, `rope_scaling` and, where only a part of each head rotates, `partial_rotary_factor`."""
    theta = read_rope_theta(metadata, "rope.freq_base", DEFAULT_THETA)
    options = {"rope_theta": theta} | _partial_rotary_options(metadata)
    metadata.ignore("rope.scaling.finetuned")
    scaling = _scaling_options(metadata, read_tensor)
    return options | {"rope_scaling": scaling} if scaling else options


def read_rope_theta(metadata: MetadataReader, key: str, default: float) -> float:
    theta = metadata.get_float(key, default)
    if theta <= 1:
        raise metadata.error(key, f"must be above 1, got {theta:g}")
    return theta


def _partial_rotary_options(metadata: MetadataReader) -> Options:
    if metadata.architecture == "deepseek2":  # its own sizes tell
        return {}
    head_dim = metadata.get_head_dim()
    rotated = metadata.get_int("rope.dimension_count", head_dim)
    is_known = metadata.architecture in PARTIAL_ROPE_ARCHITECTURES
    if rotated == head_dim and not is_known:
        return {}
    if not is_known or rotated > head_dim or rotated % 2:
        limit = "even and at most " if is_known else ""
        reason = f"must be {limit}{head_dim}, the size of a head, got {rotated}"
        raise metadata.error("rope.dimension_count", reason)
    return {"partial_rotary_factor": (rotated + 0.5) / head_dim}  # the reader multiplies and rounds down


def _scaling_options(metadata: MetadataReader, read_tensor: TensorReader) -> Options:
    scaling_type = metadata.get_choice("rope.scaling.type", SCALING_TYPES, "linear")
    if scaling_type != "yarn" and _read_query_beta(metadata):
        raise metadata.error("rope.scaling.type", "must be yarn beside `attention.temperature_scale`")
    original = metadata.get_int("rope.scaling.original_context_length", metadata.get_int("context_length"))
    if ROPE_FREQS in metadata.tensors:
        return _frequency_scaling(metadata, scaling_type, read_tensor)
    if ROPE_FACTORS_LONG in metadata.tensors:
        return _longrope_scaling(metadata, scaling_type, original, read_tensor)
    if scaling_type == "longrope":
        reason = f"is longrope, but there is no tensor `{ROPE_FACTORS_LONG}`"
        raise metadata.error("rope.scaling.type", reason)
    if scaling_type == "yarn":
        return _yarn_scaling(metadata, original)
    if scaling_type == "linear":
        return _linear_scaling(metadata)
    metadata.require_value("rope.scaling.factor", 1.0)
    return {}


def _linear_scaling(metadata: MetadataReader) -> Options:
    """Older files have `rope.scale_linear`; 0 means no scaling."""
    older = metadata.get_optional_float("rope.scale_linear")
    has_factor = "rope.scaling.factor" in metadata
    factor = metadata.get_optional_float("rope.scaling.factor") if has_factor else older
    return {} if factor in (None, 1.0) else {"type": "linear", "factor": factor}


def _yarn_scaling(metadata: MetadataReader, original_max_position: int) -> Options:
    """The attention factor is derived from `factor`: llama.cpp versions disagree on other explicit ones."""
    metadata.require_value("rope.scaling.yarn_ext_factor", 1.0)
    factor = metadata.get_float("rope.scaling.factor")
    derived = 1 + 0.1 * math.log(max(factor, 1.0))
    for key in ("rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor"):
        value = metadata.get_float(key, 1.0)
        if value != 1 and not math.isclose(value, derived, rel_tol=1e-4):
            raise metadata.error(key, f"must be 1 or {derived:.6g} here, got {value:g}")
    options: Options = {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original_max_position,
    }
    if metadata.architecture == "gpt-oss":
        options["truncate"] = False  # no key tells
    if metadata.architecture == "mistral3":
        beta, multiplier = _read_query_beta(metadata), metadata.get_optional_float(YARN_LOG_MULTIPLIER)
        options |= {"llama_4_scaling_beta": beta} if beta else {}
        options |= {"mscale": 1.0, "mscale_all_dim": multiplier} if multiplier else {}
    if metadata.architecture == "deepseek2":  # the converter divides by 10
        multiplier = metadata.get_optional_float(YARN_LOG_MULTIPLIER)
        if multiplier and not MIN_LOG_MULTIPLIER < multiplier < MAX_LOG_MULTIPLIER:
            reason = f"must be between {MIN_LOG_MULTIPLIER:g} and {MAX_LOG_MULTIPLIER:g} here"
            raise metadata.error(YARN_LOG_MULTIPLIER, f"{reason}, got {multiplier:g}")
        mscale = round(10 * multiplier, 6) if multiplier else None
        options |= dict.fromkeys(("mscale", "mscale_all_dim"), mscale) if mscale else {}
    betas = [name for name in ("beta_fast", "beta_slow") if f"rope.scaling.yarn_{name}" in metadata]
    return options | {name: metadata.get_float(f"rope.scaling.yarn_{name}") for name in betas}


def _read_query_beta(metadata: MetadataReader) -> float | None:
    """Ministral 3's `llama_4_scaling_beta`"""
    is_known = metadata.architecture == "mistral3"
    return metadata.get_optional_float("attention.temperature_scale") if is_known else None


def _frequency_scaling(metadata: MetadataReader, scaling_type: str, read_tensor: TensorReader) -> Options:
    """Llama 3's scaling, stored as one divisor per frequency: longrope with equal factors at any length."""
    if scaling_type not in ("none", "linear") or _linear_scaling(metadata):
        raise metadata.error("rope.scaling.type", f"contradicts the tensor `{ROPE_FREQS}`")
    divisors = read_tensor(ROPE_FREQS)
    return {"type": "longrope", "short_factor": divisors, "long_factor": divisors, "attention_factor": 1.0}


def _longrope_scaling(
    metadata: MetadataReader, scaling_type: str, original_max_position: int, read_tensor: TensorReader
) -> Options:
    if scaling_type == "yarn" or (scaling_type == "linear" and _linear_scaling(metadata)):
        raise metadata.error("rope.scaling.type", f"contradicts the tensor `{ROPE_FACTORS_LONG}`")
    metadata.tensor_info(ROPE_FACTORS_SHORT)
    options: Options = {
        "type": "longrope",
        "short_factor": read_tensor(ROPE_FACTORS_SHORT),
        "long_factor": read_tensor(ROPE_FACTORS_LONG),
        "original_max_position_embeddings": original_max_position,
    }
    if "rope.scaling.attn_factor" in metadata:
        options["attention_factor"] = metadata.get_float("rope.scaling.attn_factor")
    return options
