"""Strict request bodies: exact types, and every unknown or unsupported field is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, WithJsonSchema, model_validator

from foreword.errors import InvalidRequest, Unsupported

__all__ = ["StrictModel", "TextOrIds", "TextsOrIds", "is_token_ids"]

TextOrIds = str | Sequence[int]
_TEXT_SCHEMA = {"type": "string"}
_IDS_SCHEMA = {"type": "array", "items": {"type": "integer"}}
_LIST_SCHEMAS = [{"type": "array", "items": schema} for schema in (_TEXT_SCHEMA, _IDS_SCHEMA)]
# One text or token ids, or a list of either; checked by the body, whose errors are clearer than pydantic's.
TextsOrIds = Annotated[Any, WithJsonSchema({"anyOf": [_TEXT_SCHEMA, _IDS_SCHEMA, *_LIST_SCHEMAS]})]


def is_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    # Fields of OpenAI or vLLM that are refused, with the values that have no effect and are taken.
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    reasons: ClassVar[Mapping[str, str]] = {}  # why an unsupported field will stay so
    ignored: ClassVar[frozenset[str]] = frozenset()  # fields without effect on this server
    aliases: ClassVar[Mapping[str, str]] = {}  # other projects' names of fields of this body

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, neutral in cls.unsupported.items():
            if data.get(name) is not None and data[name] not in neutral:
                if name in cls.reasons:
                    raise Unsupported(f"{name} is refused: {cls.reasons[name]}", name)
                hint = f"it may only be {' or '.join(map(repr, neutral))}" if neutral else "leave it out"
                raise Unsupported(f"{name} is not supported yet; {hint}", name)
        dropped = cls.ignored.union(cls.unsupported)
        return _apply_aliases({key: data[key] for key in data if key not in dropped}, cls.aliases)


def _apply_aliases(data: dict[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Rename aliased fields. Raises InvalidRequest for a field given under both names."""
    for alias, name in aliases.items():
        if data.get(alias) is not None and data.get(name) is not None:
            raise InvalidRequest(f"{alias} is another name of {name}: only one of them may be given", alias)
    renamed = {aliases[key]: value for key, value in data.items() if key in aliases and value is not None}
    return {key: value for key, value in data.items() if key not in aliases} | renamed
