"""Calls as the text that a model of a format writes: for templates that do not render them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from foreword.chat_formats.chat_format import ToolFormat
from foreword.chat_formats.parts.json import to_json
from foreword.chat_formats.parts.part import Part
from foreword.chat_formats.tools import Tool, WrittenCall

TOOL_TEXT: Final = """You can call these tools:
{tools}

To call a tool, write a call in exactly this form, with the tool's name and arguments in place of the example:
{example}
The result of each call follows in the next message."""
NO_CALL: Final = WrittenCall("")  # parts beside a call depend on none


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
        tools="\n".join(to_json(tool.to_template()["function"]) for tool in described),
        example=write_calls(tools, [example]),
    )


def _write(parts: Iterable[Part], call: WrittenCall = NO_CALL) -> str:
    return "".join(part if isinstance(part, str) else part.write(call) for part in parts)
