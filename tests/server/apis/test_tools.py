"""Tool calls and reasoning of /v1/chat/completions.

The wire form is tested with a fake engine that writes what a test says, and what is enforced with a real
engine of random weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
import openai
import pytest
from openai.lib._tools import pydantic_function_tool
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel

from foreword.chat_formats.tool_validation import MAX_TOOLS, MAX_TOOLS_BYTES
from foreword.checkpoint import prepare_checkpoint
from foreword.config.drafters import DRAFTERS
from foreword.config.options import Config
from foreword.engine_client.process_client import ProcessClient
from foreword.server.apis.tools import MAX_ARGUMENTS_CHARS
from tests.server.conftest import MODEL, RunningServer, run_server
from tests.support.budget import is_full
from tests.support.checkpoints import EOS
from tests.support.fakes import FakeOutput, byte_tokenizer
from tests.support.feature_matrix import CHAT as CHAT_FEATURES
from tests.support.feature_matrix import DRAFTER_COLUMNS
from tests.support.tool_checkpoint import (
    END_OF_TURN,
    WEATHER,
    call_bias,
    chat_template,
    marker_id,
    write_tool_checkpoint,
)

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Weather in Bonn?"}]
TIME = {"type": "function", "function": {"name": "get_time"}}
NOTE = {"type": "custom", "custom": {"name": "note", "description": "Take a note"}}
TOOLS = [WEATHER, TIME]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
CALL_TIME = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nIt may rain.\n</think>\n\n"


@pytest.fixture(scope="module")
def fake() -> Iterator[RunningServer]:
    """A fake engine behind a template in the format hermes; all markers are spelled texts."""
    with run_server(tokenizer=byte_tokenizer(chat_template("hermes"))) as server:
        yield server
        server.wait_until_idle()


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Random weights, every drafter, and the markers as tokens."""
    folder = tmp_path_factory.mktemp("hermes")
    recording = folder / "recording.jsonl"
    recording.write_text(json.dumps({"prompt_token_ids": [5], "seed": 1, "token_ids": [6, 7]}) + "\n")
    config = Config(
        model=str(write_tool_checkpoint(folder / "model")),
        draft_model=str(write_tool_checkpoint(folder / "drafter", dtype="bfloat16")),
        speculate=",".join(DRAFTERS),
        replay_file=str(recording),
        kv_cache_memory="60000tokens",
        log_level="warning",
        threads=1,
    )
    prepared = prepare_checkpoint(config)
    client = ProcessClient(prepared.config, prepared.never_sampled_ids, prepared.tokenizer.vocabulary)
    with run_server(prepared.config, client, tokenizer=prepared.tokenizer) as server:
        yield server


def chat(server: RunningServer, **fields: Any) -> Any:
    return server.chat(**{"messages": USER, "tools": TOOLS, **fields})


def sampled(**fields: Any) -> dict[str, Any]:
    """A request that a random model answers at length."""
    return {"temperature": 0.8, "seed": 3, "max_tokens": 150, "think": False, **fields}


def bias(values: Mapping[int, float]) -> dict[str, float]:
    return {str(token_id): value for token_id, value in values.items()}


def error_of(server: RunningServer, **fields: Any) -> dict[str, Any]:
    reply = server.http.post(CHAT, json={"messages": USER, **fields})
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    return error


def counters(server: RunningServer) -> dict[str, float]:
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    return {
        sample.name: sample.value
        for family in families
        for sample in family.samples
        if not sample.labels.keys() - {"model"}
    }


def without_ids(message: Any) -> Any:
    """A message without its calls' ids, which are random, and without empty content."""
    dumped = message.model_dump(exclude_none=True)
    dumped = {name: value for name, value in dumped.items() if value != ""}
    for call in dumped.get("tool_calls", ()):
        assert re.fullmatch("call_[0-9a-f]{24}", call.pop("id"))
        call.pop("index", None)
    return dumped


def streamed(chunks: Any) -> tuple[Any, list[Any]]:
    """(the accumulated completion, all chunks) of a stream."""
    state = openai.lib.streaming.chat.ChatCompletionStreamState()
    kept = []
    for chunk in chunks:
        kept.append(chunk)
        state.handle_chunk(chunk)
    return state.current_completion_snapshot, kept


# The wire form.


def test_call_in_a_whole_response(fake: RunningServer) -> None:
    fake.set_output(FakeOutput(f"{THOUGHT}Let me see.\n{CALL}\n{CALL_TIME}", (3,)))
    answer = chat(fake)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert without_ids(choice.message) == {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning_content": "It may rain.",
        "reasoning": "It may rain.",
        "tool_calls": [
            {
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Köln", "days": 2}'},
            },
            {"type": "function", "function": {"name": "get_time", "arguments": "{}"}},
        ],
    }
    first, second = choice.message.tool_calls
    assert first.id != second.id
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens


@pytest.mark.parametrize("burst", [1, 3, 200])
def test_stream_of_calls(fake: RunningServer, burst: int) -> None:
    fake.set_output(FakeOutput(f"{THOUGHT}Let me see.\n{CALL}\n{CALL_TIME}", (burst,)))
    whole = chat(fake).choices[0]
    final, chunks = streamed(chat(fake, stream=True))
    assert without_ids(final.choices[0].message) == without_ids(whole.message)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] == "tool_calls" and not any(reasons[:-1])
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    starts = [call for call in deltas if call.id]
    assert [(call.index, call.type, call.function.name, call.function.arguments) for call in starts] == [
        (0, "function", "get_weather", ""),
        (1, "function", "get_time", ""),
    ]
    rest = [call.model_dump(exclude_none=True) for call in deltas if not call.id]
    assert all(call.keys() == {"index", "function"} for call in rest)
    assert all(call["function"].keys() == {"arguments"} for call in rest)
    texts = {
        index: "".join(call["function"]["arguments"] for call in rest if call["index"] == index)
        for index in (0, 1)
    }
    assert texts == {0: '{"city": "Köln", "days": 2}', 1: "{}"}
    for chunk in chunks:
        delta = chunk.choices[0].delta.model_dump(exclude_none=True, exclude={"role"})
        assert delta.get("reasoning") == delta.get("reasoning_content")
        assert len(delta.keys() - {"reasoning"}) <= 1, "a chunk has one kind of text"


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


@pytest.mark.parametrize("burst", [1, 4])
@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>', None),
        ("I would <tool_call> but", "I would <tool_call> but"),
        ("Nothing to call.", "Nothing to call."),
    ],
)
def test_text_that_is_no_call_stays_content(
    fake: RunningServer, text: str, content: str | None, burst: int
) -> None:
    fake.set_output(FakeOutput(text, (burst,)))
    choice = chat(fake).choices[0]
    assert choice.finish_reason == "stop" and choice.message.tool_calls is None
    assert choice.message.content.strip() == (text if content is None else content)
    final, _ = streamed(chat(fake, stream=True))
    assert final.choices[0].message.content == choice.message.content


def test_no_tools_and_tool_choice_none_have_no_calls(fake: RunningServer) -> None:
    fake.set_output(FakeOutput(CALL, (3,)))
    for fields in ({"tools": openai.NOT_GIVEN}, {"tool_choice": "none"}):
        choice = chat(fake, **fields).choices[0]
        assert choice.finish_reason == "stop" and choice.message.tool_calls is None
        assert "Köln" in choice.message.content


def test_stop_strings_end_content_alone(fake: RunningServer) -> None:
    text = f"{THOUGHT}See:\n{CALL}\nIt may rain, she said"
    fake.set_output(FakeOutput(text, (5,)))
    answer = chat(fake, stop=["rain", "Köln"]).choices[0]
    assert answer.message.reasoning == "It may rain."
    assert json.loads(answer.message.tool_calls[0].function.arguments)["city"] == "Köln"
    assert answer.message.content.endswith("It may ") and answer.finish_reason == "tool_calls"
    final, _ = streamed(chat(fake, stop=["rain", "Köln"], stream=True))
    assert without_ids(final.choices[0].message) == without_ids(answer.message)


def test_stop_string_does_not_span_a_call(fake: RunningServer) -> None:
    fake.set_output(FakeOutput(f"ab{CALL}cd", (5,)))
    message = chat(fake, stop=["bc"]).choices[0].message
    assert message.content == "abcd" and message.tool_calls


def test_call_cut_by_the_length_is_no_finished_call(fake: RunningServer) -> None:
    fake.set_output(FakeOutput(CALL, (3,)))
    choice = chat(fake, max_tokens=60).choices[0]
    assert choice.finish_reason == "length"
    assert '{"city": "Köln", "days": 2}'.startswith(choice.message.tool_calls[0].function.arguments)


CUTS = (3, 13, 40, len(CALL.encode()) - 5)  # within the marker, before and behind the name, within the end


@pytest.mark.parametrize("num_tokens", CUTS)
@pytest.mark.parametrize("stream", [False, True])
def test_no_piece_of_a_cut_call_is_content(fake: RunningServer, num_tokens: int, stream: bool) -> None:
    fake.set_output(FakeOutput(CALL, (3,)))
    answer = chat(fake, tool_choice="required", max_tokens=num_tokens, stream=stream)
    choice = (streamed(answer)[0] if stream else answer).choices[0]
    assert (choice.message.content or "", choice.finish_reason) == ("", "length")
    calls = choice.message.tool_calls or []
    assert [call.function.name for call in calls] == ["get_weather"] * (num_tokens == CUTS[-1])


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
    assert without_ids(hidden.choices[0].message) == {"role": "assistant", "content": "Yes."}
    assert hidden.usage.completion_tokens_details.reasoning_tokens > 0
    final, chunks = streamed(fake.chat(include_reasoning=False, stream=True))
    assert final.choices[0].message.content == "Yes."
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


# Fields and their limits.


def function(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


BIG = {"type": "object", "description": "x" * (MAX_TOOLS_BYTES // 2 + 1)}


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"tools": [function(), function()]}, "tools[1].function.name", "'f'"),
        ({"tools": [function("a b")]}, "tools[0].function.name", "128"),
        ({"tools": [function("x" * 129)]}, "tools[0].function.name", "128"),
        ({"tools": [function(parameters={"properties": {}})]}, "tools[0].function.parameters", '"object"'),
        ({"tools": [function(parameters={"type": "array"})]}, "tools[0].function.parameters", "array"),
        ({"tools": [function(parameters=[])]}, "tools[0].function.parameters", "an object"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
        ({"tools": [{"name": "f", "input_schema": {}}]}, "tools[0]", 'form of Messages; this API'),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools[0]", "form of Responses; this API takes"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"tools": [{"type": "custom", "custom": {"name": "c", "format": {"type": "?"}}}]},
         "tools[0].custom.format", "lark"),
        ({"tools": [function(f"f{i}") for i in range(MAX_TOOLS + 1)]}, "tools", str(MAX_TOOLS)),
        ({"tools": [function("a", parameters=BIG), function("b", parameters=BIG)]}, "tools",
         str(MAX_TOOLS_BYTES)),
        ({"tools": [function()], "tool_choice": function("g")}, "tool_choice", "'g'"),
        ({"tools": [function()], "tool_choice": "maybe"}, "tool_choice", "required"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        (
            {
                "tools": [function()],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
            },
            "tool_choice.allowed_tools",
            "mode",
        ),
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
)  # fmt: skip
def test_refused_fields(fake: RunningServer, fields: dict[str, Any], param: str, part: str) -> None:
    error = error_of(fake, **fields)
    assert error["param"] == param and part in error["message"], error


def call_of(**function: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", **function}}


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
        prompts.append(bytes(token for token in fake.client.submitted[-1].prompt_ids if token < 256).decode())
    unequal = [
        {"reasoning": "It may rain.", "reasoning_content": "No."},
        {"reasoning": "", "thinking": "It may rain."},
    ]
    for names_and_texts in unequal:
        chat(fake, messages=[*USER, {**bare, **names_and_texts}, result])
        prompts.append(bytes(token for token in fake.client.submitted[-1].prompt_ids if token < 256).decode())
    assert len(set(prompts)) == 1
    assert f"{THOUGHT}Let me see.\n{CALL}" in prompts[0] and "<tool_response>\nsunny" in prompts[0]


def test_tokenize_counts_tools(fake: RunningServer) -> None:
    tools = [WEATHER, TIME]
    counted = fake.http.post("/tokenize", json={"messages": USER, "tools": tools}).json()
    assert counted["count"] == chat(fake).usage.prompt_tokens
    assert counted["count"] > fake.http.post("/tokenize", json={"messages": USER}).json()["count"]


def test_metrics_count_calls_and_reasoning(fake: RunningServer) -> None:
    before = counters(fake)
    fake.set_output(FakeOutput(f"{THOUGHT}{CALL}\n{CALL_TIME}", (3,)))
    usage = chat(fake).usage
    fake.set_output(FakeOutput('<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>', (3,)))
    chat(fake)
    after = counters(fake)
    grown = {name: after[name] - before[name] for name in after if name.startswith("foreword_")}
    assert grown["foreword_tool_calls_total"] == 2
    assert grown["foreword_tool_parse_errors_total"] == 1
    assert grown["foreword_reasoning_tokens_total"] == usage.completion_tokens_details.reasoning_tokens > 0
    assert grown["foreword_tool_call_tokens_total"] > len(CALL)


def test_call_of_an_aborted_answer_is_counted(fake: RunningServer) -> None:
    before = counters(fake)["foreword_tool_calls_total"]
    fake.set_output(FakeOutput(CALL, (3,), hang_after=60))
    stream = chat(fake, stream=True)
    for chunk in stream:
        if chunk.choices[0].delta.tool_calls:
            break
    stream.close()
    fake.wait_until_idle()
    assert counters(fake)["foreword_tool_calls_total"] == before + 1


# What is enforced.

SCHEMA = WEATHER["function"]["parameters"]


def check_calls(choice: Any) -> list[str]:
    """Names of the calls, whose arguments are of their schema."""
    for call in choice.message.tool_calls:
        arguments = json.loads(call.function.arguments)
        jsonschema.validate(arguments, SCHEMA if call.function.name == "get_weather" else {"type": "object"})
    return [call.function.name for call in choice.message.tool_calls]


@pytest.mark.parametrize("seed", range(3))
def test_required_and_named_calls(hermes: RunningServer, seed: int) -> None:
    required = chat(hermes, **sampled(seed=seed, tool_choice="required", max_tokens=800)).choices[0]
    assert required.finish_reason == "tool_calls" and required.message.content is None
    check_calls(required)
    for name in ("get_time", "get_weather"):
        fields = sampled(seed=seed, parallel_tool_calls=False)
        allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": name}}]}
        for choice in (function(name), {"type": "allowed_tools", "allowed_tools": allowed}):
            named = chat(hermes, **fields, tool_choice=choice).choices[0]
            assert check_calls(named) == [name]


def test_auto_calls_are_enforced_from_their_marker_on(hermes: RunningServer) -> None:
    fields = sampled(logit_bias=bias(call_bias()), max_tokens=400)
    several = chat(hermes, **fields).choices[0]
    assert len(several.message.tool_calls) > 1
    single = chat(hermes, **fields, parallel_tool_calls=False).choices[0]
    assert len(check_calls(single)) == 1 and single.finish_reason == "tool_calls"
    assert single.message.content == several.message.content[: len(single.message.content)]
    none = chat(hermes, **fields, tool_choice="none").choices[0]
    assert none.message.tool_calls is None and "<tool_call>" not in none.message.content


def test_parsed_functions(hermes: RunningServer) -> None:
    class GetWeather(BaseModel):
        """Weather of a city."""

        city: str
        days: int

    answer = hermes.openai.chat.completions.parse(
        model=MODEL,
        messages=USER,
        tools=[pydantic_function_tool(GetWeather)],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=1,
        max_tokens=600,
        logit_bias={"34": 8.0},  # of quotation marks, so that the string ends
        extra_body={"think": False},
    )
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather)


def test_input_of_a_custom_tool_is_enforced(hermes: RunningServer) -> None:
    grammar = {"syntax": "regex", "definition": "[a-d]{3}-[0-9]{2}"}
    tool = {"type": "custom", "custom": {"name": "code", "format": {"type": "grammar", "grammar": grammar}}}
    fields = sampled(tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (call,) = chat(hermes, **fields).choices[0].message.tool_calls
    assert re.fullmatch("[a-d]{3}-[0-9]{2}", call.custom.input)


def test_answer_is_a_document_or_calls(hermes: RunningServer) -> None:
    format_ = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["sun", "rain"]}}}
    answer = chat(hermes, **sampled(response_format=format_)).choices[0]
    if answer.message.tool_calls:
        check_calls(answer)
    else:
        assert json.loads(answer.message.content) in ("sun", "rain")
    document = chat(hermes, **sampled(response_format=format_, tool_choice="none")).choices[0]
    assert json.loads(document.message.content) in ("sun", "rain")


def test_constrained_answer_is_a_text_of_its_constraint(hermes: RunningServer) -> None:
    """From its first character on, with reasoning before it and without, whole and streamed."""
    constraints: list[tuple[dict[str, Any], str]] = [
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_regex": " ?[a-z]{3}"}, " ?[a-z]{3}"),
    ]
    messages = [*USER, {"role": "assistant", "content": "<think>\nHm."}]
    reasoning = {"messages": messages, "continue_final_message": True, "thinking_token_budget": 3}
    for extra, pattern in constraints:
        for seed in range(5):
            for before in ({"messages": USER}, reasoning):
                fields = sampled(seed=seed, max_tokens=40, **extra, **before)
                whole = hermes.chat(**fields).choices[0].message.content
                final, _ = streamed(hermes.chat(**fields, stream=True))
                assert re.fullmatch(pattern, whole) and final.choices[0].message.content == whole


def test_named_tool_is_called_exactly_once(hermes: RunningServer) -> None:
    named = {"type": "function", "function": {"name": "get_time"}}
    for seed in range(3):
        choice = chat(hermes, **sampled(seed=seed, tool_choice=named)).choices[0]
        assert [call.function.name for call in choice.message.tool_calls] == ["get_time"]
        assert choice.finish_reason == "tool_calls"
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    fields = {"input": "Hi", "tools": flat, "max_output_tokens": 150, "reasoning": {"effort": "none"}}
    reply = hermes.http.post(
        "/v1/responses", json={**fields, "tool_choice": {"type": "function", "name": "get_time"}}
    )
    assert [item["type"] for item in reply.json()["output"]] == ["function_call"], reply.text
    tools = [{"name": "get_time", "input_schema": {"type": "object", "properties": {}}}]
    fields = {"messages": USER, "tools": tools, "max_tokens": 150, "thinking": {"type": "disabled"}}
    reply = hermes.http.post(
        "/v1/messages", json={**fields, "model": MODEL, "tool_choice": {"type": "tool", "name": "get_time"}}
    )
    assert [block["type"] for block in reply.json()["content"]] == ["tool_use"], reply.text


def test_forced_call_beside_another_constraint_is_refused(hermes: RunningServer) -> None:
    for fields in ({"structured_outputs": {"choice": ["a"]}}, {"guided_regex": "a"}):
        error = error_of(hermes, tools=TOOLS, tool_choice="required", **fields)
        assert error["param"].startswith(next(iter(fields))) and "tool_choice" in error["message"]


def test_thinking_budget(hermes: RunningServer) -> None:
    """The prompt has opened the reasoning, and the bias lets nothing end it but its budget."""
    banned = (marker_id("<think>"), marker_id("</think>"), EOS, END_OF_TURN)
    fields = sampled(
        logit_bias=bias(dict.fromkeys(banned, -100.0)), max_tokens=60, continue_final_message=True
    )
    messages = [*USER, {"role": "assistant", "content": "<think>\n"}]
    unlimited = hermes.chat(messages=messages, **fields)
    assert unlimited.usage.completion_tokens_details.reasoning_tokens == 60
    for budget in (0, 1, 7):
        limited = hermes.chat(messages=messages, **fields, thinking_token_budget=budget)
        assert limited.usage.completion_tokens_details.reasoning_tokens == budget + 1  # its closing marker
        message = limited.choices[0].message
        assert message.content and "think>" not in message.content
        begin = (message.model_extra or {}).get("reasoning", "")
        assert unlimited.choices[0].message.reasoning.startswith(begin.rstrip("\ufffd"))


def test_keywords_that_are_not_enforced(hermes: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 1}}}}
    before = counters(hermes)["foreword_tool_schema_keywords_dropped_total"]
    with caplog.at_level("INFO", "foreword.serve"):
        for _ in range(2):
            chat(hermes, **sampled(tools=[function(parameters=parameters)], max_tokens=3))
    assert counters(hermes)["foreword_tool_schema_keywords_dropped_total"] == before + 2
    logged = [record.getMessage() for record in caplog.records if "not enforced" in record.getMessage()]
    assert len(logged) == 1 and logged[0].endswith(": not") and "properties" not in logged[0]
    error = error_of(hermes, tools=[function(parameters=parameters, strict=True)])
    assert error["param"] == "tools[0].function.parameters" and "not" in error["message"]


@pytest.mark.parametrize("drafter", DRAFTER_COLUMNS if is_full() else ("auto",))
@pytest.mark.parametrize("name", CHAT_FEATURES)
def test_events_do_not_depend_on_speculation(hermes: RunningServer, name: str, drafter: str) -> None:
    fields = {**sampled(prediction={"type": "content", "content": CALL}), **CHAT_FEATURES[name]}
    fields["think"] = None if "reasoning" in name else False
    fields |= {"messages": USER, "logit_bias": bias(fields.get("logit_bias", {}))}
    plain = hermes.chat(**fields, speculation="off")
    drafted = hermes.chat(**fields, speculation=drafter)
    final, _ = streamed(
        hermes.chat(**fields, speculation=drafter, stream=True, stream_options={"include_usage": True})
    )
    expected = [(without_ids(choice.message), choice.finish_reason) for choice in plain.choices]
    for answer in (drafted, final):
        assert [(without_ids(choice.message), choice.finish_reason) for choice in answer.choices] == expected
        assert answer.usage.completion_tokens == plain.usage.completion_tokens
        details = answer.usage.completion_tokens_details
        assert details.reasoning_tokens == plain.usage.completion_tokens_details.reasoning_tokens


def test_conversation_with_a_tool(hermes: RunningServer) -> None:
    """A result is answered, and the prefix of the first prompt is cached."""
    fields = sampled(tools=TOOLS, parallel_tool_calls=False)
    answer = chat(hermes, **fields, tool_choice="required")
    message = answer.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    second = chat(hermes, **fields, messages=[*USER, message, result])
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= answer.usage.prompt_tokens // 16 * 16 - 16
    assert isinstance(second.choices[0].message.content, str)
