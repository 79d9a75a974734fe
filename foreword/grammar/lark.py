"""Pieces of llguidance's Lark dialect, each checked against the limits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Final

from llguidance import regex_to_lark

from foreword.grammar import limits
from foreword.grammar.json_schema import GrammarError, nesting_depth

__all__ = ["check_brackets", "escape_char", "lark_literal", "lark_regex"]

LARK_STRING: Final = re.compile(
    r"[\t\n\r -\x7e\xa0-\U0010ffff]*"
)  # what a Lark string may hold, escaped as in JSON
REPEAT: Final = re.compile(r"\{[ \t]*(\d*)[ \t]*,?[ \t]*(\d*)[ \t]*\}|~[ \t]*(\d+)(?:[ \t]*\.\.[ \t]*(\d+))?")


def lark_literal(text: str) -> str:
    """A text as a Lark terminal; not empty."""
    if LARK_STRING.fullmatch(text):
        return json.dumps(text, ensure_ascii=False)
    return f"/{''.join(map(escape_char, text))}/"


def escape_char(char: str) -> str:
    """One character within a regular expression, whatever it is."""
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"


def lark_regex(text: str) -> str:
    r"""A regular expression as a Lark terminal; `\d` is 0 to 9.

    All of a text matches, so that anchors around the expression say nothing.
    """
    check_brackets(text, "the expression")
    body = text.removeprefix("^")
    if body.endswith("$") and not _is_escaped(body, len(body) - 1):
        body = body[:-1]
    return f"/{regex_to_lark(body, 'd')}/"


def check_brackets(text: str, what: str) -> None:
    """Raises GrammarError for what is nested too deep, and for long repetitions: these cost memory with each token."""
    if nesting_depth(iter(text)) > limits.MAX_NESTING:
        raise GrammarError(f"{what} is nested deeper than {limits.MAX_NESTING} levels")
    if any(
        len(times) > 9 or int(times) > limits.MAX_REPEAT for times in _repeat_counts(REPEAT.findall(text))
    ):
        raise GrammarError(f"{what} repeats something more than {limits.MAX_REPEAT} times")


def _repeat_counts(matches: Iterable[tuple[str, ...]]) -> Iterable[str]:
    return (number for numbers in matches for number in numbers if number)


def _is_escaped(text: str, index: int) -> bool:
    before = text[:index]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1
