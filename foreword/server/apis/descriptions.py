"""The meaning of each field of a body: for the API's schema, docs/request-fields.md and the page."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")


@functools.cache
def descriptions() -> Mapping[str, Mapping[str, str]]:
    """The texts of descriptions.toml, which is read with the first schema, by class and name in JSON."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def describe(body: type, field: str) -> str | None:
    """The text of a field by its name in JSON, in Markdown."""
    tables = descriptions()
    return next(
        (texts[field] for base in body.__mro__ if field in (texts := tables.get(base.__name__, {}))), None
    )


def extend_schema(schema: dict[str, Any], body: type) -> None:
    """Add the descriptions to a body's schema, without their links; other fields are refused."""
    schema["additionalProperties"] = False
    for name, field in schema.get("properties", {}).items():
        if (text := describe(body, name)) is not None:
            field["description"] = _LINK.sub(r"\1", text)
