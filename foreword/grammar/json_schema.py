"""JSON schemas as llguidance knows them: draft 2020-12, what it lacks refused by name, whitespace bounded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from foreword.grammar import limits
from foreword.grammar.json_text import GrammarError, read_json

__all__ = ["ANY_OBJECT", "compiled_schema", "schema_text"]

MANY: Final = 10**12
ANY_OBJECT: Final = '{"type": "object"}'
ANY_NAME: Final = "(?s:.*)"  # of a property, as a pattern

# Between two parts of JSON: a space, or a line end and an indentation. json.dumps() writes no more down to eight levels of
# four; a small model that falls into whitespace gets out of it soon. llguidance takes it at most once in a place.
WHITESPACE: Final = r" |\n( {0,32}|\t{0,8})"

# Keywords that change what conforms and that llguidance does not implement; the value given changes nothing.
UNSUPPORTED: Final[Mapping[str, Any]] = {
    "$dynamicRef": None,
    "$recursiveRef": None,
    "not": False,
    "if": None,
    "contains": None,
    "uniqueItems": False,
    "dependencies": {},
    "dependentRequired": {},
    "dependentSchemas": {},
    "propertyNames": True,
    "unevaluatedItems": True,
    "unevaluatedProperties": True,
    "disallow": None,
    "extends": None,
    "divisibleBy": None,
}
SUPPORTED: Final = (
    *("$anchor", "$defs", "$id", "$ref", "$schema", "allOf", "anyOf", "const", "definitions", "enum", "id", "oneOf", "type"),
    *("additionalItems", "items", "maxItems", "minItems", "prefixItems"),
    *("additionalProperties", "maxProperties", "minProperties", "patternProperties", "properties", "required"),
    *("format", "maxLength", "minLength", "pattern"),
    *("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"),
)
FORMATS: Final = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
# Formats of the standard that would have to be enforced; other names are annotations.
OTHER_FORMATS: Final = (
    *("idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer"),
    *("uri-reference", "uri-template"),
)
LENGTHS: Final = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
ONE_SCHEMA: Final = ("additionalItems", "additionalProperties", "items")
SCHEMA_LISTS: Final = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
SCHEMA_MAPS: Final = ("$defs", "definitions", "patternProperties", "properties")


def schema_text(text: str, whitespace: bool) -> str:
    """llguidance's text for a JSON schema. Raises GrammarError, which names the keyword that is not supported."""
    return compiled_schema(read_json(text, "the schema"), whitespace)


def compiled_schema(schema: Any, whitespace: bool) -> str:
    """The same for a schema that was read. Keywords that are annotations are left out."""
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"a schema must be an object, got {json.dumps(schema):.80}")
    clean = _Cleaner().clean(schema if isinstance(schema, dict) else {"anyOf": [schema]}, "")
    spaces = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE} if whitespace else {"whitespace_flexible": False}
    return json.dumps({"x-guidance": spaces, **clean}, ensure_ascii=False)


class _Cleaner:
    """Walks a schema once, and counts what it holds."""

    def __init__(self) -> None:
        self._num_entries = 0

    def clean(self, schema: Any, path: str) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise GrammarError(f"a schema must be an object or a boolean, got {json.dumps(schema):.80}{_at(path)}")
        self._count(len(schema))
        _refuse_unsupported(schema, path)
        return _spelled(
            {key: self._value(key, value, f"{path}/{key}") for key, value in schema.items() if _means_something(key, value)}
        )

    def _value(self, key: str, value: Any, path: str) -> Any:
        if key in SCHEMA_LISTS and isinstance(value, list):
            return self._each(list(enumerate(value)), path, lambda pairs: [schema for _, schema in pairs])
        if key in SCHEMA_MAPS and isinstance(value, dict):
            return self._each(list(value.items()), path, dict)
        if key in ONE_SCHEMA:
            return self.clean(value, path)
        if key == "enum" and isinstance(value, list) and len(value) > limits.MAX_CHOICES:
            raise GrammarError(f"an enum may hold {limits.MAX_CHOICES} values, got {len(value)}{_at(path)}")
        if key in LENGTHS and isinstance(value, int | float) and value > limits.MAX_REPEAT:
            told = f"{value:.12g}" if value < MANY else "more than can be told"
            raise GrammarError(f"{key} may be at most {limits.MAX_REPEAT}, got {told}{_at(path)}")
        return value

    def _each(self, pairs: list[tuple[Any, Any]], path: str, build: Callable[[list[tuple[Any, Any]]], Any]) -> Any:
        self._count(len(pairs))
        return build([(key, self.clean(value, f"{path}/{key}")) for key, value in pairs])

    def _count(self, entries: int) -> None:
        self._num_entries += entries
        if self._num_entries > limits.MAX_PROPERTIES:
            raise GrammarError(f"the schema holds more than {limits.MAX_PROPERTIES} keywords and properties")


def _refuse_unsupported(schema: Mapping[str, Any], path: str) -> None:
    for keyword, harmless in UNSUPPORTED.items():
        if keyword in schema and schema[keyword] != harmless:
            raise GrammarError(f"the keyword {keyword!r} of JSON schema is not supported{_at(path)}")
    if schema.get("format") in OTHER_FORMATS:
        raise GrammarError(f"the format {schema['format']!r} is not supported{_at(path)}; supported are {', '.join(FORMATS)}")


def _means_something(key: str, value: Any) -> bool:
    """Whether the keyword constrains; unknown keywords are annotations, as the standard says."""
    if key == "format":
        return value in FORMATS
    return key in SUPPORTED


def _spelled(schema: dict[str, Any]) -> dict[str, Any]:
    r"""The same schema with keys that have one spelling each.

    To llguidance "\u0061" beside the property "a" is an addition, which may hold anything. Names that match a pattern
    are not escaped without need.
    """
    named = schema.get("properties") or schema.get("required")
    if named and not schema.get("patternProperties") and schema.get("additionalProperties", True) in (True, {}):
        return {**schema, "patternProperties": {ANY_NAME: True}, "additionalProperties": False}
    return schema


def _at(path: str) -> str:
    return f" (at {path[:120]})" if path else ""
