"""Calls and arguments as JSON, and JSON as text that arrives in pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final

from foreword.chat_formats.call_grammar import (
    BLANK,
    GrammarWriter,
    Item,
    Text,
    ToolItems,
    ToolSchema,
    literal,
)
from foreword.chat_formats.parts.part import FormatPart
from foreword.chat_formats.stream_reader import CallReader, Wait
from foreword.chat_formats.tools import WrittenCall

JSON_STRUCTURE: Final = re.compile('["{}\\[\\]\ud800-\udfff]')
JSON_SCALAR: Final = re.compile('[^\\s,:"{}\\[\\]\ud800-\udfff]*+')

# A JSON string up to its quote; a backslash at the end of the text stays out.
JSON_STRING: Final = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)
JSON_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
MAX_LITERAL_CHARS: Final = 64  # longest number or literal
LITERALS: Final = {"True": "true", "False": "false", "None": "null"} | {
    word: word for word in ("true", "false", "null")
}

HEX: Final = "[0-9a-fA-F]"
HIGH: Final = rf"\\u[dD][89abAB]{HEX}{{2}}"
LOW: Final = rf"\\u[dD][c-fC-F]{HEX}{{2}}"
ESCAPE: Final = re.compile(rf"{HIGH}{LOW}|\\u{HEX}{{4}}|\\[^u]", re.DOTALL)
# A high surrogate is whole with its low one, or once something else follows.
NO_LOW: Final = r"(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F])"
NO_HEX: Final = rf"(?={HEX}{{0,3}}[^0-9a-fA-F])"
WHOLE_ESCAPES: Final = re.compile(
    rf"(?:[^\\]++|\\[^u]|{HIGH}{LOW}|{HIGH}{NO_LOW}|(?!{HIGH})\\u{HEX}{{4}}|\\u{NO_HEX})*+", re.DOTALL
)
ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def escape(text: str) -> str:
    """A text as it stands in a JSON string."""
    return to_json(text)[1:-1]


class Unescape:
    """The text of a JSON string, piece by piece. An incomplete escape waits; an invalid one is text."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> str:
        """text  more of the string; a piece does not end in a single backslash"""
        text = self._held + text
        end = WHOLE_ESCAPES.match(text).end()  # type: ignore[union-attr]  # it matches the empty text
        self._held = text[end:]
        return ESCAPE.sub(_decode_escape, text[:end])

    def flush(self) -> str:
        text, self._held = self._held, ""
        return ESCAPE.sub(_decode_escape, text)


def _decode_escape(match: re.Match[str]) -> str:
    text = match[0]
    if text[1] != "u":
        return ESCAPED.get(text[1], text[1])
    if len(text) == 12:
        return (
            (chr(int(text[2:6], 16)) + chr(int(text[8:], 16)))
            .encode("utf-16", "surrogatepass")
            .decode("utf-16")
        )
    return to_char(text[2:])


def to_char(code: str, base: int = 16) -> str:
    number = int(code, base)
    return "\ufffd" if 0xD800 <= number < 0xE000 or number > 0x10FFFF else chr(number)


@dataclass(frozen=True, slots=True)
class JsonArguments(FormatPart):
    """A JSON object by the tool's schema."""

    def grammar(self, writer: GrammarWriter) -> list[Item | ToolItems]:
        return [lambda tool: _arguments_grammar(writer, tool)]

    def read(self, reader: CallReader, closer: str) -> Wait:
        if (yield from reader.skip_space()) != "{":
            return False
        reader.start_call()
        if (yield from pass_json(reader, reader.emit)):
            reader.end_call()
        return True

    def write(self, call: WrittenCall) -> str:
        return to_json(call.arguments)


@dataclass(frozen=True, slots=True)
class JsonCall(FormatPart):
    """A JSON object with name and arguments: {"name": N, "arguments": A}.

    The parser takes the keys in any order and skips others; templates write name, arguments, id, or with
    `id_first` id, name, arguments.
    """

    name_key: str = "name"
    arguments_key: str = "arguments"
    id_key: str | None = None  # None: there is no id
    id_pattern: str = ""  # regular expression of the id
    id_first: bool = False
    id_is_local: bool = False  # unique among the answer's calls only, thus no id for the API

    @property
    def opening(self) -> str:
        """The text up to the first value, as templates write it."""
        key = self.id_key if self.id_key is not None and self.id_first else self.name_key
        return '{"' + key + '": "'

    def grammar(self, writer: GrammarWriter) -> list[Item | ToolItems]:
        comma = f"{BLANK}?,{BLANK}?"
        call_id = "" if self.id_key is None else f'{_key(self.id_key)}"({self.id_pattern})"'
        before = f"{call_id}{comma}" if call_id and self.id_first else ""
        after = f"{comma}{call_id}" if call_id and not self.id_first else ""
        return [
            Text(rf"\{{{BLANK}?{before}{_key(self.name_key)}"),
            lambda tool: [Text(literal(json.dumps(tool.name)))],
            Text(f"{comma}{_key(self.arguments_key)}"),
            lambda tool: _arguments_grammar(writer, tool),
            Text(rf"{after}{BLANK}?\}}"),
        ]

    def read(self, reader: CallReader, closer: str) -> Wait:
        return (yield from _JsonCallReader(self, reader).read())

    def write(self, call: WrittenCall) -> str:
        given = {self.name_key: call.name, self.arguments_key: call.arguments}
        call_id = str(call.index) if self.id_is_local else call.id
        ids = {} if self.id_key is None else {self.id_key: call_id}
        return to_json(ids | given if self.id_first else given | ids)


def _key(name: str) -> str:
    return f"{literal(json.dumps(name))}{BLANK}?:{BLANK}?"


def _arguments_grammar(writer: GrammarWriter, tool: ToolSchema) -> list[Item]:
    start = writer.lark_input(tool, in_json=True)
    if start is not None:
        return [Text(rf'\{{{BLANK}?{_key("input")}"'), start, Text(rf'"{BLANK}?\}}')]
    return [writer.json(tool, tool.parameters, "")]


class _JsonCallReader:
    """Reads one call as a JSON object, with its keys in any order."""

    def __init__(self, part: JsonCall, reader: CallReader) -> None:
        self._part = part
        self._reader = reader
        self._held: list[str] | None = None  # arguments that came before the name
        self._has_arguments = False
        self._is_started = False  # the call is passed on

    def read(self) -> Wait:
        """Whether it is a call. The reader stays in a call that the end of the answer cuts off."""
        reader, part = self._reader, self._part
        if not (yield from reader.read_text("{")):
            return False
        while (char := (yield from reader.skip_space())) == "," or char == '"':
            reader.position += 1
            if char == ",":
                continue
            key = yield from read_string(reader)
            if key is None or not (yield from reader.read_text(":")):
                return (yield from self._finish(is_closed=False))
            char = yield from reader.skip_space()
            if key == part.name_key and reader.tool is None and char == '"':
                if not (yield from self._read_name()):
                    return False
            elif key in (part.arguments_key, "arguments", "parameters") and not self._has_arguments:
                if not (yield from self._read_arguments()):
                    return reader.is_in_call
            elif key == part.id_key and char == '"':
                yield from self._read_id()
            elif reader.is_whole_answer and not self._is_started and key not in ("type", "id"):
                return False
            elif not (yield from _skip_value(reader)):
                break
        return (yield from self._finish(is_closed=(yield from reader.peek()) == "}"))

    def _read_name(self) -> Wait:
        reader = self._reader
        reader.position += 1
        reader.tool = reader.tools.get((yield from read_string(reader)) or "")
        if reader.tool is not None and self._held is not None:
            self._pass_call("".join(self._held))
        return reader.tool is not None

    def _read_arguments(self) -> Wait:
        reader = self._reader
        self._has_arguments = True
        if reader.tool is None:
            self._held = []
            return (yield from _read_arguments(reader, self._held.append))
        if not (yield from _read_arguments(reader, reader.emit, reader.start_call)):
            return False
        self._is_started = True
        reader.end_call()
        return True

    def _read_id(self) -> Generator[None, None, None]:
        self._reader.position += 1
        call_id = yield from read_string(self._reader)
        if call_id and not self._part.id_is_local:
            self._reader.call_id = call_id

    def _finish(self, is_closed: bool) -> Wait:
        """Read the end of the object, and braces too many. Arguments may be missing in a closed object."""
        reader = self._reader
        reader.position += is_closed
        if not self._is_started:
            if not is_closed or reader.tool is None or self._has_arguments or reader.is_whole_answer:
                return False
            self._pass_call("{}")
        while (yield from reader.peek()) == "}":
            reader.position += 1
        return True

    def _pass_call(self, arguments: str) -> None:
        self._is_started = True
        self._reader.start_call()
        self._reader.emit(arguments)
        self._reader.end_call()


def _read_arguments(
    reader: CallReader, emit: Callable[[str], None], start: Callable[[], None] = lambda: None
) -> Wait:
    """Read arguments: an object, one as a JSON string, or null. False if they are none or do not end.

    start  called once they are known to be arguments
    """
    char = yield from reader.peek()
    if char == "{":
        start()
        return (yield from pass_json(reader, emit))
    if char == '"':
        return (yield from _read_quoted_arguments(reader, emit, start))
    if (yield from reader.at("null")):
        reader.position += 4
        start()
        emit("{}")
        return True
    return False


def _read_quoted_arguments(
    reader: CallReader, emit: Callable[[str], None], start: Callable[[], None]
) -> Wait:
    """Read an object as a JSON string; an empty string is one without arguments."""
    reader.position += 1
    while (char := (yield from reader.peek())) == "\\":
        if not (yield from reader.at("\\n")):
            return False
        reader.position += 2
    if char == "{":
        start()
        unescape = Unescape()
        return (yield from pass_string(reader, lambda text: emit(unescape.feed(text))))
    if char == '"':
        reader.position += 1
        start()
        emit("{}")
        return True
    return False


def pass_string(reader: CallReader, emit: Callable[[str], None]) -> Wait:
    """Pass on the rest of a JSON string without its closing quote. Markers inside are text."""
    while True:
        end = JSON_STRING.match(reader.buffer, reader.position).end()  # type: ignore[union-attr]
        if end > reader.position:
            emit(reader.spell(reader.buffer[reader.position : end]))
            reader.position = end
        if reader.buffer.startswith('"', end):
            reader.position += 1
            return True
        if not (yield from reader.wait()):
            return False


def read_string(reader: CallReader) -> Generator[None, None, str | None]:
    """Read the rest of a JSON string, decoded; None if it does not end."""
    pieces: list[str] = []
    if not (yield from pass_string(reader, pieces.append)):
        return None
    unescape = Unescape()
    return unescape.feed("".join(pieces)) + unescape.flush()


def pass_json(reader: CallReader, emit: Callable[[str], None]) -> Wait:
    """Pass on a JSON object or array, as the model writes it. Whether it ends.

    A marker token ends it too; missing brackets are added then.
    """
    closers: list[str] = []
    start = reader.position
    while True:
        structure = JSON_STRUCTURE.search(reader.buffer, reader.position)
        if structure is None:
            emit(reader.buffer[start:])
            reader.position = len(reader.buffer)
            if not (yield from reader.wait()):
                return False
            start = reader.position
            continue
        char = structure[0]
        reader.position = structure.end()
        if char == '"':
            emit(reader.buffer[start : reader.position])
            if not (yield from pass_string(reader, emit)):
                return False
            start = reader.position - 1
        elif char in "{[":
            closers.append("}" if char == "{" else "]")
        elif char in "}]":
            closers.pop()
            if not closers:
                emit(reader.buffer[start : reader.position])
                return True
        else:
            reader.position -= 1
            emit(reader.buffer[start : reader.position] + "".join(reversed(closers)))
            reader.num_parse_errors += 1
            return True


def _skip_value(reader: CallReader) -> Wait:
    """Skip a JSON value."""
    char = yield from reader.skip_space()
    if not char:
        return False
    if char in "{[":
        return (yield from pass_json(reader, _ignore))
    if char == '"':
        reader.position += 1
        return (yield from pass_string(reader, _ignore))
    return bool((yield from reader.read_run(JSON_SCALAR)))


def _ignore(_: str) -> None:
    pass
