"""Prepares JSON schemas (draft 2020-12) for llguidance: rejects unsupported keywords, bounds whitespace."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from typing import Any, Final, NoReturn

from llguidance import LLMatcher

from foreword.chat_formats.tools import resolve_reference
from foreword.grammar import limits

# Linear time, also for an unterminated string.
STRING_OR_BRACKET: Final = re.compile(r'"(?:[^"\\]|\\.?)*(?:"|\Z)|[\[\]{}]', re.DOTALL)
MAX_SHOWN_NUMBER: Final = 10**12
ANY_OBJECT: Final = '{"type": "object"}'
ROOT: Final = "parameters"  # name of the whole schema in the definitions of its parts
MAX_PATTERNS: Final = 16  # patterns of an object that names its properties and has no others
MAX_NAME_CHARS: Final = 128  # longest name of its properties
MAX_PATH_CHARS: Final = 200  # longest path in errors and logs
ANY_PROPERTY_NAME: Final = "(?s:.*)"  # pattern

# Whitespace between two parts of JSON: a space, or a newline and an indentation. json.dumps() with indent=4
# fits down to eight levels. The bound keeps a small model from endless whitespace; llguidance allows one
# match per gap.
WHITESPACE: Final = r" |\n( {0,32}|\t{0,8})"

# Keywords that constrain and that llguidance lacks -> the value without effect.
UNSUPPORTED_KEYWORDS: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("$dynamicRef", "$recursiveRef", "if", "contains", "disallow", "extends", "divisibleBy")),
    **dict.fromkeys(("not", "uniqueItems"), False),
    "dependencies": {},
    "dependentRequired": {},
    "dependentSchemas": {},
    **dict.fromkeys(("propertyNames", "unevaluatedItems", "unevaluatedProperties"), True),
}
SUPPORTED_KEYWORDS: Final = (
    *("$anchor", "$defs", "$id", "$ref", "$schema", "definitions", "id"),
    *("allOf", "anyOf", "const", "enum", "oneOf", "type"),
    *("additionalItems", "items", "maxItems", "minItems", "prefixItems"),
    *("additionalProperties", "maxProperties", "minProperties"),
    *("patternProperties", "properties", "required"),
    *("format", "maxLength", "minLength", "pattern"),
    *("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"),
)
FORMATS: Final = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
# Formats of the standard that llguidance lacks; other names are annotations.
UNSUPPORTED_FORMATS: Final = (
    *("idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer"),
    *("uri-reference", "uri-template"),
)
LENGTH_KEYWORDS: Final = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
OBJECT_EXTENSIONS: Final = {"additionalProperties", "patternProperties", "anyOf", "oneOf", "$ref"}
SCHEMA_KEYWORDS: Final = ("additionalItems", "additionalProperties", "items")
PYTHON_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "array": (list,),
    "boolean": (bool,),
    "integer": (int, float),
    "null": (type(None),),
    "number": (int, float),
    "object": (dict,),
    "string": (str,),
}
SCHEMA_LIST_KEYWORDS: Final = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
SCHEMA_MAP_KEYWORDS: Final = ("$defs", "definitions", "patternProperties", "properties")


class GrammarError(ValueError):
    """The reason why a constraint is invalid; `compiler.to_llguidance` adds the field."""


def read_json(text: str, what: str) -> Any:
    """The value of a JSON text. Raises GrammarError, which names `what`, for malformed or deep JSON."""
    if nesting_depth(match[0] for match in STRING_OR_BRACKET.finditer(text)) > limits.MAX_NESTING:
        raise GrammarError(f"{what} is nested deeper than {limits.MAX_NESTING} levels")
    try:
        return json.loads(text, parse_float=_parse_finite, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{what} is not JSON: {error}") from None


def nesting_depth(tokens: Iterator[str]) -> int:
    """Depth of nested brackets; other tokens are ignored."""
    depth = deepest = 0
    for token in tokens:
        if token in ("(", "[", "{"):
            depth += 1
            deepest = max(deepest, depth)
        elif token in (")", "]", "}"):
            depth -= 1
    return deepest


def is_text_list(value: Any) -> bool:
    """Whether a value is a non-empty list of non-empty texts."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) and item for item in value)


def _parse_finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text:.40} is too large")
    return value


def _reject_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON value")


def convert_schema_text(text: str, whitespace: bool) -> str:
    """A JSON schema for llguidance. Raises GrammarError, which names an unsupported keyword."""
    return convert_schema(read_json(text, "the schema"), whitespace)


def convert_schema(schema: Any, whitespace: bool) -> str:
    """`convert_schema_text` for a parsed schema. Annotations are left out."""
    return SchemaConverter(schema).convert(schema, "", WHITESPACE if whitespace else "")


class SchemaConverter:
    """Converts one schema, or parts of it with the whole as their definitions, to llguidance's JSON."""

    def __init__(self, root: Any, dropped: list[str] | None = None, closes_objects: bool = False) -> None:
        """
        dropped         receives "PATH: KEYWORD" for each keyword that is left out since it cannot be
                        enforced; None: such a keyword raises
        closes_objects  an object that names its properties has no others, unless the schema asks for them
        """
        self._root = root
        self._dropped = dropped
        self._closes_objects = closes_objects
        self._definitions = ""  # JSON

    def convert(self, schema: Any, path: str, whitespace: str) -> str:
        """A part of the schema. Raises GrammarError.

        path        where the part stands in the schema; "": it is the whole
        whitespace  regular expression of what may stand between two parts of the JSON; "": nothing
        """
        if not isinstance(schema, dict | bool):
            raise GrammarError(f"a schema must be an object, got {json.dumps(schema):.80}")
        options: dict[str, Any] = {"whitespace_flexible": bool(whitespace)}
        if whitespace:
            options["whitespace_pattern"] = whitespace
        schema = schema if isinstance(schema, dict) else {"anyOf": [schema]}
        keywords = _keywords(schema)
        is_whole = not path or "$ref" not in keywords
        closes_objects = self._closes_objects and "allOf" not in keywords
        if not is_whole:
            closes_objects = closes_objects and "allOf" not in self._root_keywords
        clean = self._clean(schema, path, closes_objects)
        if is_whole:
            return json.dumps({"x-guidance": options, **clean}, ensure_ascii=False)
        if not self._definitions:
            root = self._clean(self._root, "", self._closes_objects and "allOf" not in self._root_keywords)
            self._definitions = json.dumps({ROOT: _move_references(root)}, ensure_ascii=False)
        clean.pop("$defs", None)  # the root has them
        text = json.dumps({"x-guidance": options, **_move_references(clean)}, ensure_ascii=False)
        return f'{text[:-1]}, "$defs": {self._definitions}}}'

    def _clean(self, schema: Any, path: str, closes_objects: bool) -> Any:
        has_ids = self._dropped is not None and "$id" in self._root_keywords
        return _SchemaCleaner(self._root, has_ids, self._dropped, closes_objects).clean(schema, path)

    @cached_property
    def _root_keywords(self) -> frozenset[str]:
        return _keywords(self._root)


class _SchemaCleaner:
    """Removes annotations from a schema and counts its entries."""

    def __init__(self, root: Any, has_ids: bool, dropped: list[str] | None, closes_objects: bool) -> None:
        self._num_entries = 0
        self._root = root
        self._has_ids = has_ids  # the root may hold what references without "#" name
        self._dropped = dropped
        self._closes_objects = closes_objects

    def clean(self, schema: Any, path: str) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise GrammarError(
                f"a schema must be an object or a boolean, got {json.dumps(schema):.80}{_location(path)}"
            )
        self._count_entries(len(schema))
        schema = self._leave_out_unsupported(schema, path)
        clean = {
            key: self._clean_value(key, value, f"{path}/{key}"[:MAX_PATH_CHARS])
            for key, value in schema.items()
            if _is_constraint(key, value)
        }
        if self._closes_objects and clean.get("properties") and not clean.keys() & OBJECT_EXTENSIONS:
            return {**clean, "additionalProperties": False}
        if clean.get("additionalProperties") is False:
            clean = _merge_named_patterns(clean, path)
        return _forbid_escaped_keys(clean)

    def _clean_value(self, key: str, value: Any, path: str) -> Any:
        if key in SCHEMA_LIST_KEYWORDS and isinstance(value, list):
            self._count_entries(len(value))
            return [self.clean(item, f"{path}/{index}"[:MAX_PATH_CHARS]) for index, item in enumerate(value)]
        if key in SCHEMA_MAP_KEYWORDS and isinstance(value, dict):
            self._count_entries(len(value))
            return {name: self.clean(item, f"{path}/{name}"[:MAX_PATH_CHARS]) for name, item in value.items()}
        if key in SCHEMA_KEYWORDS:
            return self.clean(value, path)
        if key == "enum" and isinstance(value, list) and len(value) > limits.MAX_CHOICES:
            location = _location(path)
            raise GrammarError(
                f"an enum may hold at most {limits.MAX_CHOICES} values, got {len(value)}{location}"
            )
        return value

    def _leave_out_unsupported(self, schema: Mapping[str, Any], path: str) -> Mapping[str, Any]:
        """The schema without keywords that cannot be enforced; raises unless they may be dropped."""
        reasons = dict(_unsupported(schema))
        if self._dropped is None and reasons:
            keyword, reason = next(iter(reasons.items()))
            raise GrammarError(
                reason + _location(f"{path}/{keyword}" if keyword in LENGTH_KEYWORDS else path)
            )
        if self._dropped is None:
            return schema
        reasons |= dict.fromkeys(_malformed(schema, self._root, self._has_ids), "")
        self._dropped += [f"{path}: {keyword}" for keyword in reasons]
        return {key: value for key, value in schema.items() if key not in reasons}

    def _count_entries(self, num_entries: int) -> None:
        self._num_entries += num_entries
        if self._num_entries > limits.MAX_PROPERTIES:
            raise GrammarError(f"the schema holds more than {limits.MAX_PROPERTIES} keywords and properties")


def _unsupported(schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Keywords that cannot be enforced, each with the reason."""
    for keyword, neutral in UNSUPPORTED_KEYWORDS.items():
        if keyword in schema and schema[keyword] != neutral:
            yield keyword, f"the keyword {keyword!r} of JSON schema is not supported"
    if schema.get("format") in UNSUPPORTED_FORMATS:
        supported = ", ".join(FORMATS)
        yield "format", f"the format {schema['format']!r} is not supported; supported: {supported}"
    for key in LENGTH_KEYWORDS:
        value = schema.get(key)
        if isinstance(value, int | float) and value > limits.MAX_REPEAT:
            shown = f"{value:.12g}" if value < MAX_SHOWN_NUMBER else f"over {MAX_SHOWN_NUMBER:.0e}"
            yield key, f"{key} may be at most {limits.MAX_REPEAT}, got {shown}"


def _malformed(schema: Mapping[str, Any], root: Any, has_ids: bool) -> Iterator[str]:
    """Keywords that llguidance would refuse: it knows no look-around, and no other documents."""
    pattern, reference = schema.get("pattern"), schema.get("$ref")
    if isinstance(pattern, str) and not is_pattern_known(pattern):
        yield "pattern"
    patterns = schema.get("patternProperties")
    if isinstance(patterns, Mapping) and not all(map(is_pattern_known, patterns)):
        yield "patternProperties"
    if isinstance(reference, str):
        is_known = resolve_reference(reference, root) is not None if reference[:1] == "#" else has_ids
        if not is_known:
            yield "$ref"
    if isinstance(schema.get("enum"), list) and not schema["enum"]:
        yield "enum"
    names = schema.get("type", [])
    types = [names] if isinstance(names, str) else names
    values = schema["enum"] if isinstance(schema.get("enum"), list) else None
    if (
        not isinstance(types, list)
        or not all(name in PYTHON_TYPES for name in types)
        or (
            types
            and values
            and not any(isinstance(value, PYTHON_TYPES[name]) for name in types for value in values)
        )
    ):
        yield "type"


@lru_cache(maxsize=1024)
def is_pattern_known(pattern: str) -> bool:
    """Whether llguidance can enforce a regular expression."""
    return _is_valid({"type": "string", "pattern": pattern})


def _is_valid(schema: Mapping[str, Any]) -> bool:
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))


def _merge_named_patterns(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """An object's schema without patterns that match no names but those of its properties, which take theirs.

    After a comma llguidance would expect one more name of such a pattern, and there is none.
    """
    properties, patterns = schema.get("properties"), schema.get("patternProperties")
    if not isinstance(properties, dict) or not isinstance(patterns, dict) or not properties or not patterns:
        return schema
    if len(patterns) > MAX_PATTERNS or max(map(len, properties)) > MAX_NAME_CHARS:
        raise GrammarError(
            f"beside additionalProperties: false, patternProperties may hold at most {MAX_PATTERNS} patterns "
            f"and properties names of {MAX_NAME_CHARS} characters{_location(path)}"
        )
    properties, kept = dict(properties), dict(patterns)
    others = {"type": "string", "pattern": f"^{_other_texts(list(properties))}$"}
    for pattern, value in patterns.items() if _is_valid(others) else ():
        if not is_pattern_known(pattern) or _is_valid({"allOf": [others, {"pattern": pattern}]}):
            continue
        del kept[pattern]
        for name in properties:
            if _is_valid({"type": "string", "const": name, "pattern": pattern}):
                properties[name] = {"allOf": [properties[name], value]}
    rest = {key: value for key, value in schema.items() if key != "patternProperties"}
    return {**rest, "properties": properties, **({"patternProperties": kept} if kept else {})}


def _other_texts(texts: list[str]) -> str:
    """A regular expression for all texts but these."""
    tails: dict[str, list[str]] = {}
    for text in filter(None, texts):
        tails.setdefault(text[0], []).append(text[1:])
    chars = {char: f"\\x{{{ord(char):x}}}" for char in tails}
    options = [f"{chars[char]}{_other_texts(rest)}" for char, rest in tails.items()]
    options.append(f"[^{''.join(chars.values())}](?s:.*)" if chars else "(?s:.+)")
    return f"(?:{'|'.join(options if '' in texts else [*options, ''])})"


def _keywords(schema: Any) -> frozenset[str]:
    """Keywords of a schema and of the schemas inside of it."""
    keywords: set[str] = set()
    pending = [schema]
    while pending:
        part = pending.pop()
        if not isinstance(part, Mapping):
            continue
        keywords.update(part)
        for key, value in part.items():
            if key in SCHEMA_LIST_KEYWORDS and isinstance(value, list):
                pending += value
            elif key in SCHEMA_MAP_KEYWORDS and isinstance(value, Mapping):
                pending += value.values()
            elif key in SCHEMA_KEYWORDS:
                pending.append(value)
    return frozenset(keywords)


def _move_references(value: Any) -> Any:
    """The references of a part of a schema to the root, which becomes its definition ROOT."""
    if isinstance(value, Mapping):
        return {
            key: f"#/$defs/{ROOT}{item[1:]}"
            if key == "$ref" and isinstance(item, str) and item.startswith("#")
            else _move_references(item)
            for key, item in value.items()
        }
    return [_move_references(item) for item in value] if isinstance(value, list) else value


def _is_constraint(key: str, value: Any) -> bool:
    """Whether the keyword constrains; unknown keywords are annotations, by the standard."""
    if key == "format":
        return value in FORMATS
    return key in SUPPORTED_KEYWORDS


def _forbid_escaped_keys(schema: dict[str, Any]) -> dict[str, Any]:
    r"""Forbid escaped spellings of property names.

    To llguidance, "\u0061" is another property than "a", with any value. Names that a pattern matches are not
    escaped needlessly.
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
