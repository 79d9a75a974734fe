"""The name of a tool and the id of a call."""

from __future__ import annotations

import re
from dataclasses import dataclass

from foreword.chat_formats.call_grammar import GrammarWriter, Item, Text, ToolItems, literal, tool_name
from foreword.chat_formats.parts.part import FormatPart
from foreword.chat_formats.stream_reader import CallReader, Wait
from foreword.chat_formats.tools import WrittenCall


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
        return reader.tool is not None

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
