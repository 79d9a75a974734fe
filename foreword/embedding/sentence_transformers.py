"""How a checkpoint makes a vector of a text: the files that sentence-transformers writes beside a model. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foreword.errors import CheckpointError, InvalidRequest
from foreword.models.config import ConfigReader, read_json

__all__ = [
    "DECODER_POOLING",
    "POOLINGS",
    "PoolingConfig",
    "read_decoder_pooling_config",
    "read_pooling_config",
]

POOLINGS = ("cls", "mean", "last", "max")
DEFAULT_POOLING = "mean"  # of a checkpoint that says nothing: so sentence-transformers has it
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
    """As in messages.EncoderInfo; max_tokens is None where only the table of positions sets a limit."""

    pooling: str = DEFAULT_POOLING
    normalize: bool = False
    max_tokens: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None

    def find_prompt(self, name: str | None, model: str) -> str:
        """The text in front of an input for this purpose. Raises InvalidRequest for one that `model` does not name."""
        name = name or self.default_prompt
        if name is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(sorted(self.prompts)) or "none"
            raise InvalidRequest(
                f"prompt_name must be one that {model} has ({known}), got {name!r:.80}", "prompt_name"
            )
        return self.prompts[name]


DECODER_POOLING = PoolingConfig(
    "last"
)  # of a decoder that says nothing: its last row alone has seen the whole text


def read_decoder_pooling_config(path: Path) -> PoolingConfig:
    """Of a checkpoint that the engine serves, a directory or a GGUF file. Raises CheckpointError."""
    if not (path / MODULES_FILE).is_file():
        return DECODER_POOLING
    recipe = read_pooling_config(path)
    if recipe.pooling == "max":
        raise CheckpointError(f"{path}: pooling max is not supported for decoders", "model")
    return recipe


def read_pooling_config(path: Path) -> PoolingConfig:
    """Read what is there; every file may be missing. Raises CheckpointError for a step that is not honoured."""
    pooling, normalize = _read_modules(path)
    prompts, default_prompt = _read_prompts(path / "config_sentence_transformers.json")
    return PoolingConfig(pooling, normalize, _read_max_tokens(path), prompts, default_prompt)


def _read_modules(path: Path) -> tuple[str, bool]:
    """The pooling, and whether vectors are normalized."""
    if not (path / MODULES_FILE).is_file():
        return DEFAULT_POOLING, False
    kinds = {
        str(module.get("type", "")).rpartition(".")[2]: str(module.get("path", ""))
        for module in _read_json_list(path / MODULES_FILE)
    }
    for kind in kinds:
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise CheckpointError(
                f"{path / MODULES_FILE}: the module {kind!r} is not supported", "embedding_model"
            )
    pooling = (
        _read_pooling(path / kinds["Pooling"] / "config.json") if "Pooling" in kinds else DEFAULT_POOLING
    )
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
        raise CheckpointError(
            f"{file}: exactly one of {', '.join(POOLINGS)} is supported, got {chosen}", "embedding_model"
        )
    return str(chosen[0])


def _read_max_tokens(path: Path) -> int | None:
    for name in TRANSFORMER_FILES:
        if (path / name).is_file():
            config = ConfigReader(read_json(path / name), str(path / name))
            config.require_value("do_lower_case", False)
            return config.get_optional_int("max_seq_length")
    return None


def _read_prompts(file: Path) -> tuple[Mapping[str, str], str | None]:
    """Prompts by purpose, and the purpose that counts if none is named."""
    if not file.is_file():
        return {}, None
    values = read_json(file)
    prompts = values.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointError(
            f"{file}: prompts must be texts by name, got {prompts!r:.80}", "embedding_model"
        )
    default = values.get("default_prompt_name")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise CheckpointError(
            f"{file}: default_prompt_name {default!r:.80} is none of its prompts", "embedding_model"
        )
    return prompts, default


def _read_json_list(file: Path) -> list[dict[str, Any]]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}", "embedding_model") from None
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise CheckpointError(f"{file} does not hold a list of modules", "embedding_model")
    return values
