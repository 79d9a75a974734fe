"""Answers beside the letter of their format, and failures of other servers that must not return."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from foreword.chat_formats.chat_format import BoundFormat, bind_format
from foreword.chat_formats.events import (
    CallArguments,
    CallEnd,
    CallStart,
    ChatEvent,
    ContentText,
    merge_events,
)
from foreword.chat_formats.families import FORMATS
from foreword.chat_formats.parser import ChatParser, parse_message, starts_in_reasoning
from foreword.chat_formats.tools import NO_TOOLS, Tool, ToolUse
from tests.support.parsed_answers import collect

STRING = {"type": "string"}
PROPERTIES = {
    "text": STRING,
    "zip": STRING,
    "count": {"type": "integer"},
    "ratio": {"type": ["number", "null"]},
    "flag": {"type": "boolean"},
    "items": {"type": "array"},
    "maybe": {"anyOf": [STRING, {"type": "null"}]},
    "mode": {"enum": ["true", "other"]},
    "ref": {"$ref": "#/$defs/name"},
    "any": {},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "$defs": {"name": STRING}}
USE = ToolUse(
    (
        Tool("write", parameters=SCHEMA),
        Tool("get_time"),
        Tool("get"),
        Tool("patch", is_custom=True),
    )
)
TOKENS = {
    "hermes": ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    "qwen3-coder": ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    "llama-json": ("<|python_tag|>",),
    "mistral-v3": ("[TOOL_CALLS]",),
    "mistral-args": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
    "functiongemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "glm-4.5": (
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ),
    "kimi-k2": (
        "<think>",
        "</think>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
    "gpt-oss": (
        "<|start|>",
        "<|end|>",
        "<|channel|>",
        "<|message|>",
        "<|constrain|>",
        "<|call|>",
        "<|return|>",
    ),
}


@cache
def _bound(name: str, special_ids: frozenset[int] = frozenset(), is_spelled: bool = False) -> BoundFormat:
    """The format with its usual tokens, numbered from 1000, or with none."""
    ids = {} if is_spelled else {text: 1000 + i for i, text in enumerate(TOKENS.get(name, ()))}
    return bind_format(FORMATS[name], ids.get, special_ids)


def _parse(name: str, answer: str, use: ToolUse = USE, start: bool = False) -> tuple[ChatEvent, ...]:
    return parse_message(_bound(name), use, answer, start)


def _parser(name: str, is_spelled: bool = False, start: bool = False) -> ChatParser:
    return ChatParser(_bound(name, is_spelled=is_spelled), USE, start, "call_{}".format)


def _feed(parser: ChatParser, *pieces: str | tuple[int, str]) -> tuple[ChatEvent, ...]:
    tokens = [(1, piece) if isinstance(piece, str) else piece for piece in pieces]
    return merge_events(event for token in tokens for event in parser.feed(*token))


XML_CALL = "<tool_call>\n<function=write>\n<parameter=text>\n{}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "answer", "expected"),
    [
        # JSON: keys in any order, missing and needless parts
        ("hermes", '<tool_call>{"arguments": {"text": "a"}, "name": "write"}</tool_call>', {"text": "a"}),
        ("hermes", '<tool_call>{"name":"write","arguments":{"text":"a"}', {"text": "a"}),
        (
            "hermes",
            '<tool_call>\n\n{"name": "write", "arguments": {"count": 1}}}\n</tool_call>',
            {"count": 1},
        ),
        ("hermes", '<tool_call>{"name": "write", "arguments": "{\\"zip\\": \\"a\\\\n\\"}"}', {"zip": "a\n"}),
        ("hermes", '<tool_call>{"id": [1, "}"], "name": "write", "arguments": null}</tool_call>', {}),
        ("hermes", '<tool_call>{"name": "write"}</tool_call>', {}),
        ("hermes", '<tool_call>{"name": "write", "parameters": {"count": 1}}</tool_call>', {"count": 1}),
        ("hermes", '<tool_call>{"name": "write", "arguments": {"items": [1</tool_call>', {"items": [1]}),
        (
            "hermes",
            '<tool_call>{"name": "write", "arguments": {"zip": "</tool_call>{"}}',
            {"zip": "</tool_call>{"},
        ),
        ("llama-json", '{"type": "function", "name": "write", "parameters": {"count": 1}}', {"count": 1}),
        ("llama-json", '<|python_tag|>{"name": "write", "parameters": {"count": 1}}', {"count": 1}),
        ("llama-json", '<|python_tag|>write.call(text="a, b", count=2)', {"text": "a, b", "count": 2}),
        ("mistral-v3", '[TOOL_CALLS] [ {"name": "write", "arguments": {"count": 1}} ]', {"count": 1}),
        ("mistral-args", '[TOOL_CALLS]write[CALL_ID]abcdefghi[ARGS]{"count": 1}', {"count": 1}),
        ("phi4-mini", 'functools[{"name": "write", "arguments": {"count": 1}}]', {"count": 1}),
        # tags: by the schema first, then by syntax
        ("qwen3-coder", XML_CALL.format("a\n"), {"text": "a\n"}),
        ("qwen3-coder", XML_CALL.format('{"a": 1}'), {"text": '{"a": 1}'}),
        ("qwen3-coder", XML_CALL.format("true"), {"text": "true"}),
        ("qwen3-coder", XML_CALL.format("02134"), {"text": "02134"}),
        ("qwen3-coder", XML_CALL.format(""), {"text": ""}),
        ("qwen3-coder", XML_CALL.replace("text", "count").format("5"), {"count": 5}),
        ("qwen3-coder", XML_CALL.replace("text", "count").format("five"), {"count": "five"}),
        ("qwen3-coder", XML_CALL.replace("text", "ratio").format("null"), {"ratio": None}),
        ("qwen3-coder", XML_CALL.replace("text", "flag").format("True"), {"flag": True}),
        ("qwen3-coder", XML_CALL.replace("text", "items").format('[1, "a"]'), {"items": [1, "a"]}),
        ("qwen3-coder", XML_CALL.replace("text", "maybe").format("null"), {"maybe": None}),
        ("qwen3-coder", XML_CALL.replace("text", "maybe").format("nullable"), {"maybe": "nullable"}),
        ("qwen3-coder", XML_CALL.replace("text", "maybe").format("5"), {"maybe": "5"}),
        ("qwen3-coder", XML_CALL.replace("text", "mode").format("true"), {"mode": "true"}),
        ("qwen3-coder", XML_CALL.replace("text", "ref").format("7"), {"ref": "7"}),
        ("qwen3-coder", XML_CALL.replace("text", "any").format("7"), {"any": 7}),
        ("qwen3-coder", XML_CALL.replace("text", "any").format('"7"'), {"any": '"7"'}),
        ("qwen3-coder", XML_CALL.replace("text", "any").format("7 days"), {"any": "7 days"}),
        # one line, without newlines
        (
            "qwen3-coder",
            "<tool_call><function=write><parameter=text>a</parameter><parameter=count>1</parameter></function>"
            "</tool_call>",
            {"text": "a", "count": 1},
        ),
        # closing tags inside of a value, and left out
        ("qwen3-coder", XML_CALL.format("x\n</parameter>\ny"), {"text": "x\n</parameter>\ny"}),
        ("qwen3-coder", XML_CALL.format("</function>\n"), {"text": "</function>\n"}),
        ("qwen3-coder", XML_CALL.replace("</parameter>\n", "").format("a"), {"text": "a"}),
        ("qwen3-coder", XML_CALL.replace("</parameter>\n</function>\n", "").format("a"), {"text": "a"}),
        ("qwen3-coder", XML_CALL.replace("\n</function>\n</tool_call>", "").format("a"), {"text": "a"}),
        ("qwen3-coder", XML_CALL.removeprefix("<tool_call>\n").format("a"), {"text": "a"}),
        (
            "glm-4.5",
            "<tool_call>write<arg_key>zip</arg_key><arg_value>1</arg_value></tool_call>",
            {"zip": "1"},
        ),
        # Python's syntax
        ("pythonic", "[write(text='it's', count=-1, any=None)]", {"text": "it's", "count": -1, "any": None}),
        ("pythonic", "[write('a', '1', 2)]", {"text": "a", "zip": "1", "count": 2}),
        (
            "pythonic",
            '[write(text="""a "b"\n""", any=(1, .5, [],))]',
            {"text": 'a "b"\n', "any": [1, 0.5, []]},
        ),
        ("pythonic", "[write(zip=02134, any=abc)]", {"zip": "02134", "any": "abc"}),
        (
            "pythonic",
            r"[write(text='\x41\u00e9\t\'\q\
')]",
            {"text": "Aé\t'\\q"},
        ),
        ("pythonic", "[write(any={'a': {1: None}, 'b': []})]", {"any": {"a": {"1": None}, "b": []}}),
        ("pythonic", "<|python_start|>[write(count=1)]<|python_end|>", {"count": 1}),
        # bare syntax
        (
            "gemma4",
            '<|tool_call>call:write{zip:<|"|>a, {"b"}<|"|>,any:3}<tool_call|>',
            {"zip": 'a, {"b"}', "any": 3},
        ),
        (
            "gemma4",
            "<|tool_call>call:write{zip:New York,any:12:30}<tool_call|>",
            {"zip": "New York", "any": "12:30"},
        ),
        ("gemma4", '<|tool_call>call:write{"text":"a\\n"}', {"text": "a\n"}),
        # harmony: the recipient in other places
        ("gpt-oss", "<|channel|>commentary to=functions.write<|message|>{}<|call|>", {}),
        ("gpt-oss", "<|channel|>analysis to=functions.write code<|message|>{}<|call|>", {}),
        ("gpt-oss", " to=functions.write<|channel|>commentary json<|message|>{}", {}),
        ("gpt-oss", "<|start|>assistant to=functions.write<|channel|>commentary<|message|>{}<|call|>", {}),
        ("gpt-oss", " to=functions.write<|channel|>analysis <|constrain|>json<|message|>{}", {}),
        ("gpt-oss", "<|start|>assistant to=functions.write<|channel|>analysis<|message|>{}<|call|>", {}),
        # without the section or the list around it
        (
            "kimi-k2",
            '<|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>{"count": 2}<|tool_call_end|>',
            {"count": 2},
        ),
        (
            "lfm2",
            '<|tool_call_start|>write(text="a, b", count=2)<|tool_call_end|>',
            {"text": "a, b", "count": 2},
        ),
        # a quote in a string that is not escaped
        (
            "lfm2",
            '<|tool_call_start|>[write(text=\'it\'s here\', any="a "b"", count=2)]<|tool_call_end|>',
            {"text": "it's here", "any": 'a "b"', "count": 2},
        ),
        (
            "deepseek-v4",
            '<｜DSML｜invoke name="write">\n'
            '<｜DSML｜parameter name="text" string="true">a</｜DSML｜parameter>\n</｜DSML｜invoke>',
            {"text": "a"},
        ),
    ],
)
def test_loose_output_is_a_call(name: str, answer: str, expected: dict[str, Any]) -> None:
    parsed = collect(_parse(name, answer))
    assert (parsed.json_calls, parsed.content) == ([("write", expected)], "")


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("hermes", '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>{"name": 5}</tool_call>'),
        ("hermes", '<tool_call>{"name": "write", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "write", "arguments": "Berlin"}</tool_call>'),
        ("hermes", "<tool_call>write</tool_call>"),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "wri'),
        ("llama-json", '{"name": "Ada", "age": 5}'),
        ("llama-json", '{"name": "write"}'),
        ("llama-json", '{"city": "Rome", "list": [1, 2]}'),
        ("llama-json", 'Say {"name": "write", "parameters": {}}'),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[unknown(a=1)]"),
        ("pythonic", "write(count=1)"),
        ("qwen3-coder", "<tool_call>\n<function=unknown>\n</function>\n</tool_call>"),
        ("qwen3-coder", "<function=write>text</function>"),
        ("qwen3-coder", "Use <parameter=text> and </parameter>."),
        ("mistral-args", "[TOOL_CALLS]writes[ARGS]{}"),
    ],
)
def test_no_call_is_content_without_marker_tokens(name: str, answer: str) -> None:
    expected = answer
    for token in TOKENS.get(name, ()):
        expected = expected.replace(token, "")
    assert collect(_parse(name, answer)) == ("", expected, [])


GET_TIME = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
BRACES = '<tool_call>{"name": "write", "arguments": {"text": "}{ \\" {"}}</tool_call> done'
CODER_TIME = "<tool_call>\n<function=get_time>\n</function>\n</tool_call>"
DSML_TIME = '<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>'
LEAK = '<think>\nHm.\n</think>\n\nI call:\n<tool_call>\n{"name": "write", "arguments": {}}\n</tool_call>'
LEAKED = ("Hm.", 'I call:\n\n{"name": "write", "arguments": {}}\n')
STRAY = f"Hi.\n{GET_TIME}\n</tool_call>\n{GET_TIME}</tool_call>"
BROKEN = r'{"text": "\x \u12 \ud800", "count": five, }'
HARMONY = (
    "<|channel|>analysis<|message|>Hm. <|end|><|start|>assistant<|channel|>commentary<|message|>I look."
    "<|end|><|start|>assistant<|channel|>commentary to=functions.write <|constrain|>json<|message|>"
    '{"text": "x"}<|call|>'
)
HARMONY_FINAL = (
    "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>"
)
TWO_OF_ARRAY = '[TOOL_CALLS][{"name": "get", "arguments": {}}, {"name": "unknown", "arguments": {}}]'
TIMES = [("get_time", "{}")]
# Reasoning, content and calls of answers; numbers are issues of other servers. `>` starts in reasoning.
ANSWERS: dict[str, tuple[str, str, str, str, list[tuple[str, str]]]] = {
    "vllm#43221: `</think>` and `<tool_call>` in one delta": (
        *(">qwen3-coder", f"I must write it.</think>{CODER_TIME}"),
        *("I must write it.", "", TIMES),
    ),
    "TensorRT-LLM#19228: no arguments, and braces in strings": (
        *("hermes", f"{GET_TIME}{BRACES}"),
        *("", " done", [*TIMES, ("write", '{"text": "}{ \\" {"}')]),
    ),
    "llama.cpp#28182, pwilkin/llama.cpp#5: closers that close nothing": (
        "hermes",
        STRAY,
        "",
        "Hi.",
        TIMES * 2,
    ),
    "spelled closers that close nothing": ("generic", STRAY, "", "Hi.", TIMES * 2),
    "closers without a call": ("hermes", "a</think> b</tool_call>", "", "a b", []),
    "a spelled closer in a text": (
        *("generic", "Close it with </tool_call>."),
        *("", "Close it with </tool_call>.", []),
    ),
    "vllm#35687: a call in reasoning that is closed first is a draft": (
        *(">hermes", f"Try {GET_TIME} later</think>No."),
        *('Try {"name": "get_time", "arguments": {}} later', "No.", []),
    ),
    "a call in reasoning of a family that calls there": (
        *(">qwen3-coder", f"Now.\n{CODER_TIME}\nDone."),
        *("Now.", "\nDone.", TIMES),
    ),
    "a section in reasoning": (
        *(">deepseek-v4", f"Now.\n\n<｜DSML｜tool_calls>\n{DSML_TIME}\n</｜DSML｜tool_calls>"),
        *("Now.", "", TIMES),
    ),
    "no call in reasoning": (
        *(">qwen3-coder", f"I could\n{CODER_TIME.replace('get_time', 'unknown')}\nyes</think>Done."),
        *("I could\n\n<function=unknown>\n</function>\n\nyes", "Done.", []),
    ),
    "broken escapes and values reach the client, which can tell the model": (
        *("hermes", f'<tool_call>{{"name": "write", "arguments": {BROKEN}}}</tool_call> ok'),
        *("", " ok", [("write", BROKEN)]),
    ),
    "names that begin alike": ("pythonic", "[get(), get_time()]", "", "", [("get", "{}"), *TIMES]),
    "names that begin alike behind markers": (
        *("mistral-args", "[TOOL_CALLS]get_time[ARGS]{}[TOOL_CALLS]get[ARGS]{}"),
        *("", "", [*TIMES, ("get", "{}")]),
    ),
    "a second call of an array that is none": (
        *("mistral-v3", TWO_OF_ARRAY),
        *("", ', {"name": "unknown", "arguments": {}}]', [("get", "{}")]),
    ),
    "channels of harmony": ("gpt-oss", HARMONY, "Hm.", "I look.", [("write", '{"text": "x"}')]),
    "the final channel of harmony": ("gpt-oss", HARMONY_FINAL, "a", "b", []),
    "spelled markers of content only around it": (
        *("granite", "<think>a</think>\n<response>In XML: <response>x</response> y</response>\n"),
        *("a", "In XML: <response>x</response> y", []),
    ),
    "markers of content that templates do not write": (
        *("hunyuan", "<think>\na\n</think>\n<answer>\nb\n</answer>"),
        *("a", "b", []),
    ),
    "a call within deliberation": (
        *("apertus", '<|inner_prefix|>a<|tools_prefix|>[{"get_time": {}}]<|tools_suffix|>'),
        *("a", "", TIMES),
    ),
    "a header between reasoning and a call": (
        "solar-open",
        "<|think|>a<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>0123456789<|tool_call:name|>get_time"
        "<|tool_call:args|>{}<|tool_call:end|><|calls|>",
        *("a", "", TIMES),
    ),
    "local-inference-lab/vllm#22: prompt and model open the reasoning": (
        *(">hermes", "<think>\n<think>\na\n</think>\nb"),
        *("a", "b", []),
    ),
    "a spelled opener of reasoning counts only before content": (
        *("generic", "<think>a</think>The tag <think> opens it."),
        *("a", "The tag <think> opens it.", []),
    ),
    "a custom tool's arguments in another form are its input": (
        *("hermes", '<tool_call>{"name": "patch", "arguments": {"code": 5}}</tool_call>'),
        *("", "", [("patch", '{"code": 5}')]),
    ),
    "a custom tool without arguments": (
        *("hermes", '<tool_call>{"name": "patch", "arguments": {}}</tool_call>'),
        *("", "", [("patch", "")]),
    ),
    "a custom tool's long arguments": (
        *("hermes", f'<tool_call>{{"name": "patch", "arguments": {{"x": "{"a" * 300}"}}}}</tool_call>'),
        *("", "", [("patch", f'{{"x": "{"a" * 300}"}}')]),
    ),
}


@pytest.mark.parametrize(("name", "answer", "reasoning", "content", "calls"), ANSWERS.values(), ids=ANSWERS)
def test_answer(name: str, answer: str, reasoning: str, content: str, calls: list[tuple[str, str]]) -> None:
    events = _parse(name.removeprefix(">"), answer, start=name.startswith(">"))
    assert collect(events) == (reasoning, content, calls)


def test_tools_that_may_not_be_called_are_not() -> None:
    """vllm#37081, #39588, #48940: the model calls although it may not; markers do not leak."""
    assert collect(_parse("hermes", LEAK, ToolUse(USE.tools, choice="none"))) == (*LEAKED, [])
    use = ToolUse(USE.tools, allowed=("get",))
    assert _parse("hermes", GET_TIME, use) == (ContentText('{"name": "get_time", "arguments": {}}'),)


@pytest.mark.parametrize(
    ("use", "drops_space", "is_text"),
    [
        (NO_TOOLS, None, True),
        (NO_TOOLS, False, True),
        (ToolUse(USE.tools, choice="none"), None, False),
        (ToolUse(USE.tools, choice="none"), False, True),
    ],
)
def test_markers_are_text_without_tools_and_in_constrained_content(
    use: ToolUse, drops_space: bool | None, is_text: bool
) -> None:
    """A structural tag or a grammar may write them, and a user may ask about them."""
    ids = _bound("hermes").token_ids
    for special_ids in (frozenset[int](), frozenset({ids["<tool_call>"]})):
        parser = ChatParser(_bound("hermes", special_ids), use, True, str, drops_space)
        pieces = ["<think>", "Hm.", "</think>", "Hi ", "<tool_call>", '{"a": 1}', "</tool_call>"]
        events = [event for piece in pieces for event in parser.feed(ids.get(piece, 1), piece)]
        parsed = collect(merge_events([*events, *parser.flush(ended_by_model=True)]))
        begin, end = "<tool_call>" if is_text and not special_ids else "", "</tool_call>" if is_text else ""
        assert (parsed.reasoning, parsed.content) == ("Hm.", f'Hi {begin}{{"a": 1}}{end}')


def test_content_markers_are_no_text() -> None:
    bound = bind_format(FORMATS["granite"], {"<response>": 1000, "</response>": 1001}.get)
    assert parse_message(bound, NO_TOOLS, "<response>a</response>") == (ContentText("a"),)


def test_failures_are_counted() -> None:
    for answer, expected in [
        ('<tool_call>{"name": "unknown"}</tool_call>', 1),
        ('<tool_call>{"name": "write", "arguments": {"a": [</tool_call>', 1),
        ('<tool_call>{"name": "write", "arguments": {}}</tool_call>', 0),
        ("no call", 0),
    ]:
        parser = _parser("hermes")
        for piece in answer.replace("<", " <").replace(">", "> ").split(" "):
            parser.feed(_bound("hermes").token_ids.get(piece, 1), piece)
        parser.flush()
        assert parser.num_parse_errors == expected


def test_markers_spelled_in_several_tokens_are_text() -> None:
    parser = _parser("hermes")
    text = '<think>x</think> <tool_call>{"name": "write", "arguments": {}}</tool_call>'
    events = _feed(parser, *text)
    assert events == (ContentText(text),)
    assert parser.num_calls == 0


@pytest.mark.parametrize("text", ["\ufffd", "\ud800", "\udbff<tool_call>", "a\ud800\udc00b"])
def test_invalid_text_is_replaced(text: str) -> None:
    """llama.cpp#24327. A lone surrogate is what a marker looks like inside of the parser."""
    parser = _parser("hermes")
    assert _feed(parser, text) == (ContentText("".join(c if c < "\ud800" else "\ufffd" for c in text)),)
    assert parser.num_calls == 0


def test_string_arguments_stream() -> None:
    """vllm#43267: a file to write arrives while the model writes it, in JSON and between tags."""
    parser = _parser("hermes")
    begin = (1002, "<tool_call>"), '{"name": "write", "arguments": {"text": "'
    assert _feed(parser, *begin) == (CallStart(0, "call_0", "write"), CallArguments(0, '{"text": "'))
    assert _feed(parser, "some \\n text") == (CallArguments(0, "some \\n text"),)

    parser = _parser("qwen3-coder")
    begin = (1002, "<tool_call>"), "\n<function=write>\n<parameter=text>\nsome"
    assert _feed(parser, *begin) == (CallStart(0, "call_0", "write"), CallArguments(0, '{"text": "some'))
    assert _feed(parser, ' "text"\n</par') == (CallArguments(0, ' \\"text\\"'),)
    assert _feed(parser, "t") == (CallArguments(0, "\\n</part"),)

    parser = _parser("pythonic")
    assert _feed(parser, "[write(text='some")[1:] == (CallArguments(0, '{"text": "some'),)
    assert _feed(parser, " text") == (CallArguments(0, " text"),)


def test_json_arguments_keep_their_bytes() -> None:
    """A prefix cache finds a replayed call by its bytes."""
    arguments = '{ "text" :"\\u00e9\\/é", "count":1.50e+1,\n\t"any": [ ] }'
    events = _parse("hermes", f'<tool_call>{{"name": "write", "arguments": {arguments}}}</tool_call>')
    assert CallArguments(0, arguments) in events


PATCH = r'{"input": "a\n\"b\" \u00e9\ud83d\ude00"}'


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("hermes", f'<tool_call>{{"name": "patch", "arguments": {PATCH}}}</tool_call>'),
        ("hermes", f'<tool_call>{{"arguments": {PATCH}, "name": "patch"}}</tool_call>'),
        ("qwen3-coder", '<function=patch>\n<parameter=input>\na\n"b" é😀\n</parameter>\n</function>'),
        ("pythonic", """[patch(input='a\\n"b" é😀')]"""),
        ("gemma4", '<|tool_call>call:patch{input:<|"|>a\n"b" é😀<|"|>}<tool_call|>'),
    ],
)
def test_custom_tool_input_is_raw_text(name: str, answer: str) -> None:
    expected = (CallStart(0, "call_0", "patch"), CallArguments(0, 'a\n"b" é😀'), CallEnd(0))
    assert _parse(name, answer) == expected
    parser = _parser(name, is_spelled=True)
    events = [event for char in answer for event in parser.feed(1, char)]
    assert merge_events([*events, *parser.flush(ended_by_model=True)]) == expected


def test_call_ids() -> None:
    """Formats that write an id keep it, unless it is unique in the answer only, or repeated."""
    kimi = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get:3<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_call_begin|>functions.get:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_call_begin|>get_time<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    )
    mistral = "".join(
        f"[TOOL_CALLS]get{call_id}[ARGS]{{}}" for call_id in ("[CALL_ID]abcdefgh1", "[CALL_ID]short", "")
    )
    array = '[TOOL_CALLS][{"id": "abcdefgh1", "name": "get", "arguments": {}}]'
    command = '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "get", "parameters": {}}]<|END_ACTION|>'
    for name, answer, expected in [
        ("kimi-k2", kimi, ["functions.get:3", "call_1", "call_2"]),
        ("mistral-args", mistral, ["abcdefgh1", "call_1", "call_2"]),
        ("mistral-v3", array, ["abcdefgh1"]),
        ("command-r7b", command, ["call_0"]),
    ]:
        ids = [event.id for event in _parse(name, answer) if isinstance(event, CallStart)]
        assert ids == expected


def test_end_of_the_model_completes_a_call_and_a_limit_does_not() -> None:
    """ollama#18530. A call that lacks only closers counts if the model chose to stop."""
    answer = "<tool_call>\n<function=write>\n<parameter=text>\na\n</parameter>\n"
    for ended_by_model in (False, True):
        parser = _parser("qwen3-coder", is_spelled=True)
        events = parser.feed(1, answer) + parser.flush(ended_by_model)
        assert (CallEnd(0) in events) == ended_by_model
        assert parser.num_calls == 1


def test_tokens_are_counted_by_region() -> None:
    parser = _parser("hermes", start=True)
    _feed(parser, "a", "", "b", (1001, "</think>"), "c", "d", (1002, "<tool_call>"))
    _feed(parser, '{"name": "get", ', '"arguments": {}}', (1003, "</tool_call>"), " e")
    assert (parser.num_reasoning_tokens, parser.num_call_tokens, parser.num_calls) == (4, 4, 1)


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize(
    ("name", "tokens", "expected"),
    [
        ("qwen3-coder", ["Write", " <function", "=", "foo", ">", " as", " usual", "."], (0, 0)),
        (">qwen3-coder", ["Or", " <function", "=", "foo", ">", " as", " usual", "."], (8, 0)),
        (">qwen3-coder", ["Or", "<function=", "foo", "></think>", "yes"], (4, 0)),
        ("llama-json", ["{", '"city"', ":", '"Rome"', "}"], (0, 0)),
        ("pythonic", ["[", "get", "()", ", ", "get_time", "()", "]", " ", "ok"], (0, 7)),
        ("pythonic", ["[", "get", "()", ", ", "other", "()", "]"], (0, 3)),
        ("qwen3-coder", ["a <function=b> <function=get", "></function> <function=", "c> d", "e"], (0, 2)),
    ],
)
def test_tokens_of_a_text_like_a_call_count_for_its_region(
    name: str, tokens: list[str], expected: tuple[int, int], is_cut: bool
) -> None:
    parser = ChatParser(_bound(name.lstrip(">"), is_spelled=True), USE, name.startswith(">"), str)
    _feed(parser, *tokens)
    parser.flush(ended_by_model=not is_cut)
    assert (parser.num_reasoning_tokens, parser.num_call_tokens) == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([1, 1000], True),
        ([1, 1000, 2, 3], True),  # a final message to continue
        ([1, 1000, 2, 1001, 2], False),
        ([1, 1000, 2, 1001, 2, 1000, 2], True),  # history, then an open one
        ([1000, 2, 50, 1, 3], False),  # a turn that has ended: 50 is a special token
        ([1, 1000, 1001], False),  # an empty pair: no reasoning
        ([], False),
    ],
)
def test_start_in_reasoning_is_read_from_the_prompt(prompt: list[int], expected: bool) -> None:
    assert starts_in_reasoning(_bound("hermes", frozenset({50})), prompt) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|user|>x<|assistant|><think>\n", True),
        ("<think>a</think>\n<|assistant|>", False),
        ("<think>\n\n</think>\n\n", False),
        ("What does <think> do?<|end|><|assistant|>", False),
        ("", False),
    ],
)
def test_start_in_reasoning_of_spelled_markers(text: str, expected: bool) -> None:
    bound = bind_format(FORMATS["hermes"], lambda _: None)
    assert starts_in_reasoning(bound, [], text) == expected
    assert not starts_in_reasoning(bind_format(FORMATS["llama-json"], lambda _: None), [], text)


def test_json_answer_that_is_no_call_streams() -> None:
    """Without a marker, the first key that no call has decides."""
    parser = _parser("llama-json")
    assert _feed(parser, '{"city": ', '"Ro') == (ContentText('{"city": "Ro'),)
