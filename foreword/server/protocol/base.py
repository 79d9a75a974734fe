"""What every request body has in common: types are strict, and no field is ever ignored in silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from foreword.errors import InvalidRequest, Unsupported

__all__ = ["StrictModel"]


class StrictModel(BaseModel):
    """A JSON object.

    unsupported  fields that OpenAI or vLLM know and this server does not, with the values that ask for nothing;
                 any other value raises Unsupported
    reasons      why such a field is refused for good
    accepted     fields that are taken and have no effect here, because they concern others
    spellings    what others call fields of this body
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    reasons: ClassVar[Mapping[str, str]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()
    aliases: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, neutral in cls.unsupported.items():
            if data.get(name) is not None and data[name] not in neutral:
                reason = cls.reasons.get(name)
                told = (
                    f"is refused: {reason}" if reason else f"is not supported yet{_allowed_values(neutral)}"
                )
                raise Unsupported(f"{name} {told}", name)
        left = {
            name: value
            for name, value in data.items()
            if name not in cls.unsupported and name not in cls.ignored
        }
        return _apply_aliases(left, cls.aliases) if cls.aliases else left


def _apply_aliases(data: dict[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """The fields by their names here. Raises InvalidRequest where a field is given by both of its names."""
    for other, name in aliases.items():
        if data.get(other) is not None and data.get(name) is not None:
            raise InvalidRequest(f"{other} is another name of {name}: only one of them may be given", other)
    renamed = {name: value for name, value in data.items() if name not in aliases}
    return renamed | {
        aliases[name]: value for name, value in data.items() if name in aliases and value is not None
    }


def _allowed_values(neutral: tuple[Any, ...]) -> str:
    return f"; it may only be {' or '.join(map(repr, neutral))}" if neutral else "; leave it out"
