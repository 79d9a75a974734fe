"""JSON as text, which arrives in pieces: strings, their escapes, numbers and literals."""

from __future__ import annotations

import json
import re
from typing import Final

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


def quoted(text: str) -> str:
    """A text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def escape(text: str) -> str:
    """A text as it stands in a JSON string."""
    return quoted(text)[1:-1]


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
