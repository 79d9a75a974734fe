"""Keyword arguments in Python's syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

from foreword.chat_formats.call_grammar import GrammarWriter, literal
from foreword.chat_formats.parts.json import ESCAPED, escape, to_char
from foreword.chat_formats.parts.keywords import SCALAR, KeywordArguments
from foreword.chat_formats.stream_reader import CallReader, Wait
from foreword.chat_formats.tools import WrittenCall

# Of a grammar.
PYTHON_STRING: Final = r"'([^'\\\x00-\x1f]|\\[\\'\"nrtbf]|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4})*'"
JSON_STRING: Final = r'"([^"\\\x00-\x1f]|\\["\\\/bfnrt]|\\u[0-9a-fA-F]{4})*"'
# Of the parser.
STRING_CHARS: Final = {quote: re.compile(rf"[^{quote}\\]*+") for quote in "'\""}
ESCAPE: Final = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)?", re.DOTALL)
MAX_ESCAPE_CHARS: Final = 10
PYTHON_ESCAPED: Final = {**ESCAPED, "a": "\a", "v": "\v", "\\": "\\", "'": "'", '"': '"', "\n": ""}


@dataclass(frozen=True, slots=True)
class PythonArguments(KeywordArguments):
    """Keyword arguments without their parentheses: a='x', b=2, c=[True, None]."""

    assign: ClassVar = "="
    words: ClassVar = ("True", "False", "None")
    any_key_regex: ClassVar = f"({PYTHON_STRING}|{JSON_STRING})"
    scalar: ClassVar = SCALAR
    separators: ClassVar = ",:="
    has_positional: ClassVar = True

    @property
    def string_quote(self) -> str:
        return ""

    def key_regex(self, key: str) -> str:
        return f"({literal(repr(key))}|{literal(json.dumps(key))})"

    def string_rule(self, writer: GrammarWriter) -> str:
        return f"/{PYTHON_STRING}|{JSON_STRING}/"

    def constant_rule(self, writer: GrammarWriter, value: str) -> str:
        return f"/{literal(repr(value))}|{literal(json.dumps(value, ensure_ascii=False))}/"

    def pass_string(self, reader: CallReader, char: str, emit: Callable[[str], None]) -> Wait:
        return (yield from _pass_string(reader, char, emit))

    def write(self, call: WrittenCall) -> str:
        return ", ".join(f"{key}={value!r}" for key, value in call.arguments.items())


def _pass_string(reader: CallReader, quote: str, emit: Callable[[str], None]) -> Wait:
    """Pass on a string as JSON. A quote inside a string counts as its end only where a value may end."""
    is_long = yield from reader.at(quote * 3)
    reader.position += 3 if is_long else 1
    emit('"')
    while True:
        end = STRING_CHARS[quote].match(reader.buffer, reader.position).end()  # type: ignore[union-attr]
        if end > reader.position:
            emit(escape(reader.spell(reader.buffer[reader.position : end])))
            reader.position = end
        char = yield from reader.peek()
        if not char:
            return False
        if char == "\\":
            while len(reader.buffer) - reader.position < MAX_ESCAPE_CHARS and (yield from reader.wait()):
                pass
            sequence = ESCAPE.match(reader.buffer, reader.position)
            assert sequence is not None
            reader.position = sequence.end()
            emit(escape(reader.spell(_decode_escape(sequence[0]))))
        elif char == quote:
            if is_long:
                is_end = yield from reader.at(quote * 3)
            else:
                is_end = yield from reader.is_followed(1, (",", ")", "]", "}", ":"))
            reader.position += 3 if is_long and is_end else 1
            if is_end:
                emit('"')
                return True
            emit(escape(quote))


def _decode_escape(text: str) -> str:
    """The text of an escape sequence in a Python string; an invalid one is text."""
    if text[1:2] in "01234567" and len(text) > 1:
        return to_char(text[1:], 8)
    if text[1:2] in ("x", "u", "U") and len(text) > 2:
        return to_char(text[2:])
    return PYTHON_ESCAPED.get(text[1:], text)
