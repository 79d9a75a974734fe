"""A part of a chat format: one kind of text in a call, with its grammar, its reader and its writer.

Here are the plainest kinds: headers, the name of a tool and the id of a call.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

from foreword.chat_formats.call_grammar import GrammarWriter, Item, Text, ToolItems, literal, tool_name
from foreword.chat_formats.stream_reader import CallReader, Wait
from foreword.chat_formats.tools import WrittenCall


class FormatPart(abc.ABC):
    """A part that is more than a fixed text. A kind is a frozen dataclass, with all it does in one file."""

    __slots__ = ()

    def encode(self, encode: Callable[[str], str]) -> Self:
        """The part with its texts as they stand in the parser's input."""
        return self

    @abc.abstractmethod
    def grammar(self, writer: GrammarWriter) -> list[Item | ToolItems]:
        """The texts and rules that the part allows; what differs between tools is a function of the tool."""

    def read(self, reader: CallReader, closer: str) -> Wait:
        """Read the part from an answer. False if it is none: then there is no call.

        closer  the next text of the format after the part
        """
        yield from ()
        return True

    @abc.abstractmethod
    def write(self, call: WrittenCall) -> str:
        """The text that the family's template writes for a call."""


# A text, or a part of another kind. Texts of whitespace are optional, and nothing to read: the parser takes
# whitespace between any two parts.
Part = str | FormatPart
SPACE: Final = ""  # optional whitespace of which the family's template writes none


@dataclass(frozen=True, slots=True)
class Header(FormatPart):
    """A short text up to the next part; models vary it, templates write `usual`."""

    usual: str

    def grammar(self, writer: GrammarWriter) -> list[Item | ToolItems]:
        return [writer.optional(self.usual)]

    def read(self, reader: CallReader, closer: str) -> Wait:
        return (yield from reader.read_header(closer)) is not None

    def write(self, call: WrittenCall) -> str:
        return self.usual


@dataclass(frozen=True, slots=True)
class Name(FormatPart):
    """Name of a tool, one of the request's."""

    def grammar(self, writer: GrammarWriter) -> list[Item | ToolItems]:
        return [tool_name]

    def read(self, reader: CallReader, closer: str) -> Wait:
        word = yield from reader.peek_word()
        if word not in reader.tools:
            word = next((name for name in reader.names if word.startswith(name)), "")
        reader.tool = reader.tools.get(word)
        reader.position += len(word)
        return reader.tool is not None

    def write(self, call: WrittenCall) -> str:
        return call.name


@dataclass(frozen=True, slots=True)
class CallId(FormatPart):
    """Id of the call, as the model writes it."""

    pattern: str  # regular expression

    def grammar(self, writer: GrammarWriter) -> list[Item | ToolItems]:
        return [Text(f"({self.pattern})")]

    def read(self, reader: CallReader, closer: str) -> Wait:
        word = yield from reader.peek_word()
        reader.call_id = word if re.fullmatch(self.pattern, word) else None
        reader.position += len(word)
        return True

    def write(self, call: WrittenCall) -> str:
        return call.id


@dataclass(frozen=True, slots=True)
class NameInId(FormatPart):
    """Id of the call, which holds its name: begin NAME separator NUMBER. The whole is the id."""

    begin: str
    separator: str
    pattern: str  # regular expression of the number

    def grammar(self, writer: GrammarWriter) -> list[Item | ToolItems]:
        number = Text(f"{literal(self.separator)}({self.pattern})")
        return [Text(literal(self.begin)), tool_name, number]

    def read(self, reader: CallReader, closer: str) -> Wait:
        word = yield from reader.peek_word()
        body = word.removeprefix(self.begin)
        name, _, number = body.rpartition(self.separator)
        if name in reader.tools and re.fullmatch(self.pattern, number):
            reader.tool, reader.call_id = reader.tools[name], word
        else:
            reader.tool = reader.tools.get(body)
        reader.position += len(word)
        return reader.tool is not None

    def write(self, call: WrittenCall) -> str:
        return f"{self.begin}{call.name}{self.separator}{call.index}"
