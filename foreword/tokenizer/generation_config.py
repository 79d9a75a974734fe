"""Sampling defaults of a checkpoint: generation_config.json, or `general.sampling` of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from foreword.core.params import SamplingParams
from foreword.errors import InvalidRequest

# Keys of generation_config.json, and the fields of SamplingParams that they set. `do_sample` is not one of
# them, as in vLLM: false is transformers' default, which many checkpoints repeat without meaning it.
FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "temperature": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "typical_p": "typical_p",
        "repetition_penalty": "repetition_penalty",
        "max_new_tokens": "max_tokens",
    }
)
GGUF_PREFIX = "general.sampling."
GGUF_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "temp": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "xtc_probability": "xtc_probability",
        "xtc_threshold": "xtc_threshold",
        "penalty_repeat": "repetition_penalty",
    }
)
DEFAULTED_FIELDS = tuple(sorted({*FIELDS.values(), *GGUF_FIELDS.values()}))
FLOAT32_DIGITS = 6  # significant decimal digits


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Defaults of requests that do not set a field."""

    params: Mapping[str, float] = field(default_factory=dict)  # fields of SamplingParams but max_tokens
    max_tokens: int | None = None  # limit of requests to which default_max_tokens applies
    warnings: tuple[str, ...] = ()  # values that are not used, and why

    def as_dict(self) -> dict[str, float]:
        """All defaults, by field of SamplingParams."""
        return {**self.params, **({} if self.max_tokens is None else {"max_tokens": self.max_tokens})}

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.as_dict().items())


def read_generation_config(values: Mapping[str, Any], source: str) -> GenerationConfig:
    """Values of generation_config.json; `source` is the file's path."""
    return _parse({key: values.get(key) for key in FIELDS}, FIELDS, source)


def read_gguf_generation_config(metadata: Mapping[str, Any], source: str) -> GenerationConfig:
    """Values of a GGUF file's metadata, of which float32 are rounded to their decimal digits."""
    values = {GGUF_PREFIX + key: metadata.get(GGUF_PREFIX + key) for key in GGUF_FIELDS}
    rounded = {
        key: float(f"{value:.{FLOAT32_DIGITS}g}") if isinstance(value, float) else value
        for key, value in values.items()
    }
    return _parse(rounded, {GGUF_PREFIX + key: name for key, name in GGUF_FIELDS.items()}, source)


def _parse(values: Mapping[str, Any], names: Mapping[str, str], source: str) -> GenerationConfig:
    """An invalid value is a warning: requests that set the field can still be served."""
    params: dict[str, Any] = {}
    warnings = []
    for key, value in values.items():
        if value is None:
            continue
        if isinstance(value, float) and value.is_integer() and isinstance(getattr(NEUTRAL, names[key]), int):
            value = int(value)  # an integer field that was written as 50.0
        try:
            SamplingParams(**{names[key]: value})
        except InvalidRequest as error:
            warnings.append(f"{source}: {key} is not used: {error.message}")
        else:
            params[names[key]] = value
    return GenerationConfig(params, params.pop("max_tokens", None), tuple(warnings))


NEUTRAL = SamplingParams(max_tokens=1)
