"""LoRA adapters as options name them, and as a loaded engine describes them. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foreword.errors import ConfigError, did_you_mean

FIELDS = ("name", "path", "base_model_name")  # fields of vLLM's JSON


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapter to load: a model's name, and a directory or a GGUF file."""

    name: str
    path: str
    base_model_name: str | None = None  # one of the served names of its base


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A loaded adapter."""

    path: str
    digest: str  # hash of its weights and options: requests name it by this
    rank: int  # the largest of its projections
    num_projections: int
    num_bytes: int  # size of its matrices as loaded


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The adapter of a call of LLM, in vLLM's form; its path may be left out for one of `lora_modules`."""

    lora_name: str
    lora_int_id: int = 0  # ignored: an adapter is known by its content
    lora_path: str = ""


def parse_lora_modules(text: str | None) -> tuple[LoraModule, ...]:
    """Parse "name=path,name=path", where an item may also be a JSON object. Raises ConfigError."""
    modules: list[LoraModule] = []
    rest = (text or "").strip()
    while rest:
        if rest.startswith("{"):
            try:
                given, end = json.JSONDecoder().raw_decode(rest)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"lora_modules is not JSON: {error}", "lora_modules") from None
            modules.append(_from_json(given))
            rest = rest[end:].strip()
            if rest and not rest.startswith(","):
                raise ConfigError(f"lora_modules: no comma before {rest[:80]!r}", "lora_modules")
            rest = rest[1:].strip()
        else:
            item, _, rest = rest.partition(",")
            rest = rest.strip()
            name, _, path = (part.strip() for part in item.partition("="))
            if not name or not path:
                problem = f'must be name=path, or {{"name": ..., "path": ...}}, got {item!r:.200}'
                raise ConfigError(f"lora_modules {problem}", "lora_modules")
            modules.append(LoraModule(name, path))
    names = [module.name for module in modules]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"lora_modules: two adapters are named {name!r:.200}", "lora_modules")
    return tuple(modules)


def _from_json(given: Any) -> LoraModule:
    if not isinstance(given, Mapping):
        raise ConfigError("lora_modules must have JSON objects", "lora_modules")
    for field in given:
        if field not in FIELDS:
            hint = did_you_mean(field, FIELDS)
            raise ConfigError(f"lora_modules: unknown field {field!r:.80}{hint}", "lora_modules")
    name, path, base = (given.get(field) for field in FIELDS)
    if not isinstance(name, str) or not isinstance(path, str) or not name.strip() or not path.strip():
        raise ConfigError("lora_modules: name and path must be texts that are not empty", "lora_modules")
    if base is not None and not isinstance(base, str):
        raise ConfigError("lora_modules: base_model_name must be a text", "lora_modules")
    return LoraModule(name.strip(), path.strip(), base)
