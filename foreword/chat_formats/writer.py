"""Calls as the text that a model of a format writes: for templates that do not render them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from foreword.chat_formats.record import (
    BareArguments,
    CallId,
    Header,
    JsonArguments,
    JsonCall,
    Name,
    NameInId,
    Part,
    PythonArguments,
    Space,
    TaggedArguments,
    ToolFormat,
)
from foreword.chat_formats.tools import Tool

TOOL_TEXT: Final = """You can call these tools:
{tools}

To call a tool, write a call in exactly this form, with the tool's name and arguments in place of the example:
{example}
The result of each call follows in the next message."""


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call to write."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    index: int = 0  # among the calls of the conversation, for formats that count them


def write_calls(tools: ToolFormat, calls: Sequence[WrittenCall]) -> str:
    """The text of calls in one answer."""
    texts = [_write(tools.call, call) for call in calls]
    begin, end = _write(tools.begin), _write(tools.end)
    if tools.separator is None:
        return "\n".join(begin + text + end for text in texts)
    return begin + _write(tools.separator).join(texts) + end


def describe_tools(tools: ToolFormat, described: Sequence[Tool]) -> str:
    """A text about tools and how to call them, for templates that do not render tools."""
    example = WrittenCall("example_tool", {"text": "some text", "number": 1}, "call00001")
    return TOOL_TEXT.format(
        tools="\n".join(_to_json(tool.to_template()["function"]) for tool in described),
        example=write_calls(tools, [example]),
    )


def _write(parts: Iterable[Part], call: WrittenCall = WrittenCall("")) -> str:
    return "".join(_write_part(part, call) for part in parts)


def _write_part(part: Part, call: WrittenCall) -> str:
    match part:
        case str():
            return part
        case Space() | Header():
            return part.usual
        case Name():
            return call.name
        case CallId():
            return call.id
        case NameInId():
            return f"{part.begin}{call.name}{part.separator}{call.index}"
        case JsonArguments():
            return _to_json(call.arguments)
        case JsonCall():
            given = {part.name_key: call.name, part.arguments_key: call.arguments}
            call_id = str(call.index) if part.id_is_local else call.id
            ids = {} if part.id_key is None else {part.id_key: call_id}
            return _to_json(ids | given if part.id_first else given | ids)
        case TaggedArguments():
            return "".join(_write_tagged(part, *item) + part.between for item in call.arguments.items())
        case PythonArguments():
            return ", ".join(f"{key}={value!r}" for key, value in call.arguments.items())
        case BareArguments():
            return ",".join(
                f"{key}:{_write_bare(value, part.quote)}" for key, value in call.arguments.items()
            )


def _write_tagged(part: TaggedArguments, key: str, value: Any) -> str:
    is_text = isinstance(value, str)
    types = f' string="{str(is_text).lower()}">' if part.types_in_tag else ""
    text = value if is_text else _to_json(value)
    begin = part.key_begin + key + part.key_end + types + part.value_begin
    return begin + part.padding + text + part.padding + part.value_end


def _write_bare(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_write_bare(item, quote)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_write_bare(item, quote) for item in value) + "]"
    return _to_json(value)


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
