"""Literals and regular expressions in llguidance's Lark dialect, checked against the limits."""

from __future__ import annotations

import json
import re
from typing import Final

from llguidance import regex_to_lark

from foreword.grammar import limits
from foreword.grammar.json_schema import GrammarError, nesting_depth

__all__ = ["check_brackets", "escape_char", "lark_literal", "lark_regex"]

LARK_STRING: Final = re.compile(r"[\t\n\r -\x7e\xa0-\U0010ffff]*")  # characters of a JSON-escaped Lark string
REPEAT: Final = re.compile(r"\{[ \t]*(\d*)[ \t]*,?[ \t]*(\d*)[ \t]*\}|~[ \t]*(\d+)(?:[ \t]*\.\.[ \t]*(\d+))?")


def lark_literal(text: str) -> str:
    """A non-empty text as a Lark terminal."""
    if LARK_STRING.fullmatch(text):
        return json.dumps(text, ensure_ascii=False)
    return f"/{''.join(map(escape_char, text))}/"


def escape_char(char: str) -> str:
    """Any character, escaped for a regular expression."""
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"


def lark_regex(text: str) -> str:
    r"""A regular expression as a Lark terminal; `\d` is 0 to 9.

    The whole text must match, so anchors around the expression are dropped.
    """
    check_brackets(text, "the expression")
    body = text.removeprefix("^")
    if body.endswith("$") and not _is_escaped(body, len(body) - 1):
        body = body[:-1]
    return f"/{regex_to_lark(body, 'd')}/"


def check_brackets(text: str, what: str) -> None:
    """Raises GrammarError for deep nesting and for long repetitions, which cost memory for each token."""
    if nesting_depth(iter(text)) > limits.MAX_NESTING:
        raise GrammarError(f"{what} is nested deeper than {limits.MAX_NESTING} levels")
    counts = (count for match in REPEAT.findall(text) for count in match if count)
    if any(len(count) > 9 or int(count) > limits.MAX_REPEAT for count in counts):
        raise GrammarError(f"{what} has a repetition of more than {limits.MAX_REPEAT}")


def _is_escaped(text: str, index: int) -> bool:
    before = text[:index]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1
