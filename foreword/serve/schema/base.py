"""What every request body has in common: types are strict, and no field is ever ignored in silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from foreword.errors import Unsupported

__all__ = ["Body"]


class Body(BaseModel):
    """A JSON object.

    unsupported  fields that OpenAI or vLLM know and this server does not, with the values that ask for nothing;
                 any other value raises Unsupported
    accepted     fields that are taken and have no effect here, because they concern others
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    accepted: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, neutral in cls.unsupported.items():
            if data.get(name) is not None and data[name] not in neutral:
                raise Unsupported(f"{name} is not supported yet{_allowed(neutral)}", name)
        return {name: value for name, value in data.items() if name not in cls.unsupported and name not in cls.accepted}


def _allowed(neutral: tuple[Any, ...]) -> str:
    return f"; it may only be {' or '.join(map(repr, neutral))}" if neutral else "; leave it out"
