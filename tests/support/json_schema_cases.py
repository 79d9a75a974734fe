"""Random JSON schemas of many kinds, common and unusual, deterministic by seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

Schema = dict[str, Any]
NAMES = (
    "name",
    "id",
    "city",
    "count",
    "tags",
    "owner",
    "street_name",
    "isActive",
    "größe",
    "名前",
    "città",
    "ключ",
    "with space",
    "a-b",
    "x.y",
    "🙂",
    'quo"te',
)
WORDS = ("red", "green", "blue", "open", "closed", "näïve", "東京", "a b", "", "null", "\n", "\\", "🙂")
PATTERNS = (
    "^[a-z]{1,8}$",
    "^[A-Z]{2}-[0-9]{3}$",
    "^(red|green|blue)$",
    r"^\+?[0-9]{5,12}$",
    "^[^@ ]{1,6}@[a-z]{1,6}\\.com$",
    "^v[0-9]{1,3}\\.[0-9]{1,3}$",
)
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "ipv6")
MAX_DEPTH = 3
# A small model repeats itself within a text for ever, and no schema forbids it.
SAMPLING: Mapping[str, Any] = {"dry_multiplier": 1.0, "dry_base": 1.75, "dry_allowed_length": 2}


def schema_prompt(schema: Schema) -> str:
    return f"Give an example of a JSON document with the fields {', '.join(schema['properties'])}."


def make_schema(number: int) -> Schema:
    """Schema `number`, deterministic: an object at the top level, with definitions if it has references."""
    random = Random(number)
    schema = _object(random, 0)
    definitions = {f"d{i}": _any_schema(random, MAX_DEPTH - 1, references=False) for i in range(3)}
    definitions["tree"] = {
        "type": "object",
        "properties": {
            "value": {"type": "integer", "minimum": 0, "maximum": 9},
            "children": _list_of({"$ref": "#/$defs/tree"}, 2),
        },
        "required": ["value"],
        "additionalProperties": False,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"schema {number}",
        **schema,
        "$defs": definitions,
    }


def _list_of(items: Schema, most: int) -> Schema:
    return {"type": "array", "items": items, "maxItems": most}


def _any_schema(random: Random, depth: int, references: bool = True) -> Schema:
    kinds = [*LEAVES, *(BRANCHES if depth < MAX_DEPTH else ()), *(("reference",) if references else ())]
    kind = random.choice(kinds)
    if kind == "reference":
        return {"$ref": f"#/$defs/{random.choice(('d0', 'd1', 'd2', 'tree'))}"}
    schema = BRANCHES[kind](random, depth) if kind in BRANCHES else LEAVES[kind](random)
    return {"description": "what it is", **schema} if random.random() < 0.2 else schema


def _object(random: Random, depth: int) -> Schema:
    names = random.sample(NAMES, random.randint(1, 5 - depth))
    schema: Schema = {
        "type": "object",
        "properties": {name: _any_schema(random, depth + 1) for name in names},
    }
    further = random.random()
    schema["required"] = names if further > 0.8 else [name for name in names if random.random() < 0.7]
    if further < 0.8:
        return schema | {"additionalProperties": False}
    # How many there may be is known to llguidance only where none is optional.
    schema["maxProperties"] = len(names) + 1
    if further < 0.9:
        return schema | {"additionalProperties": {"type": "integer", "minimum": 0, "maximum": 99}}
    return schema | {
        "patternProperties": {"^x-[a-z]{1,4}$": {"type": "boolean"}},
        "additionalProperties": False,
    }


def _array(random: Random, depth: int) -> Schema:
    least = random.randint(0, 2)
    return _list_of(_any_schema(random, depth + 1), least + random.randint(0, 3)) | (
        {"minItems": least} if least else {}
    )


def _tuple(random: Random, depth: int) -> Schema:
    parts = [_any_schema(random, depth + 1) for _ in range(random.randint(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _union(random: Random, depth: int) -> Schema:
    return {"anyOf": [_any_schema(random, depth + 1) for _ in range(random.randint(2, 3))]}


def _discriminated_union(random: Random, depth: int) -> Schema:
    """Objects with a constant as discriminator."""
    return {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, "value": _any_schema(random, depth + 1)},
                "required": ["kind", "value"],
                "additionalProperties": False,
            }
            for kind in ("circle", "square")
        ]
    }


def _all_of(random: Random, depth: int) -> Schema:
    """allOf of two schemas with different properties."""
    first, second = random.sample(NAMES, 2)
    return {
        "allOf": [
            {"type": "object", "properties": {first: _any_schema(random, depth + 1)}, "required": [first]},
            {"properties": {second: _any_schema(random, depth + 1)}, "required": [second]},
        ],
        "maxProperties": 2,
    }


def _string(random: Random) -> Schema:
    least = random.randint(0, 4)
    bounds = (
        {"maxLength": 20},
        {"maxLength": 60},
        {"pattern": "^[^0-9]*$", "maxLength": 30},
        {"minLength": least, "maxLength": 9},
    )
    return {"type": "string", **(random.choice(bounds) if random.random() < 0.95 else {})}


def _integer(random: Random) -> Schema:
    low = random.randint(-1000, 1000)
    high = low + random.randint(0, 2000)
    return {
        "type": "integer",
        **random.choice(
            (
                {"minimum": low, "maximum": high},
                {"exclusiveMinimum": low, "exclusiveMaximum": high + 2},
                {"minimum": 0, "maximum": 10**6},
            )
        ),
    }


def _number(random: Random) -> Schema:
    low = random.choice((-1.5, 0, 0.25, 10))
    return {"type": "number", "minimum": low, "maximum": low + random.choice((0.5, 1, 100, 12345.75))}


LEAVES: Mapping[str, Callable[[Random], Schema]] = {
    "text": _string,
    "integer": _integer,
    "number": _number,
    "boolean": lambda random: {"type": "boolean"},
    "null": lambda random: {"type": ["string", "null"], "maxLength": 9},
    "enum": lambda random: {"enum": random.sample((*WORDS, 1, 2.5, None, True), random.randint(1, 5))},
    "const": lambda random: {"const": random.choice((*WORDS, 7, {"a": [1, "b"]}))},
    "pattern": lambda random: {"type": "string", "pattern": random.choice(PATTERNS)},
    "format": lambda random: {"type": "string", "format": random.choice(FORMATS)},
    "multiple": lambda random: {
        "type": "integer",
        "multipleOf": random.choice((2, 5, 10)),
        "minimum": 0,
        "maximum": 1000,
    },
}
BRANCHES: Mapping[str, Callable[[Random, int], Schema]] = {
    "object": _object,
    "array": _array,
    "tuple": _tuple,
    "union": _union,
    "exclusive": _discriminated_union,
    "both": _all_of,
}
