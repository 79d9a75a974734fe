"""Structured output fields: one constraint in the engine, or a 400 that names the field."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator

from foreword.cli.client import request_body
from foreword.core.params import SamplingParams
from foreword.core.structured_output import StructuredOutput
from foreword.server.apis.chat.body import ChatBody
from foreword.server.apis.completions import CompletionBody
from tests.server.conftest import MODEL, RunningServer
from tests.support.adversarial_grammars import REJECTED
from tests.support.json_schema_cases import SAMPLING, make_schema, schema_prompt

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}, "required": ["b"]}
TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{}},"required":["b"]}'
GBNF, LARK = 'root ::= "a"', 'start: "a"'
LEGACY_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}],
    "triggers": ["<f"],
}
TAG = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {}}}


def constraint_of(**fields: Any) -> StructuredOutput | None:
    return ChatBody.model_validate({"messages": [], **fields}).params().structured


def outputs(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "json_schema",
            TEXT,
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": SCHEMA, "strict": True, "description": "d"},
                }
            },
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
def test_all_fields_give_the_same_constraint(fields: dict[str, Any], kind: str, text: str) -> None:
    structured = constraint_of(**fields)
    assert structured is not None and (structured.constraint_type, structured.text) == (kind, text)
    assert structured.whitespace and structured.after is None
    completion = CompletionBody.model_validate({"prompt": "", **fields}).params().structured
    assert completion == structured


def test_older_structural_tags_of_vllm() -> None:
    structured = constraint_of(response_format=LEGACY_TAG)
    assert (
        structured is not None
        and '"triggers":["<f"]' in structured.text
        and '"begin":"<f>"' in structured.text
    )


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
def test_no_constraint(fields: dict[str, Any]) -> None:
    assert constraint_of(**fields) is None


def test_whitespace_and_after() -> None:
    format_ = {"type": "json_object"}
    assert constraint_of(response_format=format_, **outputs(after="</think>")).after == "</think>"  # type: ignore[union-attr]
    for fields in (
        outputs(disable_any_whitespace=True),
        outputs(whitespace_pattern=""),
        {"guided_whitespace_pattern": ""},
    ):
        assert not constraint_of(response_format=format_, **fields).whitespace  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        (
            {"response_format": {"type": "json_object"}, "guided_json": {}},
            "guided_json",
            "response_format and guided_json cannot",
        ),
        (
            outputs(regex="a", choice=["a"]),
            "structured_outputs.choice",
            "structured_outputs.regex and structured_outputs.choice",
        ),
        ({"grammar": GBNF, "json_schema": {}}, "json_schema", "grammar and json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "must be 'text', 'json_object'"),
        ({"response_format": "json"}, "response_format", "must be"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
            "required",
        ),
        (
            {"response_format": {"type": "json_schema", "schema": {}}},
            "response_format.json_schema",
            '"json_schema": {"name": ..., "schema": ...}',
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"type": "object", "properties": {}}}},
            "response_format.json_schema.properties",
            'the schema goes here: {"name": ..., "schema": ...}',
        ),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "does not belong"),
        (
            {"response_format": {"type": "json_object", "colour": 1}},
            "response_format.colour",
            "unknown field",
        ),
        (
            outputs(whitespace_pattern="[ ]*", regex="a"),
            "structured_outputs.whitespace_pattern",
            "disable_any_whitespace",
        ),
        (outputs(after="</think>"), "structured_outputs.after", "needs a constraint"),
        (outputs(after="", regex="a"), "structured_outputs.after", "must not be empty"),
        (outputs(colour=1), "structured_outputs.colour", "unknown field"),
        (
            outputs(disable_additional_properties=True),
            "structured_outputs.disable_additional_properties",
            "not supported",
        ),
        (outputs(json=5), "structured_outputs.json", "JSON schema"),
        (outputs(regex=""), "structured_outputs.regex", "must not be empty"),
        (outputs(structural_tag=5), "structured_outputs.structural_tag", "object"),
        ({"guided_choice": []}, "guided_choice", "list of non-empty strings"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "list of non-empty strings"),
        ({"guided_regex": "\ud800"}, "guided_regex", "surrogate"),
        ({"guided_json": "x" * (1 << 20) + "x"}, "guided_json", "1048576"),
    ],
)
def test_invalid_constraints_are_named(
    served: RunningServer, fields: dict[str, Any], param: str, reason: str
) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], **fields})
    reply = served.http.post(
        "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
    )
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param), error
    assert reason in error["message"]
    assert not served.client.submitted


# With a real engine


def ask(demo: RunningServer, speculation: str = "auto", max_tokens: int = 1500, **fields: Any) -> Any:
    extra = {"metrics": True, "speculation": {"method": speculation}, **fields.pop("extra", {})}
    messages = fields.pop("messages", [{"role": "user", "content": "Give an example."}])
    return demo.openai.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=max_tokens, extra_body=extra, **fields
    )


def answer_schema(demo: RunningServer, number: int, speculation: str) -> Any:
    schema = make_schema(number)
    named: Any = {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": schema}}
    messages = [{"role": "user", "content": schema_prompt(schema)}]
    return ask(
        demo,
        speculation,
        messages=messages,
        response_format=named,
        seed=number,
        temperature=0.7,
        extra={**SAMPLING},
    )


@pytest.mark.full
def test_answers_conform_to_schemas(demo: RunningServer) -> None:
    """Part of benchmarks/structured.py: nearly all answers finish, and every finished one conforms."""
    numbers = range(0, 300, 10)
    with ThreadPoolExecutor(8) as threads:
        drafted, plain = (
            list(threads.map(partial(answer_schema, demo, speculation=how), numbers))
            for how in ("auto", "off")
        )
    finished = 0
    for number, one, other in zip(numbers, drafted, plain, strict=True):
        text, reason = one.choices[0].message.content, one.choices[0].finish_reason
        assert (text, reason) == (other.choices[0].message.content, other.choices[0].finish_reason), number
        if reason == "stop":
            finished += 1
            # The year 0 is one of RFC 3339, but none of Python's dates, which the checker uses.
            Draft202012Validator(
                make_schema(number), format_checker=Draft202012Validator.FORMAT_CHECKER
            ).validate(json.loads(text.replace('"0000-', '"2000-')))
    assert finished >= 0.95 * len(numbers)
    assert sum(one.metrics.get("draft_tokens", 0) for one in drafted) > 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("extra", "expression"),
    [
        ({"guided_regex": "[A-Z]{3}-[0-9]{2}"}, "[A-Z]{3}-[0-9]{2}"),
        (outputs(choice=["red", "dark green"]), "red|dark green"),
        ({"grammar": 'root ::= ("ab" | "cd") [0-9]? "."'}, "(ab|cd)[0-9]?\\."),
        (outputs(grammar='start: "<" /[a-z]{2,4}/ ">"'), "<[a-z]{2,4}>"),
        (outputs(structural_tag=TAG | {"format": {"type": "const_string", "value": "as told"}}), "as told"),
    ],
)
def test_other_constraint_types(demo: RunningServer, extra: dict[str, Any], expression: str) -> None:
    for temperature in (0, 1.5):
        answer = ask(demo, extra=extra, n=3, seed=5, temperature=temperature, max_tokens=30)
        for choice in answer.choices:
            assert choice.finish_reason == "stop" and re.fullmatch(expression, choice.message.content)


def test_stream_matches_the_whole_answer(demo: RunningServer) -> None:
    messages = [{"role": "user", "content": "Write JSON: name=Paul, age=42, city=Lisbon, job=pilot"}]
    fields: dict[str, Any] = {
        "messages": messages,
        "response_format": {"type": "json_object"},
        "seed": 3,
        "temperature": 0.3,
    }
    whole = ask(demo, **fields).choices[0].message.content
    streamed = "".join(
        chunk.choices[0].delta.content or "" for chunk in ask(demo, stream=True, **fields) if chunk.choices
    )
    assert streamed == whole and isinstance(json.loads(whole), dict)


def test_constraint_begins_after_the_reasoning(demo: RunningServer) -> None:
    """A bias produces the text that ends the reasoning; only the text after it is constrained."""
    (token,) = demo.http.post("/tokenize", json={"prompt": "!"}).json()["tokens"]
    extra = outputs(regex="[0-9]{4}", after="!") | {"logit_bias": {str(token): 100}}
    answer = ask(demo, extra=extra, max_tokens=60, temperature=0)
    _, found, text = answer.choices[0].message.content.partition("!")
    assert found and re.fullmatch("[0-9]{4}", text), answer


@pytest.mark.full
def test_hostile_grammars_leave_others_running(demo: RunningServer) -> None:
    """Each is a 400, and a concurrent answer does not change."""
    fields: dict[str, Any] = {"seed": 1, "temperature": 1.0, "max_tokens": 400, "extra": {"ignore_eos": True}}
    alone = ask(demo, **fields).choices[0].message.content
    ask(demo, extra=outputs(regex="a"))  # the worker has started
    with ThreadPoolExecutor(1) as threads:
        for number, (name, structured) in enumerate(REJECTED.items()):
            beside = threads.submit(ask, demo, **fields) if number % 10 == 0 else None
            _, body = request_body(
                MODEL,
                [{"role": "user", "content": "Hi"}],
                SamplingParams(max_tokens=5, structured=structured),
            )
            reply = demo.http.post("/v1/chat/completions", json=body)
            assert reply.status_code == 400, (name, reply.text)
            assert reply.json()["error"]["param"].startswith("structured_outputs"), name
            assert beside is None or beside.result().choices[0].message.content == alone


def test_contradictory_constraint_is_a_400(demo: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError, match="no token") as caught:
        ask(
            demo,
            extra=outputs(regex="[0-9]+")
            | {"allowed_token_ids": demo.http.post("/tokenize", json={"prompt": "a"}).json()["tokens"]},
        )
    assert caught.value.status_code == 400
