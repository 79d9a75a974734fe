"""Reads pooling, normalization and prompts as sentence-transformers stores them. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foreword.errors import CheckpointError, InvalidRequest, shown
from foreword.weights.config_reader import ConfigReader, read_json

POOLINGS = ("cls", "mean", "last", "max")
DEFAULT_POOLING = "mean"  # sentence-transformers' default
POOLING_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
}
UNSUPPORTED_MODES = ("pooling_mode_mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens")
MODULES_FILE = "modules.json"
TRANSFORMER_FILES = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
)


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """Fields as in messages.EncoderInfo; max_tokens None: only the position table limits it."""

    pooling: str = DEFAULT_POOLING
    normalize: bool = False
    max_tokens: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None

    def find_prompt(self, name: str | None, model: str) -> str:
        """The prompt of this name (None: the default). Raises InvalidRequest for an unknown name."""
        name = name or self.default_prompt
        if name is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(sorted(self.prompts)) or "none"
            message = f"prompt_name must be a prompt of {model} ({known}), got {shown(name)}"
            raise InvalidRequest(message, "prompt_name")
        return self.prompts[name]


DECODER_POOLING = PoolingConfig("last")  # default of decoders: only the last row has seen the whole text


def read_decoder_pooling_config(path: Path) -> PoolingConfig:
    """The pooling of the engine's checkpoint, a directory or a GGUF file. Raises CheckpointError."""
    if not (path / MODULES_FILE).is_file():
        return DECODER_POOLING
    pooling_config = read_pooling_config(path)
    if pooling_config.pooling == "max":
        raise CheckpointError(f"{path}: pooling max is not supported for decoders", "model")
    return pooling_config


def read_pooling_config(path: Path) -> PoolingConfig:
    """Every file is optional. Raises CheckpointError for an unsupported module or option."""
    pooling, normalize = _read_modules(path)
    prompts, default_prompt = _read_prompts(path / "config_sentence_transformers.json")
    return PoolingConfig(pooling, normalize, _read_max_tokens(path), prompts, default_prompt)


def _read_modules(path: Path) -> tuple[str, bool]:
    """(pooling, normalize)"""
    if not (path / MODULES_FILE).is_file():
        return DEFAULT_POOLING, False
    kinds = {
        str(module.get("type", "")).rpartition(".")[2]: str(module.get("path", ""))
        for module in _read_json_list(path / MODULES_FILE)
    }
    for kind in kinds:
        if kind not in ("Transformer", "Pooling", "Normalize"):
            message = f"{path / MODULES_FILE}: the module {kind!r} is not supported"
            raise CheckpointError(message, "embedding_model")
    pooling = DEFAULT_POOLING
    if "Pooling" in kinds:
        pooling = _read_pooling(path / kinds["Pooling"] / "config.json")
    return pooling, "Normalize" in kinds


def _read_pooling(file: Path) -> str:
    config = ConfigReader(read_json(file), str(file))
    for key in ("word_embedding_dimension", "embedding_dimension"):
        config.get(key, None)
    config.require_value("include_prompt", True)
    for key in UNSUPPORTED_MODES:
        config.require_value(key, False)
    chosen = [mode for key, mode in POOLING_MODES.items() if config.get_bool(key, False)]
    named = config.get("pooling_mode", None)
    if named is not None:
        chosen += [POOLING_MODES.get(f"pooling_mode_{named}", named)] if isinstance(named, str) else named
    config.check_all_read()
    if len(chosen) != 1 or chosen[0] not in POOLINGS:
        message = f"{file}: exactly one of {', '.join(POOLINGS)} is supported, got {chosen}"
        raise CheckpointError(message, "embedding_model")
    return str(chosen[0])


def _read_max_tokens(path: Path) -> int | None:
    for name in TRANSFORMER_FILES:
        if (path / name).is_file():
            config = ConfigReader(read_json(path / name), str(path / name))
            config.require_value("do_lower_case", False)
            return config.get_optional_int("max_seq_length")
    return None


def _read_prompts(file: Path) -> tuple[Mapping[str, str], str | None]:
    """(prompts by name, name of the default prompt)"""
    if not file.is_file():
        return {}, None
    values = read_json(file)
    prompts = values.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        message = f"{file}: prompts must map names to texts, got {shown(prompts)}"
        raise CheckpointError(message, "embedding_model")
    default = values.get("default_prompt_name")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        message = f"{file}: default_prompt_name {shown(default)} is none of its prompts"
        raise CheckpointError(message, "embedding_model")
    return prompts, default


def _read_json_list(file: Path) -> list[dict[str, Any]]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}", "embedding_model") from None
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise CheckpointError(f"{file} must hold a list of modules", "embedding_model")
    return values
