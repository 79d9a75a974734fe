"""How large a text can become by the filters and methods that make much of little: an upper bound, before they are called.

Every function takes what the filter or method takes, a method its owner first, and returns characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sized
from types import MappingProxyType
from typing import Any

import jinja2

__all__ = ["FILTER_SIZES", "MAX_BITS", "METHOD_SIZES", "formatted_size"]

MAX_BITS = 16_384  # of a whole number
MAX_WIDTH = 9_999  # of a field of a format
MAX_STRIP_CHARACTERS = 1_000  # different characters that may be cut off an end
MAX_PRECISION = 300
MAX_SEARCH = 200_000_000  # comparisons of a search from behind
LINE_WIDTH, TAB_WIDTH, INDENT = 80, 8, 4  # the defaults of `center`, `expandtabs` and `indent`
NUMBERS = re.compile(r"\d+")
COMPUTED_WIDTH_PATTERNS = {"%": re.compile(r"%(\([^)]*\))?[^%a-zA-Z]*\*"), "{": re.compile(r"\{[^{}]*:[^{}]*\{")}


def formatted_size(pattern: str | bytes, size: int, marker: str) -> int:
    """Of a pattern whose fields begin with `sign`, "%" or "{", filled in with values of `size` characters in all."""
    text = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
    text = text.replace("{{", "").replace("}}", "") if marker == "{" else text.replace("%%", "")
    widths = [int(number[:9]) for number in NUMBERS.findall(text)]
    if max(widths, default=0) > MAX_WIDTH or COMPUTED_WIDTH_PATTERNS[marker].search(text):
        raise jinja2.TemplateRuntimeError("it writes values in fields that are too wide")
    return len(text) + text.count(marker) * size + sum(widths)


def _length(value: object) -> int:
    return len(value) if isinstance(value, Sized) else 1


def _padded_size(text: object, width: int = LINE_WIDTH, *_: Any) -> int:
    return _length(text) + width


def _expandtabs_size(text: str | bytes, tabsize: int = TAB_WIDTH) -> int:
    return len(text) * tabsize


def _replaced_size(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> int:
    text, old = (text, old) if isinstance(text, bytes) else (str(text), str(old))
    return len(text) + int(text.count(old)) * _length(new)


def _str_join_size(separator: Any, values: Any) -> int:
    """Beside the values, which were measured."""
    return _length(separator) * _length(values)


def _join_filter_size(values: Any, d: Any = "", *_: Any, **__: Any) -> int:
    return _str_join_size(d, values)


def _translated_size(text: str | bytes, table: Any, *_: Any, **__: Any) -> int:
    longest = max((_length(value) for value in table.values()), default=1) if isinstance(table, Mapping) else 1
    return len(text) * longest


def _check_strip(text: Any, chars: Any = None) -> int:
    if _length(chars) > MAX_STRIP_CHARACTERS:
        raise jinja2.TemplateRuntimeError(f"it cuts off more than {MAX_STRIP_CHARACTERS} different characters")
    return 0


def _check_search(text: Any, part: Any = None, *_: Any, **__: Any) -> int:
    if len(text) * _length(part) > MAX_SEARCH:
        raise jinja2.TemplateRuntimeError("it searches a long text from behind")
    return 0


def _to_bytes_size(_: Any, length: int = 1, *__: Any, **___: Any) -> int:
    return length


def _indented_size(text: Any, width: Any = INDENT, *_: Any, **__: Any) -> int:
    text = str(text)
    return len(text) + (int(text.count("\n")) + 1) * (len(width) if isinstance(width, str) else int(width))


def _json_size(
    value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
) -> int:
    """What stands between the values, which were measured: at most so much in front of each, by its depth."""
    space = (len(indent) if isinstance(indent, str) else int(indent)) if indent else 0
    between = sum(map(_length, separators)) if separators else 0
    size, waiting = 0, [(value, 1)] if space or between else []
    while waiting:
        one, depth = waiting.pop()
        size += between + 2 * depth * space
        if isinstance(one, Mapping | list | tuple):
            waiting += [(part, depth + 1) for part in (one.values() if isinstance(one, Mapping) else one)]
    return size


def _format_filter_size(pattern: Any, *args: Any, **kwargs: Any) -> int:
    return formatted_size(str(pattern), len(str(args)) + len(str(kwargs)), "%")


def _no_growth(*_: Any, **__: Any) -> int:
    """Looks at each item, all of which were measured."""
    return 0


def _batches_size(_: Any, count: int, *__: Any) -> int:
    return 16 * count


def _check_round(_: Any, precision: int = 0, *__: Any) -> int:
    if abs(precision) > MAX_PRECISION:
        raise jinja2.TemplateRuntimeError(f"it rounds to more than {MAX_PRECISION} digits")
    return 0


def _check_sum(_: Any, attribute: Any = None, start: Any = 0) -> int:
    if not isinstance(start, int | float):
        raise jinja2.TemplateRuntimeError("it adds up what are no numbers")
    return 0


METHOD_SIZES: Mapping[str, Callable[..., int]] = MappingProxyType(
    {
        **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded_size),
        **dict.fromkeys(("count", "index"), _no_growth),
        **dict.fromkeys(("lstrip", "rstrip", "strip"), _check_strip),
        **dict.fromkeys(("rfind", "rindex", "rpartition", "rsplit"), _check_search),
        "expandtabs": _expandtabs_size,
        "join": _str_join_size,
        "replace": _replaced_size,
        "to_bytes": _to_bytes_size,
        "translate": _translated_size,
    }
)
FILTER_SIZES: Mapping[str, Callable[..., int]] = MappingProxyType(
    {
        "batch": _batches_size,
        "center": _padded_size,
        "format": _format_filter_size,
        "indent": _indented_size,
        "join": _join_filter_size,
        "replace": _replaced_size,
        "round": _check_round,
        "slice": _batches_size,
        "sum": _check_sum,
        "tojson": _json_size,
        "trim": _check_strip,
    }
)
