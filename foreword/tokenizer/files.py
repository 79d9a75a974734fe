"""The files of a checkpoint that complement tokenizer.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foreword.errors import CheckpointError, shown
from foreword.tokenizer.generation_config import GenerationConfig, read_generation_config

MAX_TOKENS = 1 << 24  # ids of a vocabulary
TOKEN_ID_PATTERN = re.compile(r"[0-9]{1,8}")
GENERATION_FILE = "generation_config.json"
ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Contents of the files, as plain values."""

    special_tokens: Mapping[str, str] = field(default_factory=dict)  # text by name (`bos_token`, ...)
    extra_special_tokens: tuple[str, ...] = ()  # special tokens without a name
    added_tokens: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)  # `added_tokens_decoder`
    eos_token_ids: tuple[int, ...] = ()  # ids that the model's configuration names
    suppress_tokens: tuple[int, ...] = ()  # ids that are never sampled
    chat_template: str | None = None  # Jinja source
    response_template: Mapping[str, Any] | None = None  # transformers' description of answers
    generation_config: GenerationConfig = field(default_factory=GenerationConfig)


def read_tokenizer_files(path: Path) -> TokenizerFiles:
    """Read the files in directory `path`; each may be missing. Raises CheckpointError."""
    config = _read_json(path / "tokenizer_config.json")
    special = _read_json(path / "special_tokens_map.json") | config
    named = {
        name: text for name in SPECIAL_TOKEN_NAMES if (text := _token_text(special.get(name))) is not None
    }
    generation, generation_config = _read_generation_file(path / GENERATION_FILE)
    return TokenizerFiles(
        special_tokens=named,
        extra_special_tokens=_read_extra_special_tokens(special),
        added_tokens=_read_added_tokens(path, config),
        eos_token_ids=_read_eos_token_ids(path, generation),
        suppress_tokens=_read_ids(path / GENERATION_FILE, "suppress_tokens", generation),
        chat_template=_read_chat_template(path, config),
        response_template=_read_response_template(config),
        generation_config=generation_config,
    )


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object")
    return value


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is not UTF-8: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from None


def _token_text(value: object) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value and is_utf8_encodable(value) else None


def is_utf8_encodable(text: str) -> bool:
    """Whether the text has no lone surrogates."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _read_extra_special_tokens(special: Mapping[str, Any]) -> tuple[str, ...]:
    """Special tokens in a list, or in a mapping whose names no template uses."""
    texts: list[str] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        values = special.get(key)
        for value in (
            values.values() if isinstance(values, Mapping) else values if isinstance(values, list) else ()
        ):
            text = _token_text(value)
            if text is not None and text not in texts:
                texts.append(text)
    return tuple(texts)


def _read_added_tokens(path: Path, config: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """`added_tokens_decoder`: text and flags by id."""
    added = config.get("added_tokens_decoder") or {}
    if isinstance(added, Mapping) and all(
        TOKEN_ID_PATTERN.fullmatch(key) and _is_token(value) for key, value in added.items()
    ):
        return {int(key): value for key, value in added.items()}
    file = path / "tokenizer_config.json"
    raise CheckpointError(f"{file}: added_tokens_decoder must hold a token per id, got {shown(added)}")


def _is_token(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and _token_text(value) is not None
        and all(isinstance(value[flag], bool) for flag in ADDED_TOKEN_FLAGS if flag in value)
    )


def _read_generation_file(file: Path) -> tuple[Mapping[str, Any], GenerationConfig]:
    """generation_config.json, and its sampling defaults. A damaged file gives a warning."""
    try:
        values = _read_json(file)
    except CheckpointError as error:
        return {}, GenerationConfig(warnings=(f"{error.message}; it is not used",))
    return values, read_generation_config(values, str(file))


def _read_eos_token_ids(path: Path, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """generation_config.json comes first: a chat model's end of turn may not be the tokenizer's EOS."""
    for name, values in ((GENERATION_FILE, generation), ("config.json", _read_json(path / "config.json"))):
        if values.get("eos_token_id") is not None:
            return _read_ids(path / name, "eos_token_id", values)
    return ()


def _read_ids(file: Path, key: str, values: Mapping[str, Any]) -> tuple[int, ...]:
    """An id or a list of ids; () if it is missing."""
    value = values.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and 0 <= token_id < MAX_TOKENS for token_id in ids):
        raise CheckpointError(f"{file}: {key} must be an id or a list of ids, got {shown(value)}", "model")
    return tuple(ids)


def _read_response_template(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """None for another value: the format is then found by the chat template."""
    template = config.get("response_template")
    return template if isinstance(template, dict) else None


def _read_chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    jinja = path / "chat_template.jinja"
    if jinja.is_file():
        return _read_text(jinja)
    template = _read_json(path / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):
        named = [item for item in template if isinstance(item, dict) and item.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            f"{path}: chat_template must be a text or a list of named texts", "chat_template"
        )
    return template
