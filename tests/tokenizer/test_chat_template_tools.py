"""Calls, results and reasoning of the history reach each template in the form that it takes."""

from typing import Any

import pytest

from foreword.chat_formats.tools import ReasoningOptions, Tool, ToolUse
from foreword.errors import InvalidRequest
from foreword.tokenizer.chat_processor import ChatInputProcessor, ChatTask
from foreword.tokenizer.chat_template import ChatTemplate
from tests.chat_formats.templates import GPT_OSS
from tests.support.fakes import byte_tokenizer

LONG_ID = "call_0123456789abcdef01234567"
CALL = {"id": LONG_ID, "type": "function", "function": {"name": "look", "arguments": '{"at":  "ö"}'}}
SECOND = {"id": "b", "type": "function", "function": {"name": "stop", "arguments": {}}}
QUESTION = {"role": "user", "content": "U"}


def history(*calls: dict[str, Any], content: str | None = None, **fields: Any) -> list[dict[str, Any]]:
    caller = {"role": "assistant", "content": content, "tool_calls": list(calls), **fields}
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"R{i}"} for i, call in enumerate(calls)
    ]
    return [QUESTION, caller, *results]


def template(call: str, before: str = "", result: str = "{{ m.content }}") -> ChatTemplate:
    """A template that writes [role content call...] for each message."""
    return ChatTemplate(
        "{% for m in messages %}[{{ m.role }} "
        f"{before}{{% if m.role == 'tool' %}}{result}{{% elif m.content %}}{{{{ m.content }}}}{{% endif %}}"
        f"{{% for c in m.tool_calls or [] %}}{{% set f = c.function %}}{call}{{% endfor %}}]{{% endfor %}}",
        {},
    )


def rendered(chat: ChatTemplate, messages: list[dict[str, Any]], **options: Any) -> str:
    return chat.render(messages, add_generation_prompt=False, **options)


def test_arguments_are_a_mapping_or_a_text() -> None:
    expected = '[user U][assistant look {"at": "ö"}][tool R0]'
    assert rendered(template("{{ f.name }} {{ f.arguments | tojson }}"), history(CALL)) == expected
    assert rendered(template("{{ f.name + ' ' + f.arguments }}"), history(CALL)) == expected
    # It takes both, and prints a mapping as Python does.
    assert rendered(template("{{ f.name }} {{ f.arguments }}"), history(CALL)) == expected
    items = "{{ f.name }} {% for k, v in f.arguments | items %}{{ k }}={{ v }}{% endfor %}"
    assert rendered(template(items), history(CALL)) == "[user U][assistant look at=ö][tool R0]"


def test_content_beside_calls_is_null_where_the_template_asks_for_it() -> None:
    source = (
        "{% for m in messages %}[{% if m.role == 'assistant' and m.content is none %}"
        "{{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments | tojson }}"
        "{% else %}{{ m.content }}{% endif %}]{% endfor %}"
    )
    assert rendered(ChatTemplate(source, {}), history(CALL)) == '[U][look {"at": "ö"}][R0]'


def test_ids_of_nine_characters() -> None:
    check = "{% if c.id | length != 9 %}{{ raise_exception('9 characters') }}{% endif %}"
    result = "{{ m.content }} {{ m.tool_call_id }}"
    chat = template(check + "{{ f.name }} {{ f.arguments | tojson }} {{ c.id }}", result=result)
    text = rendered(chat, history(CALL))
    short = text.rpartition(" ")[2].rstrip("]")
    assert len(short) == 9 and text == f'[user U][assistant look {{"at": "ö"}} {short}][tool R0 {short}]'
    assert rendered(chat, history({**CALL, "id": "abcdefgh9"})).count("abcdefgh9") == 2


def test_one_call_for_each_turn() -> None:
    either = (
        "{% for m in messages %}[{{ m.role }} {% if m.tool_calls %}"
        "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
        "{{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments | tojson }}"
        "{% else %}{{ m.content }}{% endif %}]{% endfor %}"
    )
    text = rendered(ChatTemplate(either, {}), history(CALL, SECOND, content="Wait."))
    assert (
        text == '[user U][assistant Wait.][assistant look {"at": "ö"}][tool R0][assistant stop {}][tool R1]'
    )


def test_template_error_is_a_bad_request_with_its_text() -> None:
    refuses = "{% if f.arguments.at == 'ö' %}{{ raise_exception('no ö') }}{% endif %}"
    with pytest.raises(InvalidRequest, match="refuses these messages: no ö") as caught:
        rendered(template("{{ f.name }}{{ f.arguments | tojson }}" + refuses), history(CALL))
    assert caught.value.param == "messages"


@pytest.mark.parametrize("given", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_under_every_name(given: str, read: str) -> None:
    chat = template(
        "{{ f.name }}{{ f.arguments | tojson }}", f"{{% if m.{read} %}}({{{{ m.{read} }}}}){{% endif %}}"
    )
    assert "(Hm.)" in rendered(chat, history(CALL, **{given: "Hm."}))
    assert "(" not in rendered(chat, history(CALL))


def test_reasoning_as_a_part_of_the_content() -> None:
    parts = (
        "{% for m in messages %}[{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}"
        "{% if part['type'] == 'thinking' %}({{ part['thinking'] }}){% else %}{{ part['text'] }}{% endif %}"
        "{% endfor %}{% endif %}]{% endfor %}"
    )
    messages = [QUESTION, {"role": "assistant", "content": "A", "reasoning_content": "Hm."}]
    assert rendered(ChatTemplate(parts, {}), messages) == "[U][(Hm.)A]"


def test_template_that_takes_reasoning_or_text_beside_a_call() -> None:
    """gpt-oss refuses both; the text is a part of its reasoning."""
    text = rendered(ChatTemplate(GPT_OSS, {}), history(CALL, content="Wait.", reasoning_content="Hm."))
    assert "<|channel|>analysis<|message|>Hm.\n\nWait.<|end|>" in text
    assert "functions.look to=assistant" in text  # the result's name comes from its call


QWEN = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
GRADED = "{{ reasoning_effort }}{# 'none' 'high' 'max' #}"


@pytest.mark.parametrize(
    ("source", "reasoning", "expected"),
    [
        (QWEN, ReasoningOptions(), {}),
        (QWEN, ReasoningOptions(enabled=False), {"enable_thinking": False}),
        (QWEN, ReasoningOptions(effort="none"), {"enable_thinking": False}),
        (QWEN, ReasoningOptions(effort="low"), {"enable_thinking": True}),
        ("{% if thinking %}{% endif %}", ReasoningOptions(effort="high"), {"thinking": True}),
        ("{{ message.thinking }}{{ m['thinking'] }}<thinking>", ReasoningOptions(enabled=True), {}),
        ("{{ reasoning_effort }}", ReasoningOptions(effort="minimal"), {"reasoning_effort": "low"}),
        ("{{ reasoning_effort }}", ReasoningOptions(effort="xhigh"), {"reasoning_effort": "high"}),
        ("{{ reasoning_effort }}", ReasoningOptions(effort="none"), {}),
        (GRADED, ReasoningOptions(effort="none"), {"reasoning_effort": "none"}),
        (GRADED, ReasoningOptions(effort="xhigh"), {"reasoning_effort": "max"}),
        (GRADED, ReasoningOptions(effort="medium"), {"reasoning_effort": "high"}),
        ("{{ thinking_budget }}", ReasoningOptions(budget_tokens=99), {"thinking_budget": 99}),
        ("{{ thinking_budget }}", ReasoningOptions(enabled=False), {"thinking_budget": 0}),
    ],
)
def test_reasoning_sets_the_variables_that_the_template_reads(
    source: str, reasoning: ReasoningOptions, expected: dict[str, Any]
) -> None:
    assert ChatTemplate(source, {}).reasoning_variables(reasoning) == expected


def test_variables_of_the_request_come_first() -> None:
    off = ReasoningOptions(enabled=False)
    chat = ChatTemplate(QWEN, {})
    assert chat.render([QUESTION], reasoning=off) == "<think></think>"
    assert chat.render([QUESTION], reasoning=off, options={"enable_thinking": True}) == ""


def test_soft_switch() -> None:
    source = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    off = ReasoningOptions(enabled=False)
    assert ChatTemplate(source + "{# /no_think #}", {}).render([QUESTION], reasoning=off) == "[U\n/no_think]"
    assert ChatTemplate(source, {}).render([QUESTION], reasoning=off) == "[U]"


def test_tools_reach_the_template_in_openai_s_form() -> None:
    parameters = {"type": "object", "properties": {"at": {"type": "string"}}}
    tools = [Tool("look", "Look.", parameters), Tool("stop"), Tool("patch", "Patch.", is_custom=True)]
    text = ChatTemplate("{{ tools | tojson }}", {}).render([QUESTION], tools=tools)
    assert text == (
        '[{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": '
        '{"type": "object", "properties": {"at": {"type": "string"}}}}}, '
        '{"type": "function", "function": {"name": "stop", "description": "", "parameters": '
        '{"type": "object", "properties": {}}}}, '
        '{"type": "function", "function": {"name": "patch", "description": "Patch.", "parameters": '
        '{"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}}}]'
    )


def test_unknown_tool_format_needs_the_option() -> None:
    chat = ChatInputProcessor(byte_tokenizer("{{ tools }}{{ messages[0].content }}"), None, 0)
    with pytest.raises(InvalidRequest, match="--tool-format NAME"):
        chat.render(ChatTask([QUESTION], tools=ToolUse((Tool("stop"),))))
