"""A checkpoint's `response_template` becomes a record that parses as transformers does."""

import json
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from foreword.chat_formats.chat_format import bind_format
from foreword.chat_formats.hf_response_template import from_response_template
from foreword.chat_formats.parser import parse_message
from foreword.chat_formats.tools import Tool, ToolUse
from tests.support.parsed_answers import collect

THINK = {"open": "<think>", "close": "</think>"}
WHOLE = {"type": "function", "function": "{content}"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
CALL = {"close": "</call>", "repeats": True, "content": "json", "open": "<call>"}
PATTERN = {name: value for name, value in CALL.items() if name != "open"}
ARGUMENTS = {"city": "Köln", "days": 2, "note": 'a "b"\nc'}
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
TOOLS = ToolUse(
    (
        Tool(
            "weather",
            parameters={
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "note": {"type": "string"},
                },
            },
        ),
    )
)


def spec(tool_calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    content = {"close": "<|end|>", "content": "text"}
    return {
        "start_anchor": "<|assistant|>",
        "fields": {"thinking": THINK, "content": content, "tool_calls": tool_calls, **fields},
    }


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        (
            spec({**CALL, "transform": WHOLE}),
            f'<think>\nHm.\n</think>\n\nWait.<call>\n{{"name": "weather", "arguments": {JSON}}}\n</call>',
        ),
        (
            spec(
                {
                    **CALL,
                    "transform_each": True,
                    "repeats": False,
                    "transform": {
                        "type": "function",
                        "function": {"name": "{tool}", "arguments": "{input}"},
                    },
                }
            ),
            f'<call>[\n {{"tool": "weather", "input": {JSON}}},'
            ' {"tool": "weather", "input": {}}\n]</call>',
        ),
        (
            spec({**PATTERN, "open_pattern": r"<call>\s*(?P<name>\w+)\s*=", "transform": NAMED}),
            f"<call>\nweather = {JSON}</call>",
        ),
        (
            spec(
                {
                    **PATTERN,
                    "open_pattern": r"<call>\s*<function=(?P<name>\w+)>",
                    "content": "xml-inline",
                    "content_args": {
                        "tag_pattern": r"<value=(?P<key>\w+)>\s*(?P<value>.*?)\s*</value>",
                        "value_parser": {"name": "json", "args": {"allow_non_json": True}},
                    },
                    "transform": NAMED,
                }
            ),
            "<call>\n<function=weather>\n<value=city>\nKöln\n</value>\n<value=days>\n2\n</value>\n"
            '<value=note>\na "b"\nc\n</value>\n</function>\n</call>',
        ),
        (
            spec(
                {
                    **PATTERN,
                    "open_pattern": r"<call>call:(?P<name>\w+)",
                    "content_args": {"unquoted_keys": True, "string_delims": [["<q>", "<q>"]]},
                    "transform": NAMED,
                }
            ),
            '<call>call:weather{city:<q>Köln<q>,days:2,note:<q>a "b"\nc<q>}</call>',
        ),
    ],
    ids=["JSON", "array", "name and JSON", "elements", "bare keys"],
)
def test_parses_as_transformers(template: dict[str, Any], answer: str) -> None:
    fmt = from_response_template(template)
    assert fmt is not None
    ours = collect(parse_message(bind_format(fmt, lambda _: None), TOOLS, answer))
    theirs = parse_response(answer, template, prefix="")
    calls = theirs["tool_calls"]
    functions = [call["function"] for call in (calls if isinstance(calls, list) else [calls])]
    assert ours.calls
    assert ours.json_calls == [(function["name"], function["arguments"]) for function in functions]
    assert ours.reasoning.strip() == (theirs.get("thinking") or "").strip()
    assert ours.content.strip() == (theirs.get("content") or "").strip()


def test_markers_of_content() -> None:
    content = {"open": "<response>\n", "close": "</response>", "content": "text"}
    fmt = from_response_template(spec({**CALL, "transform": WHOLE}, content=content))
    assert fmt is not None and fmt.content == ("<response>", "</response>")


@pytest.mark.parametrize(
    "template",
    [
        {},
        {"fields": {"content": {"close": "x"}}},
        spec({**CALL, "content": "kv-lines", "transform": WHOLE}),
        spec({"open": "<call>", "content": "json", "transform": WHOLE}),  # up to the end
        spec({**CALL, "transform": {"function": {"name": "fixed", "arguments": "{content}"}}}),
        spec({**CALL, "content_args": {"unquoted_keys": True}, "transform": WHOLE}),
        spec({**PATTERN, "open_pattern": r"<call>(a|b)(?P<name>\w+)", "transform": NAMED}),
        spec({**PATTERN, "open_pattern": r"<call>", "transform": NAMED}),
        spec({**PATTERN, "open_pattern": r"(?P<name>\w+)\s*=", "transform": NAMED}),  # without a marker
        spec({**PATTERN, "open_pattern": r"\s*(?P<name>\w+)\s*=", "transform": NAMED}),
        spec({**CALL, "transform": 5}),
    ],
)
def test_forms_without_a_record_are_left_to_the_next_candidate(template: dict[str, Any]) -> None:
    assert from_response_template(template) is None
