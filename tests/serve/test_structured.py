"""What a body says about the form of its answer reaches the engine as one constraint, or is a 400 that names the field."""

import json
from typing import Any

import pytest

from foreword.core.structured import StructuredOutput
from foreword.serve.schema.chat import ChatBody
from foreword.serve.schema.completion import CompletionBody
from tests.serve.conftest import Running

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}, "required": ["b"]}
TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{}},"required":["b"]}'
GBNF, LARK = 'root ::= "a"', 'start: "a"'
LEGACY_TAG = {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}
TAG = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {}}}


def wanted(**fields: Any) -> StructuredOutput | None:
    return ChatBody.model_validate({"messages": [], **fields}).params().structured


def outputs(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, "json_schema", TEXT),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True, "description": "d"}}},
            "json_schema",
            TEXT,
        ),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", TEXT),
        (
            {"response_format": TAG},
            "structural_tag",
            '{"type":"structural_tag","format":{"type":"json_schema","json_schema":{}}}',
        ),
        (outputs(json=SCHEMA), "json_schema", TEXT),
        (outputs(json=TEXT), "json_schema", TEXT),
        (outputs(regex="a+"), "regex", "a+"),
        (outputs(choice=["a", "b"]), "choice", '["a","b"]'),
        (outputs(grammar=GBNF), "gbnf", GBNF),
        (outputs(grammar=LARK), "lark", LARK),
        (outputs(json_object=True, disable_fallback=True), "json_object", ""),
        (outputs(structural_tag="{}"), "structural_tag", "{}"),
        ({"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"}, "json_schema", TEXT),
        ({"guided_regex": "a"}, "regex", "a"),
        ({"guided_choice": ["a"]}, "choice", '["a"]'),
        ({"guided_grammar": LARK}, "lark", LARK),
        ({"guided_json_object": True}, "json_object", ""),
        ({"grammar": GBNF}, "gbnf", GBNF),
        ({"json_schema": SCHEMA}, "json_schema", TEXT),
        ({"json_schema": SCHEMA, "response_format": {"type": "text"}, **outputs()}, "json_schema", TEXT),
    ],
)
def test_every_spelling(fields: dict[str, Any], kind: str, text: str) -> None:
    structured = wanted(**fields)
    assert structured is not None and (structured.kind, structured.text) == (kind, text)
    assert structured.whitespace and structured.after is None
    completion = CompletionBody.model_validate({"prompt": "", **fields}).params().structured
    assert completion == structured


def test_vllms_older_structural_tags() -> None:
    structured = wanted(response_format=LEGACY_TAG)
    assert structured is not None and '"triggers":["<f"]' in structured.text and '"begin":"<f>"' in structured.text


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        outputs(),
        outputs(json_object=False, disable_any_whitespace=False),
        {"grammar": ""},
        {"guided_json": None},
    ],
)
def test_nothing_is_wanted(fields: dict[str, Any]) -> None:
    assert wanted(**fields) is None


def test_whitespace_and_where_it_begins() -> None:
    format_ = {"type": "json_object"}
    assert wanted(response_format=format_, **outputs(after="</think>")).after == "</think>"  # type: ignore[union-attr]
    for fields in (outputs(disable_any_whitespace=True), outputs(whitespace_pattern=""), {"guided_whitespace_pattern": ""}):
        assert not wanted(response_format=format_, **fields).whitespace  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        (
            {"response_format": {"type": "json_object"}, "guided_json": {}},
            "guided_json",
            "response_format and guided_json cannot",
        ),
        (outputs(regex="a", choice=["a"]), "structured_outputs.choice", "structured_outputs.regex and structured_outputs.choice"),
        ({"grammar": GBNF, "json_schema": {}}, "json_schema", "grammar and json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "must be 'text', 'json_object'"),
        ({"response_format": "json"}, "response_format", "must be"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema", "required"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "does not belong"),
        ({"response_format": {"type": "json_object", "colour": 1}}, "response_format.colour", "unknown field"),
        (outputs(whitespace_pattern="[ ]*", regex="a"), "structured_outputs.whitespace_pattern", "disable_any_whitespace"),
        (outputs(after="</think>"), "structured_outputs.after", "needs a constraint"),
        (outputs(after="", regex="a"), "structured_outputs.after", "not empty"),
        (outputs(colour=1), "structured_outputs.colour", "unknown field"),
        (outputs(disable_additional_properties=True), "disable_additional_properties", "not supported"),
        (outputs(json=5), "structured_outputs.json", "JSON schema"),
        (outputs(regex=""), "structured_outputs.regex", "not empty"),
        (outputs(structural_tag=5), "structured_outputs.structural_tag", "object"),
        ({"guided_choice": []}, "guided_choice", "list of texts"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "none of them empty"),
        ({"guided_regex": "\ud800"}, "guided_regex", "surrogate"),
        ({"guided_json": "x" * (1 << 20) + "x"}, "guided_json", "1048576"),
    ],
)
def test_what_is_refused(served: Running, fields: dict[str, Any], param: str, reason: str) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], **fields})
    reply = served.http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param), error
    assert reason in error["message"]
    assert not served.client.submitted
