"""The record of a chat format: how a model writes reasoning, content and tool calls.

A call is a row of parts (`chat_formats/parts/`), each of which has its grammar, reader and writer. The
constraint (`grammar/tool_calls.py`), the parser (`chat_formats/parser.py`) and the proof against the chat
template (`chat_formats/format_detection.py`) are all derived from the record. A text in brackets
(`<tool_call>`, `[ARGS]`) is a marker if the vocabulary has it as one token: then only that token counts, and
its spelling in several tokens is text. `BoundFormat` knows which ones are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

from foreword.chat_formats.parts.json import to_json
from foreword.chat_formats.parts.part import Part
from foreword.chat_formats.tools import Tool, WrittenCall

TOOL_TEXT: Final = """You can call these tools:
{tools}

To call a tool, write a call in exactly this form, with the tool's name and arguments in place of the example:
{example}
The result of each call follows in the next message."""
NO_CALL: Final = WrittenCall("")  # parts beside a call depend on none


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """section: begin call (separator call)* end. The text at its start is the trigger.

    The parser takes whitespace between any two parts, and leaves out texts of whitespace.
    """

    call: tuple[Part, ...]
    begin: tuple[Part, ...] = ()
    separator: tuple[Part, ...] | None = None  # None: one call a section; further calls are further sections
    end: tuple[Part, ...] = ()
    opens_answer: bool = False  # it has no marker: a call is one only at the start of the answer

    @property
    def first(self) -> Part:
        """The first part of a section."""
        return (self.begin + self.call)[0]

    def encode(self, encode: Callable[[str], str]) -> ToolFormat:
        """The format with its texts as they stand in the parser's input."""

        def encode_parts(parts: tuple[Part, ...]) -> tuple[Part, ...]:
            return tuple(encode(part) if isinstance(part, str) else part.encode(encode) for part in parts)

        separator = None if self.separator is None else encode_parts(self.separator)
        return ToolFormat(
            encode_parts(self.call),
            encode_parts(self.begin),
            separator,
            encode_parts(self.end),
            self.opens_answer,
        )


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """begin REASONING end. Whitespace beside the markers belongs to neither reasoning nor content."""

    begin: str
    end: str
    space: str = "\n"  # what the template writes after `begin` and before `end`
    ended_by_call: bool = False  # models of the family call without closing their reasoning first


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """One family's format. Content is whatever is neither reasoning nor a call, nor a marker of `content`."""

    name: str
    tools: ToolFormat | None = None
    also: tuple[ToolFormat, ...] = ()  # other forms of a call that its models write: parsed, never enforced
    reasoning: ReasoningFormat | None = None
    content: tuple[str, str] | None = None  # markers around content, such as <response> and </response>
    dropped: tuple[str, ...] = ()  # other texts that are not content, wherever they stand outside reasoning
    inner_tokens: tuple[str, ...] = ()  # added tokens that are a part of longer texts above
    template_markers: tuple[str, ...] = ()  # texts that a chat template of this family holds, all of them


@dataclass(frozen=True, slots=True, eq=False)
class BoundFormat:
    """A format with the ids of its markers in one vocabulary (picklable)."""

    format: ChatFormat
    token_ids: Mapping[str, int]  # texts of the record that are one token each
    special_ids: frozenset[int] = frozenset()  # special tokens of the vocabulary; one of them ends each turn

    def pieces(self, text: str) -> tuple[str | int, ...]:
        """A record's text as texts and ids of marker tokens: `<|start|>assistant` is (ID, "assistant")."""
        if text in self.token_ids:
            return (self.token_ids[text],)
        inner = [token for token in self.format.inner_tokens if token in self.token_ids]
        if not inner:
            return (text,) if text else ()
        parts = re.split(f"({'|'.join(map(re.escape, inner))})", text)
        return tuple(
            self.token_ids.get(part, part) if i % 2 else part for i, part in enumerate(parts) if part
        )


def bind_format(
    fmt: ChatFormat, token_to_id: Callable[[str], int | None], special_ids: frozenset[int] = frozenset()
) -> BoundFormat:
    """Look up the markers of a format, once per model.

    token_to_id  id of a token by its text, None if it is no token
    special_ids  ids of the vocabulary's special tokens; `starts_in_reasoning` needs them to skip history
    """
    token_ids = {}
    for text in sorted({*_texts(fmt), *fmt.inner_tokens}):
        # Ordinary tokens such as `[` or `function` are no markers.
        token_id = token_to_id(text) if re.fullmatch(r"[<\[｜].{2,}[>\]｜]", text) else None
        if token_id is not None:
            token_ids[text] = token_id
    return BoundFormat(fmt, token_ids, special_ids)


def _texts(value: Any) -> set[str]:
    """All texts in a record, its name and patterns included: they are no tokens."""
    if isinstance(value, str):
        return {value}
    if isinstance(value, tuple):
        return set().union(*map(_texts, value))
    if is_dataclass(value):
        return set().union(*(_texts(getattr(value, field.name)) for field in fields(value)))
    return set()


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
