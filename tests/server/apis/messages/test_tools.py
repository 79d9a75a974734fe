"""Tools and thinking in Anthropic's forms; tests/server/apis/test_wires.py has what all APIs do."""

from __future__ import annotations

import re
from itertools import count
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel

from foreword.core.request import Request
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
from tests.server.conftest import MODEL, RunningServer
from tests.support.fakes import FakeOutput
from tests.support.tool_checkpoint import WEATHER, call_bias

FUNCTION = WEATHER["function"]
TOOL = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
}
TIME = {"name": "get_time", "input_schema": {"type": "object", "properties": {}}}
TOOLS = [TOOL, TIME]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
THOUGHT = "<think>\nIt may rain.\n</think>\n\n"
BLOCK_SIZE = 16  # tokens of a block of the prefix cache


def blocks_of(message: Any) -> list[dict[str, Any]]:
    """The content without ids and signatures, which are random."""
    blocks = [block.model_dump(exclude_none=True, exclude={"parsed_output"}) for block in message.content]
    for block in blocks:
        if "id" in block:
            assert re.fullmatch("toolu_[0-9a-f]{24}", block.pop("id"))
        if "signature" in block:
            assert block.pop("signature")
    return blocks


def test_thinking_is_off_by_default_and_hidden_on_request(fake: RunningServer) -> None:
    ask(fake, tools=TOOLS)
    assert fake.last_prompt().endswith("<think>\n\n</think>\n\n"), "the template's switch"
    fake.set_output(FakeOutput(f"{THOUGHT}Take a coat.", (5,)))
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    message = ask(fake, thinking=thinking)
    assert blocks_of(message)[0]["thinking"] == "" and blocks_of(
        stream(fake, thinking=thinking)[1]
    ) == blocks_of(message)
    answer = {"role": "assistant", "content": [block.model_dump() for block in message.content]}
    ask(fake, messages=[*USER, answer, *USER], thinking=thinking)
    assert "It may rain." in fake.last_prompt(), "the signature has brought it back"


@pytest.mark.parametrize("begin", ["", CALL[: CALL.index("Köln")]], ids=["text", "call"])
def test_repetitive_answer_is_cut_like_at_a_limit(fake: RunningServer, begin: str) -> None:
    """An agent that reads end_turn takes half a call for a whole one."""
    fake.set_output(FakeOutput(begin + "so on " * 200, (5,)))
    fields: dict[str, Any] = {"tools": TOOLS, "on_runaway": "stop", "max_tokens": 999}
    message = ask(fake, **fields)
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens < 400
    assert stream(fake, **fields)[1].stop_reason == "max_tokens"


def test_count_tokens_counts_tools(fake: RunningServer) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "messages": USER, "system": "Rules"}
    usage = ask(fake, **fields).usage
    with client_of(fake) as client:
        counted = client.messages.count_tokens(model=MODEL, **fields).input_tokens
    assert counted == usage.input_tokens + usage.cache_creation_input_tokens


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools[0].input_schema must be"),
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


def claude_tools() -> list[dict[str, Any]]:
    """8 tools, of which one has keywords that are not enforced."""
    schema = TOOL["input_schema"]
    tools = [{"name": f"tool_{i}", "description": "Does it", "input_schema": schema} for i in range(8)]
    tools[3]["input_schema"] = {**schema, "propertyNames": {"maxLength": 20}}
    tools[7]["cache_control"] = {"type": "ephemeral"}
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
    bias = {str(token_id): value for token_id, value in call_bias().items()}
    num_before = 0
    for step in range(4):
        fields = {
            "temperature": 0.8,
            "seed": -1,  # with a seed of its own, a request renders the history anew
            "tools": claude_tools(),
            "system": system(step),
            "messages": messages,
            "max_tokens": 32_000,
            "logit_bias": bias,  # ends the turn as the template does
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 16} if step % 2 else {"type": "disabled"},
            "context_management": {"edits": []},
            "metadata": {"user_id": "u"},
        }
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
