"""JSON schemas: rejected keywords, ignored annotations, whitespace, and conforming outputs."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.core.structured_output import StructuredOutput
from foreword.grammar.json_schema import GrammarError, convert_schema_text
from foreword.grammar.manager import GrammarManager
from tests.support.budget import examples
from tests.support.grammar_walks import (
    EOS,
    begin_request,
    encode,
    is_legal,
    legal_ids,
    random_walk,
    tokenizer,
)


def _schema(schema: Any, whitespace: bool = True) -> StructuredOutput:
    return StructuredOutput("json_schema", json.dumps(schema), whitespace)


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("uniqueItems", True),
        ("not", {"type": "null"}),
        ("if", {}),
        ("contains", {"const": 1}),
        ("dependentRequired", {"a": ["b"]}),
        ("propertyNames", {"pattern": "a"}),
        ("unevaluatedProperties", False),
        ("$dynamicRef", "#a"),
        ("format", "json-pointer"),
    ],
)
def test_a_keyword_that_is_not_supported_is_named(keyword: str, value: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"allOf": [{keyword: value}]}}}
    with pytest.raises(
        GrammarError,
        match=rf"{value if keyword == 'format' else keyword}'.*properties/a/allOf/0".replace("$", r"\$"),
    ):
        convert_schema_text(json.dumps(schema), True)


@pytest.mark.parametrize(
    ("length", "shown"), [(20_000, "got 20000 "), (10**400, r"got over 1e\+12"), (1e300, r"got over 1e\+12")]
)
def test_length_above_the_limit_is_named(length: float, shown: str) -> None:
    with pytest.raises(GrammarError, match=f"maxLength may be at most .*{shown}"):
        convert_schema_text(json.dumps({"type": "string", "maxLength": length}), True)


def test_property_names_and_values_may_be_keywords(grammars: GrammarManager) -> None:
    schema = {
        "type": "object",
        "properties": {"not": {"const": {"uniqueItems": True}}, "if": {"enum": [{"contains": 1}]}},
        "required": ["not", "if"],
        "additionalProperties": False,
        "default": {"not": 1},
    }
    assert is_legal(grammars, _schema(schema), '{"not": {"uniqueItems": true}, "if": {"contains": 1}}')


@pytest.mark.parametrize(
    "annotation",
    [
        {"uniqueItems": False, "unevaluatedProperties": True, "propertyNames": True, "not": False},
        {
            "title": "t",
            "description": "d",
            "examples": [1],
            "deprecated": True,
            "readOnly": True,
            "$comment": "c",
        },
        {
            "nullable": False,
            "discriminator": {"propertyName": "a"},
            "x-order": 3,
            "then": {},
            "markdownDescription": "m",
        },
    ],
)
def test_annotations_are_ignored(grammars: GrammarManager, annotation: dict[str, Any]) -> None:
    schema = {**annotation, "type": "array", "items": {"type": "string", "format": "password", **annotation}}
    assert is_legal(grammars, _schema(schema), '["a", "b", "a"]')
    assert not is_legal(grammars, _schema(schema), "[1]")


@pytest.mark.parametrize("schema", [True, {}, {"description": "anything"}])
def test_empty_schema_accepts_any_json(grammars: GrammarManager, schema: Any) -> None:
    for text in ('{"a": [1, null]}', "-12.5e3", '"text"', "[]", "true"):
        assert is_legal(grammars, _schema(schema), text)


NAMED = {"type": "object", "properties": {"a": {"type": "integer"}, "é": {"type": "null"}}}


def test_pattern_of_named_properties_alone_leads_to_no_dead_end(grammars: GrammarManager) -> None:
    """No other name matches it: after a comma there would be no token to go on with."""
    named = {"name": {"type": "string"}, "no": {"type": "integer"}, "é": {"type": "null"}}
    for pattern, other in (("^name$", ""), ("^(name|no)$", ""), ("^é$", ""), ("^n", "nose"), ("m", "mine")):
        schema = {
            "type": "object",
            "properties": named,
            "patternProperties": {pattern: {"maxLength": 2}},
            "additionalProperties": False,
        }
        structured = _schema(schema)
        assert is_legal(grammars, structured, '{"name": "ab", "no": 1, "é": null}')
        assert is_legal(grammars, structured, '{"name": "abc"}') == (pattern == "^é$")
        assert is_legal(grammars, structured, f'{{"no": 1, "{other or "nose"}": "a"}}') == bool(other)
        grammar = begin_request(grammars, structured)
        text = '{"name": "ab", "no": 1, "é": null'
        grammar.accept(encode(text))
        mask = grammar.mask(())
        assert mask is not None and grammar.error is None and legal_ids(mask)
        grammar.accept(encode(","))
        mask = grammar.mask(())
        assert mask is None or bool(legal_ids(mask)) == bool(other), pattern


@pytest.mark.parametrize(
    "schema", [NAMED, {**NAMED, "additionalProperties": True}, {**NAMED, "required": ["a"]}]
)
def test_escaped_name_is_the_same_property(grammars: GrammarManager, schema: dict[str, Any]) -> None:
    r"""A JSON parser reads {"a": 1, "\u0061": "x"} as {"a": "x"}."""
    for text in (r'{"a": 1, "\u0061": "x"}', r'{"a": 1, "\u00e9": "x"}', '{"a": "x"}'):
        assert not is_legal(grammars, _schema(schema), text)
    for text in ('{"a": 1, "é": null, "other": "x"}', r'{"a": 1, "an \"other\"\n": 7, "": []}'):
        assert is_legal(grammars, _schema(schema), text)


VALUE = {
    "name": "Clara Böhm",
    "tags": ["a", "b"],
    "inner": {"deep": {"list": [1, [2.5, {}], []], "none": None}},
    "yes": True,
}


@pytest.mark.parametrize("indent", [None, 0, 1, 2, 4, "\t"])
def test_usual_formatting_is_legal(grammars: GrammarManager, indent: int | str | None) -> None:
    text = json.dumps(VALUE, indent=indent, ensure_ascii=False)
    assert is_legal(grammars, StructuredOutput("json_object"), text)
    assert is_legal(grammars, _schema({"type": "object", "properties": {"name": {"type": "string"}}}), text)


def test_compact_formatting_is_legal(grammars: GrammarManager) -> None:
    text = json.dumps(VALUE, separators=(",", ":"), ensure_ascii=False)
    assert is_legal(grammars, StructuredOutput("json_object"), text)
    assert is_legal(grammars, StructuredOutput("json_object", whitespace=False), text)
    spaced = json.dumps(VALUE, ensure_ascii=False)
    assert not is_legal(grammars, StructuredOutput("json_object", whitespace=False), spaced)


@settings(max_examples=examples(40))
@given(seed=st.integers(0, 2**32))
def test_whitespace_ends(grammars: GrammarManager, seed: int) -> None:
    """A walk of whitespace tokens only comes to an end."""
    draw = random.Random(seed)
    grammar = begin_request(grammars, StructuredOutput("json_object"))
    grammar.accept(encode('{"a": 1'))
    blank_ids = [
        i for i in range(tokenizer().vocab_size) if (text := tokenizer().token_text(i)) and not text.strip()
    ]
    drawn = ""
    while legal := [i for i in blank_ids if grammar.num_legal([i])]:
        token_id = draw.choice(legal)
        drawn += tokenizer().token_text(token_id)
        grammar.accept([token_id])
        assert len(drawn) <= 33
    assert grammar.num_legal(encode("}")) == 1


def test_x_guidance_of_the_user_is_ignored(grammars: GrammarManager) -> None:
    schema = {"x-guidance": {"whitespace_pattern": "[ ]+", "lenient": True}, "type": "object"}
    assert not is_legal(grammars, _schema(schema), '{"a":     1}')


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text('aé\n"\\ \u2028😀', max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc é", max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=examples(60))
@given(value=JSON, indent=st.sampled_from([None, 2, "\t"]))
def test_any_json_value_is_legal(grammars: GrammarManager, value: Any, indent: Any) -> None:
    assert is_legal(grammars, _schema({}), json.dumps(value, indent=indent, ensure_ascii=False))
    assert is_legal(grammars, _schema({"const": value}), json.dumps(value, ensure_ascii=False, indent=indent))


NAMES = st.sampled_from(["a", "b", "ключ", "π🙂", "with space", 'quote"d', ""])
LEAVES = st.sampled_from(
    [
        {"type": "string", "maxLength": 6},
        {"type": "string", "minLength": 2, "maxLength": 4},
        {"type": "string", "pattern": "^[a-c]+[0-9]?$", "maxLength": 8},
        {"type": "string", "pattern": "b"},
        {"type": "integer", "minimum": -3, "maximum": 1200},
        {"type": "integer", "exclusiveMinimum": 7, "multipleOf": 5, "maximum": 1000},
        {"type": "number", "minimum": 0.5, "exclusiveMaximum": 20},
        {"type": ["boolean", "null"]},
        {"enum": ["x", 1, None, {"k": [True]}]},
        {"const": "é\n"},
        {"type": "string", "format": "date"},
        {"type": "string", "format": "ipv4"},
        {"$ref": "#/$defs/word"},
    ]
)


def _inner(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.dictionaries(NAMES, children, max_size=3).flatmap(
        lambda properties: st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.just(properties),
                "required": st.lists(st.sampled_from(sorted(properties)), unique=True)
                if properties
                else st.just([]),
                "additionalProperties": st.just(False) | children,
            }
        )
    )
    arrays = st.fixed_dictionaries(
        {
            "type": st.just("array"),
            "items": children,
            "minItems": st.integers(0, 2),
            "maxItems": st.integers(2, 4),
        }
    )
    tuples = st.fixed_dictionaries(
        {
            "type": st.just("array"),
            "prefixItems": st.lists(children, min_size=1, max_size=3),
            "items": st.just(False),
        }
    )
    return (
        objects
        | arrays
        | tuples
        | st.fixed_dictionaries({"anyOf": st.lists(children, min_size=1, max_size=3)})
    )


SCHEMAS = st.recursive(LEAVES, _inner, max_leaves=6)


@settings(max_examples=examples(80))
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_answers_conform(grammars: GrammarManager, schema: dict[str, Any], seed: int) -> None:
    full = {**schema, "$defs": {"word": {"type": "string", "pattern": "^[a-z]{1,5}$"}}}
    output = random_walk(
        begin_request(grammars, _schema(full)), random.Random(seed), max_tokens=400, end_soon=1.0
    )
    if output[-1] == EOS:
        jsonschema.Draft202012Validator(full).validate(json.loads(tokenizer().decode(output[:-1])))
