"""JSON as a caller wrote it: read strictly, measured before anything works on it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from foreword.grammar import limits

__all__ = ["GrammarError", "nesting_depth", "read_json"]

STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.?)*(?:"|\Z)|[\[\]{}]', re.DOTALL)  # linear, also where a text has no end


class GrammarError(ValueError):
    """Why a constraint cannot be used; `compile.grammar_text` names the field."""


def read_json(text: str, what: str) -> Any:
    """The value of a JSON text. Raises GrammarError for what is no JSON, or too deep."""
    if nesting_depth(match[0] for match in STRING_OR_BRACKET.finditer(text)) > limits.MAX_NESTING:
        raise GrammarError(f"{what} is nested deeper than {limits.MAX_NESTING} levels")
    try:
        return json.loads(text, parse_float=_parse_finite, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{what} is not JSON: {error}") from None


def nesting_depth(tokens: Iterator[str]) -> int:
    """How deep brackets stand within brackets; other signs do not count."""
    depth = deepest = 0
    for sign in tokens:
        if sign in ("(", "[", "{"):
            depth += 1
            deepest = max(deepest, depth)
        elif sign in (")", "]", "}"):
            depth -= 1
    return deepest


def _parse_finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text:.40} is too large")
    return value


def _reject_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON value")
