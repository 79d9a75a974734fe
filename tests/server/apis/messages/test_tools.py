"""Agents through Anthropic's SDK: calls, thinking, a session as of Claude Code, and every drafter."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import count
from typing import Any

import anthropic
import pytest
from anthropic.types import Message
from pydantic import BaseModel

from foreword.checkpoint import prepare_checkpoint
from foreword.config.drafters import DRAFTERS
from foreword.config.options import Config
from foreword.core.request import Request
from foreword.engine_client.process_client import ProcessClient
from foreword.server.apis.messages.writer import join_blocks
from foreword.tokenizer import input_processor
from tests.server.apis.messages.test_routes import (
    PATH,
    REMINDER,
    USER,
    ask,
    client_of,
    error_of,
    stream,
    texts,
)
from tests.server.conftest import MODEL, RunningServer, run_server
from tests.support.budget import is_full
from tests.support.fakes import FakeOutput, byte_tokenizer
from tests.support.feature_matrix import DRAFTER_COLUMNS, MESSAGES
from tests.support.tool_checkpoint import (
    WEATHER,
    call_bias,
    chat_template,
    write_tool_checkpoint,
)

FUNCTION = WEATHER["function"]
TOOL = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
}
TIME = {"name": "get_time", "input_schema": {"type": "object", "properties": {}}}
TOOLS = [TOOL, TIME]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
CALL_TIME = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nIt may rain.\n</think>\n\n"
BLOCK_SIZE = 16  # tokens of a block of the prefix cache


@pytest.fixture(scope="module")
def fake() -> Iterator[RunningServer]:
    """A fake engine behind a template in the format hermes; all markers are spelled texts."""
    with run_server(tokenizer=byte_tokenizer(chat_template("hermes"))) as server:
        yield server
        server.wait_until_idle()


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Random weights, every drafter, and the markers as tokens."""
    folder = tmp_path_factory.mktemp("messages")
    sizes = {"max_position_embeddings": 16384}
    path = write_tool_checkpoint(folder / "model", "hermes", **sizes)
    drafter = write_tool_checkpoint(folder / "drafter", "hermes", dtype="bfloat16", **sizes)
    recording = folder / "recording.jsonl"
    recording.write_text(json.dumps({"prompt_token_ids": [5], "seed": 1, "token_ids": [6, 7]}) + "\n")
    config = Config(
        model=str(path),
        speculate=",".join(DRAFTERS),
        draft_model=str(drafter),
        draft_length="fixed",
        replay_file=str(recording),
        threads=1,
        kv_cache_memory="40000tokens",
        log_level="warning",
    )
    prepared = prepare_checkpoint(config)
    client = ProcessClient(prepared.config, prepared.never_sampled_ids, prepared.tokenizer.vocabulary)
    with run_server(prepared.config, client, tokenizer=prepared.tokenizer) as server:
        yield server


def blocks_of(message: Any) -> list[dict[str, Any]]:
    """The content without ids and signatures, which are random."""
    blocks = [block.model_dump(exclude_none=True, exclude={"parsed_output"}) for block in message.content]
    for block in blocks:
        if "id" in block:
            assert re.fullmatch("toolu_[0-9a-f]{24}", block.pop("id"))
        if "signature" in block:
            assert block.pop("signature")
    return blocks


# Blocks


def test_calls_and_thinking_are_blocks(fake: RunningServer) -> None:
    fake.set_output(FakeOutput(f"{THOUGHT}Let me see.\n{CALL}\n{CALL_TIME}", (3,)))
    fields: dict[str, Any] = {"tools": TOOLS, "max_tokens": 999, "thinking": {"type": "adaptive"}}
    message = ask(fake, **fields)
    events, streamed = stream(fake, **fields)
    for found in (message, streamed):
        assert blocks_of(found) == [
            {"type": "thinking", "thinking": "It may rain."},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "name": "get_weather", "input": {"city": "Köln", "days": 2}},
            {"type": "tool_use", "name": "get_time", "input": {}},
        ]
        assert found.stop_reason == "tool_use" and found.content[2].id != found.content[3].id  # type: ignore[union-attr]
        details = found.usage.output_tokens_details
        assert details is not None and 0 < details.thinking_tokens < found.usage.output_tokens
    deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert list(dict.fromkeys(deltas)) == [
        "thinking_delta",
        "signature_delta",
        "text_delta",
        "input_json_delta",
    ]


def test_call_that_the_limit_cuts_off(fake: RunningServer) -> None:
    fake.set_output(FakeOutput(CALL, (4,)))
    fields: dict[str, Any] = {"tools": TOOLS, "max_tokens": len(CALL.encode()) - 30}
    message, (events, _) = ask(fake, **fields), stream(fake, **fields)
    assert (message.stop_reason, blocks_of(message)[0]["input"]) == ("max_tokens", {})
    assert "".join(
        event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"
    ).startswith('{"city": "K')
    assert [event["type"] for event in events][-3:] == [
        "content_block_delta",
        "message_delta",
        "message_stop",
    ]


@pytest.mark.parametrize("max_tokens", [3, 13, 40, len(CALL.encode()) - 5])
def test_no_piece_of_a_cut_call_is_text(fake: RunningServer, max_tokens: int) -> None:
    fake.set_output(FakeOutput(CALL, (3,)))
    fields = {"tools": TOOLS, "tool_choice": {"type": "any"}, "max_tokens": max_tokens}
    message, (_, streamed) = ask(fake, **fields), stream(fake, **fields)
    for found in (message, streamed):
        assert found.stop_reason == "max_tokens"
        assert [block.type for block in found.content if block.type != "text" or block.text] == (
            ["tool_use"] if max_tokens > 40 else []
        )


def test_thinking_is_off_by_default_and_hidden_on_request(fake: RunningServer) -> None:
    ask(fake, tools=TOOLS)
    assert prompt_of(fake).endswith(b"<think>\n\n</think>\n\n"), "the template's switch"
    fake.set_output(FakeOutput(f"{THOUGHT}Take a coat.", (5,)))
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    message = ask(fake, thinking=thinking)
    assert blocks_of(message)[0]["thinking"] == "" and blocks_of(
        stream(fake, thinking=thinking)[1]
    ) == blocks_of(message)
    answer = {"role": "assistant", "content": [block.model_dump() for block in message.content]}
    ask(fake, messages=[*USER, answer, *USER], thinking=thinking)
    assert b"It may rain." in prompt_of(fake), "the signature has brought it back"


def prompt_of(server: RunningServer) -> bytes:
    return bytes(token for token in server.client.submitted[-1].prompt_ids if token < 256)


def test_tools_may_not_be_called(fake: RunningServer) -> None:
    fake.set_output(FakeOutput(CALL, (4,)))
    message = ask(fake, tools=TOOLS, max_tokens=999, tool_choice={"type": "none"})
    assert [block["type"] for block in blocks_of(message)] == ["text"] and message.stop_reason == "end_turn"
    assert b"get_weather" in prompt_of(fake), "the prefix stays cached"


def test_count_tokens_counts_tools(fake: RunningServer) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "messages": USER, "system": "Rules"}
    usage = ask(fake, **fields).usage
    with client_of(fake) as client:
        counted = client.messages.count_tokens(model=MODEL, **fields).input_tokens
    assert counted == usage.input_tokens + usage.cache_creation_input_tokens


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [TOOL, TOOL]}, "tools[1].name: 'get_weather' is the name of tools[0] too"),
        ({"tools": [{"name": "a b", "input_schema": {"type": "object"}}]}, "tools[0].name must be"),
        ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools[0].input_schema must be"),
        (
            {
                "tools": [
                    {"name": "a", "strict": True, "input_schema": {"type": "object", "not": {"required": []}}}
                ]
            },
            "tools[0].input_schema",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice names the tool 'x'"),
        ({"tools": [{**TIME, "name": f"f{i}"} for i in range(600)]}, "tools may hold at most 512 tools"),
        (
            {"messages": [*USER, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
            "messages[1]",
        ),
    ],
)
def test_refused_tools(fake: RunningServer, fields: dict[str, Any], message: str) -> None:
    reply = fake.http.post(PATH, json={"messages": USER, "max_tokens": 9, **fields})
    status, kind, text = error_of(reply)
    assert (status, kind) == (400, "invalid_request_error") and text.startswith(message), text


class Person(BaseModel):
    name: str
    age: int


def test_the_sdk_parses_a_structured_answer(fake: RunningServer) -> None:
    fake.set_output(FakeOutput('{"name": "Ada", "age": 36}'))
    with client_of(fake) as client:
        message = client.messages.parse(model=MODEL, max_tokens=99, messages=USER, output_format=Person)
    assert message.parsed_output == Person(name="Ada", age=36)


def test_the_sdk_runs_its_tool_loop(fake: RunningServer) -> None:
    """Its runner calls the function, sends the result back, and gets the final answer."""

    @anthropic.beta_tool
    def get_weather(city: str, days: int) -> str:
        """Weather of a city."""
        return f"Rain in {city} for {days} days"

    def answer(request: Request) -> FakeOutput:
        prompt = bytes(token for token in request.prompt_ids if token < 256).decode()
        return FakeOutput("Take a coat." if "Rain in Köln for 2 days" in prompt else CALL, (2,))

    fake.set_output(answer)
    with client_of(fake) as client:
        runner = client.beta.messages.tool_runner(
            model=MODEL, max_tokens=999, messages=USER, tools=[get_weather], betas=["x-2026"]
        )
        messages = list(runner)
    assert [message.stop_reason for message in messages] == ["tool_use", "end_turn"]
    assert messages[-1].content[0].text == "Take a coat."  # type: ignore[union-attr]


# A real engine


def sampled(**fields: Any) -> dict[str, Any]:
    """A request that a model with random weights answers at length."""
    bias = {str(token_id): value for token_id, value in fields.pop("logit_bias", {}).items()}
    return {"temperature": 0.8, "seed": 3, "max_tokens": 150, "logit_bias": bias, **fields}


@pytest.mark.parametrize("drafter", DRAFTER_COLUMNS if is_full() else ("auto",))
@pytest.mark.parametrize("name", MESSAGES)
def test_drafters_change_no_block(hermes: RunningServer, name: str, drafter: str) -> None:
    """Whole and streamed, with and without speculation."""
    fields = sampled(**MESSAGES[name], prediction={"type": "content", "content": '{"city": "the thing"}'})
    plain = ask(hermes, **fields | {"speculation": "off"})
    message = ask(hermes, **fields | {"speculation": drafter})
    events, streamed = stream(hermes, **fields | {"speculation": drafter})
    assert blocks_of(message) == blocks_of(plain)
    # The SDK reads the part of a call that the limit cuts off; a whole message has an empty input.
    joined = streamed.model_copy(update={"content": joined_content(events)})
    assert blocks_of(joined) == blocks_of(plain)
    for found in (message, streamed):
        assert (found.stop_reason, found.stop_sequence) == (plain.stop_reason, plain.stop_sequence)
        assert found.usage.output_tokens == plain.usage.output_tokens
    kinds = {block["type"] for block in blocks_of(plain)}
    assert "tool_use" in kinds or "tools" not in fields
    assert "thinking" in kinds or "thinking" not in fields


def joined_content(events: list[dict[str, Any]]) -> list[Any]:
    blocks = join_blocks(event for event in events if event["type"].startswith("content_block"))
    return Message.model_validate({**events[0]["message"], "content": blocks}).content


def claude_tools() -> list[dict[str, Any]]:
    """24 tools, of which one has keywords that are not enforced."""
    schema = TOOL["input_schema"]
    tools = [{"name": f"tool_{i}", "description": "Does it", "input_schema": schema} for i in range(24)]
    tools[3]["input_schema"] = {**schema, "propertyNames": {"maxLength": 20}}
    tools[23]["cache_control"] = {"type": "ephemeral"}
    return tools


def test_a_session_as_of_claude_code_stays_cached(
    hermes: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The billing header changes, reminders follow results, a side request comes between."""

    def system(step: int) -> list[dict[str, Any]]:
        header = f"x-anthropic-billing-header: cc_version=2.1; cch={step:05x};"
        return [*texts(header), {**texts("You are an agent.")[0], "cache_control": {"type": "ephemeral"}}]

    seeds = count()
    monkeypatch.setattr(input_processor.secrets, "randbits", lambda bits: next(seeds))
    question = [*texts(REMINDER), *texts("Find the city.")]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": question},
        {"role": "system", "content": "Agents: none"},
    ]
    num_before = 0
    for step in range(6):
        fields = sampled(
            seed=-1,  # with a seed of its own, a request renders the history anew
            tools=claude_tools(),
            system=system(step),
            messages=messages,
            max_tokens=32_000,
            logit_bias=call_bias(),  # ends the turn as the template does
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            thinking={"type": "adaptive"} if step % 2 else {"type": "disabled"},
            context_management={"edits": []},
            metadata={"user_id": "u"},
        )
        events, answer = stream(hermes, **fields)
        assert answer.stop_reason == "tool_use"
        usage = events[0]["message"]["usage"]
        cached = usage["cache_read_input_tokens"]
        assert cached >= num_before - BLOCK_SIZE, f"step {step}: {cached} of {num_before} tokens are cached"
        num_input = usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached
        num_before = num_input + answer.usage.output_tokens
        call = answer.content[-1]
        assert call.type == "tool_use"
        result = {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": f"result {step}",
            "cache_control": {"type": "ephemeral"},
        }
        messages += [
            {
                "role": "assistant",
                "content": [block.model_dump(exclude_none=True) for block in answer.content],
            },
            {"role": "user", "content": [result, *texts(REMINDER)]},
            {"role": "system", "content": f"<total_tokens>{1000 - step} left</total_tokens>"},
        ]
        title = ask(hermes, system=system(99), messages=[{"role": "user", "content": "Title?"}], max_tokens=8)
        assert title.usage.output_tokens <= 8
