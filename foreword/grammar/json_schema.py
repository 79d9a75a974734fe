"""JSON schemas as llguidance knows them: draft 2020-12, what it lacks refused by name, whitespace bounded.

JSON as a caller wrote it: read strictly, measured before anything works on it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NoReturn

from foreword.grammar import limits

__all__ = [
    "ANY_OBJECT",
    "GrammarError",
    "convert_schema",
    "convert_schema_text",
    "nesting_depth",
    "read_json",
]

STRING_OR_BRACKET = re.compile(
    r'"(?:[^"\\]|\\.?)*(?:"|\Z)|[\[\]{}]', re.DOTALL
)  # linear, also where a text has no end


class GrammarError(ValueError):
    """Why a constraint cannot be used; `compile.grammar_text` names the field."""


def read_json(text: str, what: str) -> Any:
    """The value of a JSON text. Raises GrammarError for what is no JSON, or too deep."""
    if nesting_depth(match[0] for match in STRING_OR_BRACKET.finditer(text)) > limits.MAX_NESTING:
        raise GrammarError(f"{what} is nested deeper than {limits.MAX_NESTING} levels")
    try:
        return json.loads(text, parse_float=_parse_finite, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{what} is not JSON: {error}") from None


def nesting_depth(tokens: Iterator[str]) -> int:
    """How deep brackets stand within brackets; other signs do not count."""
    depth = deepest = 0
    for sign in tokens:
        if sign in ("(", "[", "{"):
            depth += 1
            deepest = max(deepest, depth)
        elif sign in (")", "]", "}"):
            depth -= 1
    return deepest


def _parse_finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text:.40} is too large")
    return value


def _reject_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON value")


MAX_SHOWN_NUMBER: Final = 10**12
ANY_OBJECT: Final = '{"type": "object"}'
ANY_PROPERTY_NAME: Final = "(?s:.*)"  # of a property, as a pattern

# Between two parts of JSON: a space, or a line end and an indentation. json.dumps() writes no more down to eight levels of
# four; a small model that falls into whitespace gets out of it soon. llguidance takes it at most once in a place.
WHITESPACE: Final = r" |\n( {0,32}|\t{0,8})"

# Keywords that change what conforms and that llguidance does not implement; the value given changes nothing.
UNSUPPORTED_KEYWORDS: Final[Mapping[str, Any]] = {
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
SUPPORTED_KEYWORDS: Final = (
    *(
        "$anchor",
        "$defs",
        "$id",
        "$ref",
        "$schema",
        "allOf",
        "anyOf",
        "const",
        "definitions",
        "enum",
        "id",
        "oneOf",
        "type",
    ),
    *("additionalItems", "items", "maxItems", "minItems", "prefixItems"),
    *(
        "additionalProperties",
        "maxProperties",
        "minProperties",
        "patternProperties",
        "properties",
        "required",
    ),
    *("format", "maxLength", "minLength", "pattern"),
    *("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"),
)
FORMATS: Final = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
# Formats of the standard that would have to be enforced; other names are annotations.
UNSUPPORTED_FORMATS: Final = (
    *("idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer"),
    *("uri-reference", "uri-template"),
)
LENGTH_KEYWORDS: Final = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
SCHEMA_KEYWORDS: Final = ("additionalItems", "additionalProperties", "items")
SCHEMA_LIST_KEYWORDS: Final = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
SCHEMA_MAP_KEYWORDS: Final = ("$defs", "definitions", "patternProperties", "properties")


def convert_schema_text(text: str, whitespace: bool) -> str:
    """llguidance's text for a JSON schema. Raises GrammarError, which names the keyword that is not supported."""
    return convert_schema(read_json(text, "the schema"), whitespace)


def convert_schema(schema: Any, whitespace: bool) -> str:
    """The same for a schema that was read. Keywords that are annotations are left out."""
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"a schema must be an object, got {json.dumps(schema):.80}")
    clean = _SchemaCleaner().clean(schema if isinstance(schema, dict) else {"anyOf": [schema]}, "")
    spaces = (
        {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
        if whitespace
        else {"whitespace_flexible": False}
    )
    return json.dumps({"x-guidance": spaces, **clean}, ensure_ascii=False)


class _SchemaCleaner:
    """Walks a schema once, and counts what it holds."""

    def __init__(self) -> None:
        self._num_entries = 0

    def clean(self, schema: Any, path: str) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise GrammarError(
                f"a schema must be an object or a boolean, got {json.dumps(schema):.80}{_location(path)}"
            )
        self._count_entries(len(schema))
        _refuse_unsupported(schema, path)
        return _forbid_escaped_keys(
            {
                key: self._clean_value(key, value, f"{path}/{key}")
                for key, value in schema.items()
                if _is_constraint(key, value)
            }
        )

    def _clean_value(self, key: str, value: Any, path: str) -> Any:
        if key in SCHEMA_LIST_KEYWORDS and isinstance(value, list):
            return self._clean_each(
                list(enumerate(value)), path, lambda pairs: [schema for _, schema in pairs]
            )
        if key in SCHEMA_MAP_KEYWORDS and isinstance(value, dict):
            return self._clean_each(list(value.items()), path, dict)
        if key in SCHEMA_KEYWORDS:
            return self.clean(value, path)
        if key == "enum" and isinstance(value, list) and len(value) > limits.MAX_CHOICES:
            raise GrammarError(
                f"an enum may hold {limits.MAX_CHOICES} values, got {len(value)}{_location(path)}"
            )
        if key in LENGTH_KEYWORDS and isinstance(value, int | float) and value > limits.MAX_REPEAT:
            told = f"{value:.12g}" if value < MAX_SHOWN_NUMBER else "more than can be told"
            raise GrammarError(f"{key} may be at most {limits.MAX_REPEAT}, got {told}{_location(path)}")
        return value

    def _clean_each(
        self, pairs: list[tuple[Any, Any]], path: str, build: Callable[[list[tuple[Any, Any]]], Any]
    ) -> Any:
        self._count_entries(len(pairs))
        return build([(key, self.clean(value, f"{path}/{key}")) for key, value in pairs])

    def _count_entries(self, num_entries: int) -> None:
        self._num_entries += num_entries
        if self._num_entries > limits.MAX_PROPERTIES:
            raise GrammarError(f"the schema holds more than {limits.MAX_PROPERTIES} keywords and properties")


def _refuse_unsupported(schema: Mapping[str, Any], path: str) -> None:
    for keyword, harmless in UNSUPPORTED_KEYWORDS.items():
        if keyword in schema and schema[keyword] != harmless:
            raise GrammarError(f"the keyword {keyword!r} of JSON schema is not supported{_location(path)}")
    if schema.get("format") in UNSUPPORTED_FORMATS:
        raise GrammarError(
            f"the format {schema['format']!r} is not supported{_location(path)}; supported are {', '.join(FORMATS)}"
        )


def _is_constraint(key: str, value: Any) -> bool:
    """Whether the keyword constrains; unknown keywords are annotations, as the standard says."""
    if key == "format":
        return value in FORMATS
    return key in SUPPORTED_KEYWORDS


def _forbid_escaped_keys(schema: dict[str, Any]) -> dict[str, Any]:
    r"""The same schema with keys that have one spelling each.

    To llguidance "\u0061" beside the property "a" is an addition, which may hold anything. Names that match a pattern
    are not escaped without need.
    """
    named = schema.get("properties") or schema.get("required")
    if (
        named
        and not schema.get("patternProperties")
        and schema.get("additionalProperties", True) in (True, {})
    ):
        return {**schema, "patternProperties": {ANY_PROPERTY_NAME: True}, "additionalProperties": False}
    return schema


def _location(path: str) -> str:
    return f" (at {path[:120]})" if path else ""
