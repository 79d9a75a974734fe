"""Three APIs with a real engine: calls and content are enforced, and speculation changes no event."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
from openai.lib._tools import pydantic_function_tool
from pydantic import BaseModel

from tests.server.conftest import MODEL, RunningServer
from tests.support.budget import is_full, some_of
from tests.support.checkpoints import EOS
from tests.support.feature_matrix import CONVERSATIONS, MODEL_COLUMNS
from tests.support.tool_checkpoint import END_OF_TURN, WEATHER, call_bias, marker_id
from tests.support.wires import WIRES, Answer, Question

USER = [{"role": "user", "content": "Weather in Bonn?"}]
TIME = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, TIME]
SCHEMA = WEATHER["function"]["parameters"]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
SAMPLING: Mapping[str, Any] = {"temperature": 0.8, "seed": 3}  # a random model answers at length


def sampled(**fields: Any) -> dict[str, Any]:
    """A request of chat without reasoning."""
    return {**SAMPLING, "max_tokens": 150, "think": False, **fields}


def bias(values: Mapping[int, float]) -> dict[str, float]:
    return {str(token_id): value for token_id, value in values.items()}


def chat(server: RunningServer, **fields: Any) -> Any:
    return server.chat(**{"messages": USER, "tools": TOOLS, **fields})


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def text_of(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@pytest.mark.parametrize("drafter", MODEL_COLUMNS if is_full() else ("auto",))
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", some_of(CONVERSATIONS, 2))
def test_events_do_not_depend_on_speculation(
    hermes: RunningServer, name: str, wire: str, drafter: str
) -> None:
    """Whole and streamed, with and without speculation."""
    given = {"thinks": False, "max_tokens": 150, **CONVERSATIONS[name]}
    question, api = Question(**given), WIRES[wire]
    fields = {**SAMPLING, "prediction": {"type": "content", "content": CALL}}
    plain = api.ask(hermes.http, question, **fields, speculation="off")
    assert api.ask(hermes.http, question, **fields, speculation=drafter) == plain
    assert api.stream(hermes.http, question, **fields, speculation=drafter) == plain
    check(name, plain)


def check(name: str, answer: Answer) -> None:
    """The answer has what its case is about."""
    if "tools" in name:
        assert answer.calls
    if "one by name" in name:
        assert answer.calls == (("get_time", "{}"),), "exactly one call"
    if "not parallel" in name:
        assert len(answer.calls) == 1
    if "reasoning" in name:
        assert answer.reasoning and answer.num_reasoning_tokens
    if "budget" in name:
        assert answer.num_reasoning_tokens <= 9 + 2, "its markers are counted too"


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


@pytest.mark.parametrize(
    "grammar",
    [
        {"syntax": "regex", "definition": "[a-d]{3}-[0-9]{2}"},
        {"syntax": "lark", "definition": 'start: /[a-d]{3}/ "-" /[0-9]{2}/'},
    ],
)
def test_input_of_a_custom_tool_is_enforced(hermes: RunningServer, grammar: dict[str, str]) -> None:
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
                assert re.fullmatch(pattern, whole)
                assert text_of(hermes.chat(**fields, stream=True)) == whole


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
