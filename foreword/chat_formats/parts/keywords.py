"""Keyword arguments in Python's syntax, and in one with bare keys and quotes of its own."""

from __future__ import annotations

import abc
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Self

from foreword.chat_formats.call_grammar import (
    ANY_TEXT,
    BLANK,
    KEY,
    OBJECT_KEYWORDS,
    GrammarWriter,
    Item,
    Text,
    ToolItems,
    ToolSchema,
    any_order,
    join,
    join_path,
    literal,
    read_properties,
    rule_suffix,
    text_items,
)
from foreword.chat_formats.parts.json import (
    ESCAPED,
    JSON_NUMBER,
    LITERALS,
    MAX_LITERAL_CHARS,
    Unescape,
    escape,
    pass_string,
    to_char,
    to_json,
)
from foreword.chat_formats.parts.part import FormatPart
from foreword.chat_formats.stream_reader import MARKER, CallReader, Wait, stops_of
from foreword.chat_formats.tools import ANY_TYPES, WrittenCall, resolve_reference
from foreword.errors import InvalidRequest

NUMBER: Final = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"
NUMBER_KEYWORDS: Final = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf")
OPEN_BRACE, CLOSE_BRACE, OPEN_BRACKET, CLOSE_BRACKET, COMMA = (
    rf"/{BLANK}?{sign}{BLANK}?/" for sign in (r"\{", r"\}", r"\[", r"\]", ",")
)
COLON: Final = f":{BLANK}?"
SCALAR: Final = re.compile("[^\\s,:=()\"'{}\\[\\]\ud800-\udfff]*+")

# Strings of the grammar.
PYTHON_STRING: Final = r"'([^'\\\x00-\x1f]|\\[\\'\"nrtbf]|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4})*'"
JSON_STRING: Final = r'"([^"\\\x00-\x1f]|\\["\\\/bfnrt]|\\u[0-9a-fA-F]{4})*"'
# Of the parser.
STRING_CHARS: Final = {quote: re.compile(rf"[^{quote}\\]*+") for quote in "'\""}
ESCAPE: Final = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)?", re.DOTALL)
MAX_ESCAPE_CHARS: Final = 10
PYTHON_ESCAPED: Final = {**ESCAPED, "a": "\a", "v": "\v", "\\": "\\", "'": "'", '"': '"', "\n": ""}


@dataclass(frozen=True, slots=True)
class KeywordArguments(FormatPart):
    """Keyword arguments without what stands around them, separated by commas."""

    quote: str = ""  # a quote for strings, beside those of JSON and Python

    assign: ClassVar[str]  # sign between key and value
    words: ClassVar[tuple[str, str, str]]  # true, false, null
    any_key_regex: ClassVar[str]  # a key of an object that the schema does not name
    scalar: ClassVar[re.Pattern[str]]  # characters of an unquoted value
    separators: ClassVar[str]  # skipped between keys and values
    has_positional: ClassVar[bool]  # a value without a key belongs to the next property

    @abc.abstractmethod
    def key_regex(self, key: str) -> str:
        """A key of an object."""

    @abc.abstractmethod
    def string_rule(self, writer: GrammarWriter) -> str:
        """Any string, as a part of a rule."""

    @abc.abstractmethod
    def constant_rule(self, writer: GrammarWriter, value: str) -> str:
        """One string, as a part of a rule."""

    @abc.abstractmethod
    def pass_string(self, reader: CallReader, char: str, emit: Callable[[str], None]) -> Wait:
        """Pass on a string as JSON. False if the answer ends before it does.

        char  its first character, which is next
        """

    def grammar(self, writer: GrammarWriter) -> list[Item | ToolItems]:
        return [lambda tool: _KeywordGrammar(writer, self, tool).items()]

    def read(self, reader: CallReader, closer: str) -> Wait:
        return (yield from _read_keywords(reader, self, closer))


@dataclass(frozen=True, slots=True)
class PythonArguments(KeywordArguments):
    """Keyword arguments without their parentheses: a='x', b=2, c=[True, None]."""

    assign: ClassVar = "="
    words: ClassVar = ("True", "False", "None")
    any_key_regex: ClassVar = f"({PYTHON_STRING}|{JSON_STRING})"
    scalar: ClassVar = SCALAR
    separators: ClassVar = ",:="
    has_positional: ClassVar = True

    def key_regex(self, key: str) -> str:
        return f"({literal(repr(key))}|{literal(json.dumps(key))})"

    def string_rule(self, writer: GrammarWriter) -> str:
        return f"/{PYTHON_STRING}|{JSON_STRING}/"

    def constant_rule(self, writer: GrammarWriter, value: str) -> str:
        return f"/{literal(repr(value))}|{literal(to_json(value))}/"

    def pass_string(self, reader: CallReader, char: str, emit: Callable[[str], None]) -> Wait:
        """A quote inside a string counts as its end only where a value may end."""
        quote = char
        is_long = yield from reader.at(quote * 3)
        reader.position += 3 if is_long else 1
        emit('"')
        while True:
            end = STRING_CHARS[quote].match(reader.buffer, reader.position).end()  # type: ignore[union-attr]
            if end > reader.position:
                emit(escape(reader.spell(reader.buffer[reader.position : end])))
                reader.position = end
            following = yield from reader.peek()
            if not following:
                return False
            if following == "\\":
                while len(reader.buffer) - reader.position < MAX_ESCAPE_CHARS and (yield from reader.wait()):
                    pass
                sequence = ESCAPE.match(reader.buffer, reader.position)
                assert sequence is not None
                reader.position = sequence.end()
                emit(escape(reader.spell(_decode_escape(sequence[0]))))
            elif following == quote:
                if is_long:
                    is_end = yield from reader.at(quote * 3)
                else:
                    is_end = yield from reader.is_followed(1, (",", ")", "]", "}", ":"))
                reader.position += 3 if is_long and is_end else 1
                if is_end:
                    emit('"')
                    return True
                emit(escape(quote))

    def write(self, call: WrittenCall) -> str:
        return ", ".join(f"{key}={value!r}" for key, value in call.arguments.items())


@dataclass(frozen=True, slots=True)
class BareArguments(KeywordArguments):
    """key:value pairs with bare keys, without their braces; strings between `quote`:

    k:<escape>v<escape>,n:3,o:{p:[1,<escape>v<escape>]}
    """

    assign: ClassVar = ":"
    words: ClassVar = ("true", "false", "null")
    any_key_regex: ClassVar = KEY
    scalar: ClassVar = re.compile("[^,{}\\[\\]\ud800-\udfff]*+")
    separators: ClassVar = ",:='"
    has_positional: ClassVar = False

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


class _KeywordGrammar:
    """Writes the grammar of one tool's arguments."""

    def __init__(self, writer: GrammarWriter, part: KeywordArguments, tool: ToolSchema) -> None:
        self._writer = writer
        self._part = part
        self._tool = tool
        self._references: dict[str, str] = {}

    def items(self) -> list[Item]:
        grammar = self._tool.definition.input_grammar
        if grammar is not None:
            raise InvalidRequest(f"{grammar.field} cannot be enforced in this model's calls", grammar.field)
        assign = self._part.assign
        properties, required, others = read_properties(self._tool.parameters)
        self._writer.drop_others(self._tool, self._tool.parameters, "", OBJECT_KEYWORDS)
        entries = {
            key: join([Text(literal(key) + assign), self._value(schema, join_path("/properties", key))])
            for key, schema in properties.items()
        }
        if others is not None:
            value = self._value(others, "/additionalProperties")
            entry = join([Text(KEY.replace(".-", "") + assign), value])
            return [f"({entry} (/,{BLANK}?/ {entry})*)?"]
        return [any_order(self._writer, self._tool, "", entries, required, ",")]

    def _value(self, schema: Any, path: str) -> str:
        """A value by a schema, as a part of a rule."""
        if not isinstance(schema, Mapping) or not schema:
            return self._any()
        reference = schema.get("$ref")
        if isinstance(reference, str):
            return self._reference(reference, path)
        if "const" in schema or isinstance(schema.get("enum"), list):
            choices = [schema["const"]] if "const" in schema else schema["enum"]
            return f"({' | '.join(map(self._constant, choices))})"
        for keyword in ("anyOf", "oneOf"):
            if isinstance(schema.get(keyword), list) and schema[keyword]:
                options = [
                    self._value(option, join_path(path, f"{keyword}/{i}"))
                    for i, option in enumerate(schema[keyword])
                ]
                return f"({' | '.join(dict.fromkeys(options))})"
        types = schema.get("type", ())
        types = [types] if isinstance(types, str) else list(types)
        if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) == 1 and not types:
            return self._value(schema["allOf"][0], join_path(path, "allOf/0"))
        if not types and "properties" in schema:
            types = ["object"]
        numbers = NUMBER_KEYWORDS if {*types} <= {"integer", "number", "null", "boolean"} else ()
        handled = (*OBJECT_KEYWORDS, "items", "minItems", "maxItems", *numbers)
        self._writer.drop_others(self._tool, schema, path, handled)
        return f"({' | '.join(self._typed(name, schema, path) for name in types)})" if types else self._any()

    def _typed(self, name: str, schema: Mapping[str, Any], path: str) -> str:
        match name:
            case "string":
                return self._part.string_rule(self._writer)
            case "integer" | "number":
                bounds = {key: schema[key] for key in NUMBER_KEYWORDS if key in schema}
                return self._writer.json(self._tool, {"type": name, **bounds}, path)
            case "boolean":
                return f'("{self._part.words[0]}" | "{self._part.words[1]}")'
            case "null":
                return f'"{self._part.words[2]}"'
            case "array":
                low, high = schema.get("minItems", 0), schema.get("maxItems")
                return self._list(self._value(schema.get("items"), join_path(path, "items")), low, high)
            case "object":
                properties, required, others = read_properties(schema)
                if others is not None:
                    return self._object(self._value(others, join_path(path, "additionalProperties")))
                entries = {
                    key: join(
                        [Text(self._key(key)), self._value(value, join_path(path, f"properties/{key}"))]
                    )
                    for key, value in properties.items()
                }
                inner = any_order(self._writer, self._tool, path, entries, required, ",")
                return f"{OPEN_BRACE} {inner} {CLOSE_BRACE}"
        return self._any()

    def _reference(self, reference: str, path: str) -> str:
        target = resolve_reference(reference, self._tool.parameters) if reference[:1] == "#" else None
        if target is None:
            self._writer.drop(self._tool, f"{path}: $ref")
            return self._any()
        name = f"ref_{self._tool.rule}_{rule_suffix(reference)}"
        if reference not in self._references:
            self._references[reference] = name
            self._writer.rule(name, self._value(target, reference.removeprefix("#")))
        return name

    def _key(self, key: str) -> str:
        return self._part.key_regex(key) + COLON

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return self._part.constant_rule(self._writer, value)
        if isinstance(value, bool) or value is None:
            return f'"{self._part.words[(True, False, None).index(value)]}"'
        if isinstance(value, int | float):
            return f"/{literal(json.dumps(value))}/"
        return self._any()

    def _list(self, item: str, low: int = 0, high: int | None = None) -> str:
        if high == 0:
            return f"{OPEN_BRACKET} {CLOSE_BRACKET}"
        count = f"{{{max(low - 1, 0)},{'' if high is None else high - 1}}}"
        items = f"({item} ({COMMA} {item}){count})" + ("" if low else "?")
        return f"{OPEN_BRACKET} {items} {CLOSE_BRACKET}"

    def _any(self) -> str:
        name = "any_value"
        words = [f'"{word}"' for word in self._part.words]
        scalars = [self._part.string_rule(self._writer), f"/{NUMBER}/", *words]
        self._writer.rule(name, " | ".join([*scalars, self._list(name), self._object(name)]))
        return name

    def _object(self, value: str) -> str:
        """An object of any keys."""
        key = f"/{self._part.any_key_regex}{COLON}/"
        return f"{OPEN_BRACE} ({key} {value} ({COMMA} {key} {value})*)? {CLOSE_BRACE}"


def _read_keywords(reader: CallReader, part: KeywordArguments, closer: str) -> Wait:
    """Read arguments up to the closer, which is not read. False if they are none."""
    tool, num_arguments, is_started = reader.tool, 0, False
    assert tool is not None
    quote = part.quote
    keys = list((tool.parameters or {}).get("properties") or ())  # names of arguments by position
    while True:
        char = yield from reader.skip_space()
        is_closed = char == closer or (not char and is_started)
        if is_closed or (is_started and char and char != quote and MARKER.match(char)):
            if not is_started:
                reader.start_call()
            reader.emit("}" if num_arguments else "{}")
            reader.end_call()
            reader.num_parse_errors += bool(char) and not is_closed
            return True
        if not char:
            return False
        if char == "," and is_started:
            reader.position += 1
            continue
        key: str | None = None
        word = ""
        if quote and (char == '"' or (yield from reader.at(quote))):
            pieces: list[str] = []
            if not (yield from part.pass_string(reader, char, pieces.append)):
                return is_started
            word = Unescape().feed("".join(pieces[1:-1]))
        else:
            word = yield from reader.read_run(SCALAR)
        char = yield from reader.skip_space()
        if not char and not is_started:
            return False
        if word and char == part.assign:
            reader.position += 1
            key, word = word, ""
        elif part.has_positional and num_arguments < len(keys) and (not word or char in ",)"):
            key = str(keys[num_arguments])
        elif is_started:
            reader.num_parse_errors += 1
            reader.position += not word
            continue
        else:
            return False
        if not is_started:
            reader.start_call()
            is_started = True
        reader.emit((", " if num_arguments else "{") + to_json(key) + ": ")
        num_arguments += 1
        types = tool.argument_types(key)
        if word:
            reader.emit(_scalar_to_json(word, types))
        elif not (yield from _pass_value(reader, part, types)):
            return True


def _pass_value(reader: CallReader, part: KeywordArguments, types: frozenset[str]) -> Wait:
    """Pass on a value as JSON. False if the answer ends before it does."""
    quote = part.quote
    closers: list[str] = []
    is_first, is_value = True, False
    while char := (yield from reader.skip_space()):
        is_key = bool(closers) and closers[-1] == "}" and not is_value
        if char in ")]}" or (char == "," and not closers):
            if not closers:  # there is no value
                reader.emit("null")
                return True
            reader.position += 1
            reader.emit(("null" if is_value else "") + closers.pop())
        elif char != quote and MARKER.match(char):
            reader.num_parse_errors += 1
            reader.emit(("" if closers and not is_value else "null") + "".join(reversed(closers)))
            return True
        elif char in part.separators or (is_key and char in "([{"):
            reader.position += 1
            continue
        else:
            if closers and not is_first and not is_value:
                reader.emit(", ")
            is_first = False
            if char in "([{":
                reader.position += 1
                closers.append("}" if char == "{" else "]")
                reader.emit("{" if char == "{" else "[")
                is_first, is_value = True, False
                continue
            if char in "'\"" or (quote and (yield from reader.at(quote))):
                if not (yield from part.pass_string(reader, char, reader.emit)):
                    return False
            else:
                word = (yield from reader.read_run(SCALAR if is_key else part.scalar)).rstrip()
                reader.emit(to_json(word) if is_key else _scalar_to_json(word, types))
            if is_key:
                reader.emit(": ")
                is_value = True
                continue
        is_first = is_value = False
        if not closers:
            return True
        types = ANY_TYPES
    return False


def _scalar_to_json(text: str, types: frozenset[str] = ANY_TYPES) -> str:
    """An unquoted value of Python's or a bare syntax. What is no number or literal is a string."""
    if types == {"string"}:
        return to_json(text)
    if text in LITERALS:
        return LITERALS[text]
    if JSON_NUMBER.fullmatch(text):
        return text
    if len(text) <= MAX_LITERAL_CHARS and text[:1] in "+-.0123456789":
        for convert in (lambda: int(text, 0), lambda: float(text)):
            try:
                number = convert()
            except ValueError:
                continue
            if math.isfinite(number):
                return json.dumps(number)
    return to_json(text)


def _decode_escape(text: str) -> str:
    """The text of an escape sequence in a Python string; an invalid one is text."""
    if text[1:2] in "01234567" and len(text) > 1:
        return to_char(text[1:], 8)
    if text[1:2] in ("x", "u", "U") and len(text) > 2:
        return to_char(text[2:])
    return PYTHON_ESCAPED.get(text[1:], text)
