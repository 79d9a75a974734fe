"""Bodies of chat as a template sees them, without a server."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from openai.types.chat import ChatCompletionMessage
from openai.types.shared.reasoning_effort import ReasoningEffort

from foreword.server.apis.chat.body import ChatBody, to_template_messages
from foreword.tokenizer.chat_processor import ChatInputProcessor
from tests.support.fakes import CHATML, byte_tokenizer

USER = {"role": "user", "content": "U"}
CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}},
    {"id": "call_2", "type": "function", "function": {"name": "time", "arguments": "{}"}},
]
HISTORY = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "noon"}]},
    {"role": "user", "content": "And?"},
]
OLDER = [
    {"role": "assistant", "content": "", "function_call": {"name": "weather", "arguments": "{}"}},
    {"role": "function", "name": "weather", "content": "rain"},
]
RENDERS_TOOLS = (
    "{% for m in messages %}[{{ m.role }}|{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "|{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}"
    "{% endfor %}"
    "{% if m.tool_call_id %}|{{ m.tool_call_id }}{% endif %}"
    "{% if m.name %}|{{ m.name }}{% endif %}]"
    "{% endfor %}"
)
REFUSES_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ m.role }}|{{ m.content }}]{% endfor %}"
)
TEXT_OR_CALL = (  # Llama's renders either a text or one call; others want arguments to be an object
    "{% for m in messages %}[{% if m.role == 'assistant' and m.tool_calls %}"
    "{% set call = m.tool_calls[0].function %}{% set unused = call.arguments.items() %}"
    "{{ call.name }} {{ call.arguments | tojson }}{% else %}{{ m.content }}{% endif %}]{% endfor %}"
)
CALL = {"function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
RESULT = {"role": "tool", "content": "rain"}


def render(source: str, messages: list[Any] | None = None, **fields: Any) -> str:
    body = ChatBody.model_validate({"messages": messages or [USER], **fields})
    template = ChatInputProcessor(byte_tokenizer(source), None, 0).template
    given = to_template_messages(body.messages)
    return template.render(given, reasoning=body.reasoning(), **body.template_kwargs())


@pytest.mark.parametrize(
    ("source", "messages", "expected"),
    [
        (
            RENDERS_TOOLS,
            HISTORY,
            '[user|U][assistant||call_1 weather {"city": "Köln"}|call_2 time {}]'
            "[tool|rain|call_1|weather][tool|noon|call_2|time][user|And?]",
        ),
        (RENDERS_TOOLS, OLDER, "[assistant||weather weather {}][tool|rain|weather|weather]"),
        (REFUSES_TOOLS, HISTORY[:3], "[user|Result of weather:\nrain]"),
        (
            TEXT_OR_CALL,
            [{"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT],
            '[weather {"city": "Bonn"}][rain]',
        ),
        (
            TEXT_OR_CALL,
            [{"role": "assistant", "content": "Wait.", "tool_calls": [CALL]}, RESULT],
            '[Wait.][weather {"city": "Bonn"}][rain]',
        ),
        (
            TEXT_OR_CALL,
            [{"role": "user", "content": "Wait.", "tool_calls": [CALL]}, RESULT],
            '[Wait.\n[weather {"city": "Bonn"}][Result of weather:\nrain]',
        ),
    ],
)
def test_history_with_tools(source: str, messages: list[Any], expected: str) -> None:
    """What a template does not render of calls and results becomes plain text."""
    assert render(source, messages).endswith(expected)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]},
        {"role": "assistant", "content": None, "refusal": "I cannot."},
        {"role": "assistant", "content": [], "refusal": "I cannot."},
        ChatCompletionMessage(role="assistant", content="I cannot.").model_dump(),
    ],
)
def test_texts_and_refusals_of_the_assistant(message: dict[str, Any]) -> None:
    assert "assistant\nI cannot." in render(CHATML, [USER, message, USER])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"think": False}, "off"),
        ({"think": True}, "on"),
        ({"enable_thinking": False}, "off"),
        ({"reasoning_effort": "none"}, "off"),
        *(
            ({"reasoning_effort": effort}, "on")
            for effort in get_args(get_args(ReasoningEffort)[0])
            if effort != "none"
        ),
        ({"reasoning_effort": "none", "think": True}, "on"),
        ({"think": False, "chat_template_kwargs": {"enable_thinking": True}}, "on"),
        ({}, "default"),
    ],
)
def test_thinking_is_a_variable_of_the_template(fields: dict[str, Any], expected: str) -> None:
    source = "{{ 'default' if enable_thinking is not defined else 'on' if enable_thinking else 'off' }}"
    assert render(source, **fields) == expected
