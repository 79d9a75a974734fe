"""Values of arguments: the texts that models write, as JSON by the tool's schema."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import unquote

# A JSON string up to its quote; a backslash at the end of the text stays out.
JSON_STRING: Final = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)
ANY_TYPES: Final = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
MAX_HEAD_CHARS: Final = 160  # of a custom tool's arguments before its input
MAX_LITERAL_CHARS: Final = 64  # of a number, true, false or null
MAX_SCHEMA_DEPTH: Final = 16  # of references and alternatives
MAX_INDEX_DIGITS: Final = 6  # of a list index in a reference

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
PYTHON_ESCAPED: Final = {**ESCAPED, "a": "\a", "v": "\v", "\\": "\\", "'": "'", '"': '"', "\n": ""}
INPUT_BEGIN: Final = re.compile(r'\s{0,33}\{\s{0,33}"input"\s{0,33}:\s{0,33}"')
JSON_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
LITERALS: Final = {"True": "true", "False": "false", "None": "null"} | {
    word: word for word in ("true", "false", "null")
}
# By the first character of a JSON text: its type.
FIRST_TYPES: Final = {
    **dict.fromkeys("-0123456789", "number"),
    **dict.fromkeys("tf", "boolean"),
    "n": "null",
    "{": "object",
    "[": "array",
}


def escape(text: str) -> str:
    """A text as it stands in a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class SchemaTypes:
    """JSON types that the parts of a tool's schema allow, as far as it tells. Each part is read once.

    A part inside of itself, or behind MAX_SCHEMA_DEPTH references and alternatives, allows any type.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._types: dict[int, frozenset[str]] = {}  # by id() of the part, which the root keeps
        properties = root.get("properties")
        # All of them now and in this order: the types do not depend on who asks for which first.
        self.arguments: dict[str | None, frozenset[str]] = {
            None: self.of(root.get("additionalProperties")),
            **{key: self.of(schema) for key, schema in _mapping(properties).items()},
        }

    @property
    def num_parts(self) -> int:
        """Parts that were read."""
        return len(self._types)

    def of(self, schema: Any, depth: int = MAX_SCHEMA_DEPTH) -> frozenset[str]:
        """The types of a part of the schema."""
        if not isinstance(schema, Mapping) or not depth:
            return ANY_TYPES
        if id(schema) not in self._types:
            self._types[id(schema)] = ANY_TYPES  # for references to the part from inside of it
            self._types[id(schema)] = self._read(schema, depth - 1)
        return self._types[id(schema)]

    def _read(self, schema: Mapping[str, Any], depth: int) -> frozenset[str]:
        types = ANY_TYPES
        names = schema.get("type")
        if isinstance(names, str | list):
            named = {names} if isinstance(names, str) else {name for name in names if isinstance(name, str)}
            types &= named | ({"integer"} if "number" in named else set())
        if isinstance(schema.get("enum"), list):
            types &= {_type_of(value) for value in schema["enum"]}
        if "const" in schema:
            types &= {_type_of(schema["const"])}
        for keyword in ("anyOf", "oneOf"):
            if isinstance(schema.get(keyword), list):
                types &= frozenset().union(*(self.of(option, depth) for option in schema[keyword]))
        for option in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            types &= self.of(option, depth)
        if isinstance(schema.get("$ref"), str):
            types &= self.of(resolve_reference(schema["$ref"], self._root), depth)
        return types or ANY_TYPES


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def resolve_reference(reference: str, root: Mapping[str, Any]) -> Any:
    """The part of a schema that "#/..." names; None if there is none. Anchors are the root."""
    value: Any = root if reference[:1] == "#" else None
    for step in reference[1:].split("/")[1:]:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(value, list):
            is_index = step.isdecimal() and len(step) <= MAX_INDEX_DIGITS and int(step) < len(value)
            value = value[int(step)] if is_index else None
        else:
            value = _mapping(value).get(step)
    return value


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", type(None): "null", list: "array"}
    return names.get(type(value), "object")


def scalar_to_json(text: str, types: frozenset[str] = ANY_TYPES) -> str:
    """An unquoted value of Python's or a bare syntax. What is no number or literal is a string."""
    if types == {"string"}:
        return json.dumps(text, ensure_ascii=False)
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
    return json.dumps(text, ensure_ascii=False)


def _json_type(text: str) -> str | None:
    """The type of a JSON text, None if it is not JSON."""

    def refuse(_: str) -> None:
        raise ValueError

    try:
        # Numbers are not converted: long ones would raise.
        value = json.loads(text, parse_constant=refuse, parse_int=lambda _: 0, parse_float=lambda _: 0.5)
    except (ValueError, RecursionError):
        return None
    return _type_of(value)


class RawValue:
    """A value between tags. Strings are raw and are passed on as they come; other values are JSON.

    By the schema first, then by syntax: a text that the schema allows as a string and as another type is the
    other one if it is JSON of that type.
    """

    def __init__(self, types: frozenset[str], padding: str, emit: Callable[[str], None]) -> None:
        """
        types    JSON types that the value may have
        padding  a character that belongs to the tags where the value begins or ends with it
        emit     takes the value as JSON, piece by piece
        """
        self._others = types - {"string"}
        self._may_be_string = "string" in types
        self._padding = padding
        self._emit = emit
        self._is_first = True
        self._tail = ""  # padding at the end, if the value ends here
        self._pieces: list[str] = []  # of a value whose type is not certain yet
        self._num_chars = 0  # of the pieces
        self._max_chars = 0.0  # of them if the value is not a string
        self._is_string = False

    def feed(self, text: str) -> None:
        if not text:
            return
        if self._is_first:
            self._is_first = False
            text = text.removeprefix(self._padding)
        text = self._tail + text
        self._tail = ""
        if self._padding and text.endswith(self._padding):
            self._tail, text = self._padding, text[: -len(self._padding)]
        if self._is_string:
            self._emit(escape(text))
        elif text:
            self._pieces.append(text)
            self._num_chars += len(text)
            if self._may_be_string:
                self._decide()

    def _decide(self) -> None:
        """Pass the value on as a string once it can be nothing else."""
        if not self._max_chars:
            text = "".join(self._pieces)
            body = text.lstrip()
            if self._others and not body and len(text) <= MAX_LITERAL_CHARS:
                return
            name = FIRST_TYPES.get(body[:1], "") if len(text) - len(body) <= MAX_LITERAL_CHARS else ""
            is_possible = name in self._others or (name == "number" and "integer" in self._others)
            is_long = name in ("object", "array")
            self._max_chars = (math.inf if is_long else MAX_LITERAL_CHARS) if is_possible else -1
        if self._num_chars > self._max_chars:
            self._is_string = True
            self._emit('"' + escape("".join(self._pieces)))
            self._pieces.clear()

    def close(self) -> None:
        """The value is complete."""
        if self._is_string:
            self._emit('"')
            return
        text = "".join(self._pieces)
        stripped = text.strip()
        json_type = _json_type(stripped)
        if json_type is not None and (json_type in self._others or not self._may_be_string):
            self._emit(stripped)
        elif not self._may_be_string and stripped in LITERALS:
            self._emit(LITERALS[stripped])
        elif not self._may_be_string and not stripped and "null" in self._others:
            self._emit("null")
        else:
            self._emit(json.dumps(text, ensure_ascii=False))


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
    return _to_char(text[2:])


def _to_char(code: str, base: int = 16) -> str:
    number = int(code, base)
    return "\ufffd" if 0xD800 <= number < 0xE000 or number > 0x10FFFF else chr(number)


def decode_python_escape(text: str) -> str:
    """The text of an escape sequence in a Python string; an invalid one is text."""
    if text[1:2] in "01234567" and len(text) > 1:
        return _to_char(text[1:], 8)
    if text[1:2] in ("x", "u", "U") and len(text) > 2:
        return _to_char(text[2:])
    return PYTHON_ESCAPED.get(text[1:], text)


class CustomInput:
    """The input of a custom tool, out of its arguments: {"input": "..."}. Other arguments are the input."""

    def __init__(self) -> None:
        self._head = ""
        self._unescape: Unescape | None = None
        self._is_closed = False

    def feed(self, text: str) -> str:
        """text  more of the arguments, cut anywhere but between a backslash and what it escapes"""
        if self._unescape is None:
            if len(self._head) > MAX_HEAD_CHARS:
                return text
            self._head += text
            begin = INPUT_BEGIN.match(self._head)
            if begin is None:
                return self._head if len(self._head) > MAX_HEAD_CHARS else ""
            text, self._unescape = self._head[begin.end() :], Unescape()
        if self._is_closed:
            return ""
        end = JSON_STRING.match(text).end()  # type: ignore[union-attr]  # it matches the empty text
        piece = self._unescape.feed(text[:end])
        if end < len(text):
            self._is_closed = True
            piece += self._unescape.flush()
        return piece

    def flush(self) -> str:
        """What is left at the end of the arguments."""
        is_other = self._unescape is None and len(self._head) <= MAX_HEAD_CHARS and self._head != "{}"
        return self._head if is_other else ""
