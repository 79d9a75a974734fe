"""What a checkpoint directory says about its tokenizer, beside tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foreword.errors import CheckpointError

__all__ = ["SPECIAL_NAMES", "TokenizerFiles", "read_files"]

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The facts of the files around tokenizer.json, as plain values.

    special_tokens  text by name (`bos_token`, ...)
    extra_special   texts of special tokens without a name
    added_tokens    `added_tokens_decoder` of tokenizer_config.json: properties by id
    eos_ids         end-of-sequence ids that the model's own configuration names
    chat_template   Jinja source, or None
    """

    special_tokens: Mapping[str, str] = field(default_factory=dict)
    extra_special: tuple[str, ...] = ()
    added_tokens: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    eos_ids: tuple[int, ...] = ()
    chat_template: str | None = None


def read_files(path: Path) -> TokenizerFiles:
    """Read what stands beside tokenizer.json in `path`; every file may be missing."""
    config = _read_json(path / "tokenizer_config.json")
    special = _read_json(path / "special_tokens_map.json") | config
    named = {name: text for name in SPECIAL_NAMES if (text := _token_text(special.get(name))) is not None}
    return TokenizerFiles(
        special_tokens=named,
        extra_special=_extra_special(special),
        added_tokens={int(key): value for key, value in (config.get("added_tokens_decoder") or {}).items()},
        eos_ids=_eos_ids(path),
        chat_template=_chat_template(path, config),
    )


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object")
    return value


def _token_text(value: object) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _extra_special(special: Mapping[str, Any]) -> tuple[str, ...]:
    """Unnamed special tokens: a list, or a mapping of names that no template asks for."""
    texts: list[str] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        values = special.get(key) or ()
        for value in values.values() if isinstance(values, Mapping) else values:
            text = _token_text(value)
            if text is not None and text not in texts:
                texts.append(text)
    return tuple(texts)


def _eos_ids(path: Path) -> tuple[int, ...]:
    """generation_config.json knows best: chat models end turns with tokens that are not the tokenizer's eos."""
    for name in ("generation_config.json", "config.json"):
        value = _read_json(path / name).get("eos_token_id")
        if value is not None:
            return tuple(value) if isinstance(value, list) else (int(value),)
    return ()


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    jinja = path / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    template = _read_json(path / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):
        template = next((item["template"] for item in template if item.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{path}: chat_template must be a text or a list of named texts", "chat_template")
    return template
