"""Keyword arguments in a syntax with bare keys and quotes of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from foreword.chat_formats.call_grammar import ANY_TEXT, KEY, GrammarWriter, join, literal, text_items
from foreword.chat_formats.parts.json import escape, pass_string, to_json
from foreword.chat_formats.parts.keywords import KeywordArguments
from foreword.chat_formats.stream_reader import CallReader, Wait, stops_of
from foreword.chat_formats.tools import WrittenCall


@dataclass(frozen=True, slots=True)
class BareArguments(KeywordArguments):
    """key:value pairs with bare keys, without their braces; strings between `quote`:

    k:<escape>v<escape>,n:3,o:{p:[1,<escape>v<escape>]}
    """

    quote: str

    assign: ClassVar = ":"
    words: ClassVar = ("true", "false", "null")
    any_key_regex: ClassVar = KEY
    scalar: ClassVar = re.compile("[^,{}\\[\\]\ud800-\udfff]*+")
    separators: ClassVar = ",:='"
    has_positional: ClassVar = False

    @property
    def string_quote(self) -> str:
        return self.quote

    def encode(self, encode: Callable[[str], str]) -> Self:
        return replace(self, quote=encode(self.quote))

    def key_regex(self, key: str) -> str:
        return literal(key)

    def string_rule(self, writer: GrammarWriter) -> str:
        first = writer.marker(self.quote)[0]
        if isinstance(first, str):
            return f"{first} {ANY_TEXT} {first}"
        return f"/{first.regex}/ {writer.lazy_rule('quoted', f'/(?s:.*){first.regex}/')}"

    def constant_rule(self, writer: GrammarWriter, value: str) -> str:
        quote = writer.marker(self.quote)
        return join([*quote, *text_items(value), *quote])

    def pass_string(self, reader: CallReader, char: str, emit: Callable[[str], None]) -> Wait:
        if char == '"' and not (yield from reader.at(self.quote)):
            reader.position += 1
            emit('"')
            is_closed = yield from pass_string(reader, emit)
            emit('"' if is_closed else "")
            return is_closed
        reader.position += len(self.quote)
        emit('"')
        stops = stops_of(self.quote, any_marker=False)
        stop = yield from reader.pass_until(stops, lambda text: emit(escape(reader.spell(text))))
        if stop is None:
            return False
        reader.position += len(self.quote)
        emit('"')
        return True

    def write(self, call: WrittenCall) -> str:
        return ",".join(f"{key}:{self._write_value(value)}" for key, value in call.arguments.items())

    def _write_value(self, value: Any) -> str:
        if isinstance(value, str):
            return self.quote + value + self.quote
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{key}:{self._write_value(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list | tuple):
            return "[" + ",".join(map(self._write_value, value)) + "]"
        return to_json(value)
