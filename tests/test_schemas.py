"""The generator of schemas for benchmarks and tests."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jsonschema

from tests.support.json_schema_cases import make_schema, schema_prompt

EVERYTHING = {
    *(
        "additionalProperties",
        "allOf",
        "anyOf",
        "const",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "items",
    ),
    *(
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minItems",
        "minLength",
        "minimum",
        "multipleOf",
        "oneOf",
        "pattern",
    ),
    *("patternProperties", "prefixItems", "properties", "required", "type", "$ref", "$defs", "description"),
}


def keywords(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from keywords(item)


def test_schemas_are_valid_varied_and_deterministic() -> None:
    made = [make_schema(number) for number in range(300)]
    assert made[:50] == [make_schema(number) for number in range(50)]
    assert len({json.dumps(schema["properties"], sort_keys=True) for schema in made}) > 280
    for schema in made:
        jsonschema.Draft202012Validator.check_schema(schema)
        assert all(name in schema_prompt(schema) for name in schema["properties"])
    found = Counter(word for schema in made for word in set(keywords(schema)))
    assert not EVERYTHING - set(found)
    assert min(found[word] for word in EVERYTHING) >= 10
    assert found["🙂"] and found["名前"]
