"""Tools and reasoning in chat's own forms; tests/server/apis/test_wires.py has what all APIs do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from foreword.server.apis.body import MAX_ARGUMENTS_CHARS
from tests.server.conftest import RunningServer, run_server
from tests.support.fakes import FakeOutput, byte_tokenizer
from tests.support.tool_checkpoint import WEATHER, chat_template

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Weather in Bonn?"}]
TIME = {"type": "function", "function": {"name": "get_time"}}
NOTE = {"type": "custom", "custom": {"name": "note", "description": "Take a note"}}
TOOLS = [WEATHER, TIME]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
CALL_TIME = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nIt may rain.\n</think>\n\n"


def chat(server: RunningServer, **fields: Any) -> Any:
    return server.chat(**{"messages": USER, "tools": TOOLS, **fields})


def error_of(server: RunningServer, **fields: Any) -> dict[str, Any]:
    reply = server.http.post(CHAT, json={"messages": USER, **fields})
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    return error


def function(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def call_of(**function: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", **function}}


def test_older_functions_are_answered_in_their_form(fake: RunningServer) -> None:
    fake.set_output(FakeOutput(CALL, (3,)))
    fields = {"messages": USER, "functions": [WEATHER["function"]]}
    expected = {"name": "get_weather", "arguments": '{"city": "Köln", "days": 2}'}
    choice = fake.chat(**fields).choices[0]
    assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
    assert choice.message.function_call.model_dump() == expected
    chunks = list(fake.chat(**fields, stream=True))
    parts = [chunk.choices[0].delta.function_call for chunk in chunks if chunk.choices[0].delta.function_call]
    assert [part.name for part in parts] == ["get_weather"] + [None] * (len(parts) - 1)
    assert "".join(part.arguments for part in parts) == expected["arguments"]
    assert chunks[-1].choices[0].finish_reason == "function_call"


def test_custom_tool_in_both_forms(fake: RunningServer) -> None:
    fake.set_output(
        FakeOutput('<tool_call>\n{"name": "note", "arguments": {"input": "a\\n\\"b\\""}}\n</tool_call>')
    )
    call = chat(fake, tools=[NOTE]).choices[0].message.tool_calls[0]
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "note", 'a\n"b"')
    reply = fake.http.post(CHAT, json={"messages": USER, "tools": [NOTE], "stream": True})
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0]["type"] == "custom" and calls[0]["custom"] == {"name": "note", "input": ""}
    assert "".join(call["custom"]["input"] for call in calls) == 'a\n"b"'


@pytest.mark.parametrize("burst", [1, 7])
def test_reasoning_alone(fake: RunningServer, burst: int) -> None:
    fake.set_output(FakeOutput(f"{THOUGHT}Yes.", (burst,)))
    shown = fake.chat().choices[0].message
    assert (shown.content, shown.reasoning, shown.reasoning_content) == (
        "Yes.",
        "It may rain.",
        "It may rain.",
    )
    hidden = fake.chat(include_reasoning=False)
    assert hidden.choices[0].message.content == "Yes." and not hidden.choices[0].message.model_extra
    assert hidden.usage.completion_tokens_details.reasoning_tokens > 0
    chunks = list(fake.chat(include_reasoning=False, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Yes."
    assert not any(chunk.choices[0].delta.model_extra for chunk in chunks)
    for fields in ({"separate_reasoning": False}, {"reasoning_format": "none"}):
        assert fake.chat(**fields).choices[0].message.content == f"{THOUGHT}Yes."


@pytest.mark.parametrize("stream", [False, True])
def test_choices_logprobs_and_tokens_beside_calls(fake: RunningServer, stream: bool) -> None:
    fake.set_output(FakeOutput(f"{THOUGHT}Well.\n{CALL}", (4,)))
    fields = {"n": 2, "logprobs": True, "metrics": True, "return_token_ids": True}
    answer = chat(fake, **fields, stream=stream)
    if not stream:
        for choice in answer.choices:
            assert len(choice.logprobs.content) == len(choice.token_ids)
            assert choice.finish_reason == "tool_calls"
        return
    chunks = [chunk.choices[0] for chunk in answer if chunk.choices]
    for index in (0, 1):
        own = [chunk for chunk in chunks if chunk.index == index][1:]
        tokens = [token_id for chunk in own for token_id in chunk.token_ids]
        assert bytes(token for token in tokens if token < 256).decode() == f"{THOUGHT}Well.\n{CALL}"
        assert sum(len(chunk.logprobs.content) for chunk in own if chunk.logprobs) == len(tokens)
        shown = ("content", "reasoning", "tool_calls")
        for chunk in own:
            delta = chunk.delta.model_dump(exclude_none=True)
            pieces = "".join(text for text, *_ in chunk.tokens)
            (text,) = [delta[name] for name in shown if name in delta] or [""]
            assert pieces == (text if isinstance(text, str) else text[0]["function"]["arguments"])


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (
            {"tool_calls": [call_of(arguments="x" * (MAX_ARGUMENTS_CHARS + 1))]},
            "tool_calls[0].function.arguments",
        ),
        ({"tool_calls": [call_of(arguments='{"a": ')]}, "tool_calls[0].function.arguments"),
        ({"tool_calls": [{"id": "c", "type": "function"}]}, "tool_calls[0].function"),
        ({"tool_calls": [{"id": "c", "function": {"arguments": "{}"}}]}, "tool_calls[0].function.name"),
    ],
)
def test_malformed_history_is_refused(fake: RunningServer, message: dict[str, Any], param: str) -> None:
    history = [*USER, {"role": "assistant", "content": None, **message}]
    assert error_of(fake, messages=history, tools=[function()])["param"] == f"messages[1].{param}"


def test_refusal_of_the_template_is_its_text() -> None:
    closed = "{% if messages[-1].content == 'Sunday' %}{{ raise_exception('closed on Sundays') }}{% endif %}"
    with run_server(tokenizer=byte_tokenizer(closed + chat_template("hermes"))) as server:
        error = error_of(server, messages=[{"role": "user", "content": "Sunday"}], tools=[WEATHER])
        assert "closed on Sundays" in error["message"] and error["param"] == "messages"


def test_history_in_every_form_is_rendered(fake: RunningServer) -> None:
    """What the server has answered may be sent back, with the reasoning under any of its names."""
    fake.set_output(FakeOutput(f"{THOUGHT}Let me see.\n{CALL}", (3,)))
    answer = chat(fake).choices[0].message
    result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "sunny"}
    prompts = []
    dumped = answer.model_dump(exclude_none=True)
    names = {"reasoning", "reasoning_content"}
    bare = {name: value for name, value in dumped.items() if name not in names}
    forms = [dumped, *({**bare, name: "It may rain."} for name in (*names, "thinking"))]
    for form in forms:
        chat(fake, messages=[*USER, form, result])
        prompts.append(fake.last_prompt())
    unequal = [
        {"reasoning": "It may rain.", "reasoning_content": "No."},
        {"reasoning": "", "thinking": "It may rain."},
    ]
    for names_and_texts in unequal:
        chat(fake, messages=[*USER, {**bare, **names_and_texts}, result])
        prompts.append(fake.last_prompt())
    assert len(set(prompts)) == 1
    assert f"{THOUGHT}Let me see.\n{CALL}" in prompts[0] and "<tool_response>\nsunny" in prompts[0]


def test_tokenize_counts_tools(fake: RunningServer) -> None:
    tools = [WEATHER, TIME]
    counted = fake.http.post("/tokenize", json={"messages": USER, "tools": tools}).json()
    assert counted["count"] == chat(fake).usage.prompt_tokens
    assert counted["count"] > fake.http.post("/tokenize", json={"messages": USER}).json()["count"]


def test_metrics_count_calls_and_reasoning(fake: RunningServer) -> None:
    before = fake.metrics()
    fake.set_output(FakeOutput(f"{THOUGHT}{CALL}\n{CALL_TIME}", (3,)))
    usage = chat(fake).usage
    fake.set_output(FakeOutput('<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>', (3,)))
    chat(fake)
    after = fake.metrics()
    names = [name for name, *labels in after if name.startswith("foreword_") and not labels]
    grown = {name: after[name,] - before[name,] for name in names}
    assert grown["foreword_tool_calls_total"] == 2
    assert grown["foreword_tool_parse_errors_total"] == 1
    assert grown["foreword_reasoning_tokens_total"] == usage.completion_tokens_details.reasoning_tokens > 0
    assert grown["foreword_tool_call_tokens_total"] > len(CALL)


def test_call_of_an_aborted_answer_is_counted(fake: RunningServer) -> None:
    before = fake.metrics()["foreword_tool_calls_total",]
    fake.set_output(FakeOutput(CALL, (3,), hang_after=60))
    stream = chat(fake, stream=True)
    for chunk in stream:
        if chunk.choices[0].delta.tool_calls:
            break
    stream.close()
    fake.wait_until_idle()
    assert fake.metrics()["foreword_tool_calls_total",] == before + 1


def test_forced_call_beside_another_constraint_is_refused(fake: RunningServer) -> None:
    for fields in ({"structured_outputs": {"choice": ["a"]}}, {"guided_regex": "a"}):
        error = error_of(fake, tools=TOOLS, tool_choice="required", **fields)
        assert error["param"].startswith(next(iter(fields))) and "tool_choice" in error["message"]


def test_keywords_that_are_not_enforced(fake: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 1}}}}
    before = fake.metrics()["foreword_tool_schema_keywords_dropped_total",]
    with caplog.at_level("INFO", "foreword.serve"):
        for _ in range(2):
            chat(fake, tools=[function(parameters=parameters)])
    assert fake.metrics()["foreword_tool_schema_keywords_dropped_total",] == before + 2
    logged = [record.getMessage() for record in caplog.records if "not enforced" in record.getMessage()]
    assert len(logged) == 1 and logged[0].endswith(": not") and "properties" not in logged[0]
    error = error_of(fake, tools=[function(parameters=parameters, strict=True)])
    assert error["param"] == "tools[0].function.parameters" and "not" in error["message"]


# Chat's fields and forms; tests/chat_formats/test_tool_validation.py has the checks that APIs share.
@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"tools": [function(), function()]}, "tools[1].function.name", "'f'"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
        ({"tools": [{"name": "f", "input_schema": {}}]}, "tools[0]", "form of Messages; this API takes"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools[0]", "form of Responses; this API takes"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "c", "format": {"type": "?"}}}]},
            "tools[0].custom.format",
            "lark",
        ),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"functions": [{"name": "f"}], "tools": [function()]}, "tools", "functions"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call", "'g'"),
        ({"tools": [function()], "separate_reasoning": False}, "tools", "separate_reasoning"),
        (
            {"tools": [function()], "structured_outputs": {"regex": "a", "after": "b"}},
            "structured_outputs.regex.after",
            "tools",
        ),
        ({"reasoning_format": "other"}, "reasoning_format", "deepseek"),
        ({"thinking_token_budget": -2}, "thinking_token_budget", "-1"),
        ({"reasoning_effort": "ultra"}, "reasoning_effort", "xhigh"),
    ],
)
def test_refused_fields(fake: RunningServer, fields: dict[str, Any], param: str, part: str) -> None:
    error = error_of(fake, **fields)
    assert error["param"] == param and part in error["message"], error
