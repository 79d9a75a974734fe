"""Whitespace and headers between the parts of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from foreword.chat_formats.call_grammar import GrammarWriter, Item, ToolItems, space
from foreword.chat_formats.parts.part import FormatPart
from foreword.chat_formats.stream_reader import CallReader, Wait
from foreword.chat_formats.tools import WrittenCall


@dataclass(frozen=True, slots=True)
class Space(FormatPart):
    """Optional whitespace; `usual` is what the family's template writes.

    The parser takes whitespace between any two parts, so there is nothing to read.
    """

    usual: str = ""

    def grammar(self, writer: GrammarWriter) -> list[Item | ToolItems]:
        return [space(self.usual)]

    def write(self, call: WrittenCall) -> str:
        return self.usual


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


SPACE: Final = Space()
