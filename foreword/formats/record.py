"""The record of a chat format: how a model writes reasoning, content and tool calls.

The grammar (`grammar/tool_calls.py`), the parser (`formats/parser.py`) and the proof against the chat
template (`formats/detect.py`) are all derived from it. A text in a record is a marker if the vocabulary has
it as one token: then only that token counts, and its spelling in several tokens is text.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "SPACE",
    "BareArguments",
    "CallId",
    "ChatFormat",
    "JsonArguments",
    "JsonCall",
    "Name",
    "Part",
    "PythonArguments",
    "ReasoningFormat",
    "Space",
    "TaggedArguments",
    "ToolFormat",
]


@dataclass(frozen=True, slots=True)
class Space:
    """Optional whitespace; `usual` is what the family's template writes."""

    usual: str = ""


@dataclass(frozen=True, slots=True)
class Name:
    """Name of a tool, one of the request's."""


@dataclass(frozen=True, slots=True)
class CallId:
    """Id of the call, as the model writes it."""

    pattern: str  # regular expression


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """A JSON object by the tool's schema."""


@dataclass(frozen=True, slots=True)
class JsonCall:
    """A JSON object with name and arguments: {"name": N, "arguments": A}."""

    name_key: str = "name"
    arguments_key: str = "arguments"
    id_key: str | None = None
    id_pattern: str = ""  # of the id


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """One element per argument: key_begin KEY key_end VALUE value_end.

    Strings are raw, other values are JSON.
    """

    key_begin: str
    key_end: str
    value_end: str
    types_in_tag: bool = False  # DeepSeek's DSML: key_end has string="true" or string="false"


@dataclass(frozen=True, slots=True)
class PythonArguments:
    """Keyword arguments: a='x', b=2, c=[True, None]."""


@dataclass(frozen=True, slots=True)
class BareArguments:
    """key:value pairs with bare keys; strings between `quote`: k:<escape>v<escape>,n:3."""

    quote: str


Part = (
    str | Space | Name | CallId | JsonArguments | JsonCall | TaggedArguments | PythonArguments | BareArguments
)
SPACE = Space()


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """section: begin call (separator call)* end. The text at its start is the trigger."""

    call: tuple[Part, ...]
    begin: tuple[Part, ...] = ()
    separator: tuple[Part, ...] | None = None  # None: one call a section; further calls are further sections
    end: tuple[Part, ...] = ()
    opens_answer: bool = False  # without a marker: a call is one only at the start of the answer


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """One family's format. Content is whatever is neither reasoning nor a call, nor a marker of `content`."""

    name: str
    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    content: tuple[str, str] | None = None  # markers around content, such as <response> and </response>
    template_markers: tuple[str, ...] = ()  # texts that a chat template of this family holds, all of them
