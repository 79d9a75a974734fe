"""Derives a format from what a chat template writes: a turn with one call, and one with two.

Three kinds are told apart: a call that is a JSON object, a name between markers with JSON arguments, and one
element per argument. What stands around a call, and what repeats between two, are the markers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from foreword.chat_formats.chat_format import ToolFormat
from foreword.chat_formats.parts.json import JsonArguments, JsonCall
from foreword.chat_formats.parts.part import SPACE, Name, Part
from foreword.chat_formats.parts.tagged import TaggedArguments

MARKER: Final = r"<[^<>\s]*>|\[/?[A-Z_]+\]"
PART: Final = re.compile(rf"({MARKER}|\s+)")
DECODER: Final = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class _Core:
    """A call in a turn: text[start:end] is written by `parts`."""

    start: int
    end: int
    parts: tuple[Part, ...]


def derive_tools(one: str, two: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> ToolFormat | None:
    """The format of calls; None if there is none.

    one, two  turns with the first call and with both; `two` may have the first alone
    calls     names and arguments of the two calls: two texts each, which occur nowhere else
    """
    core = _find_core(one, 0, *calls[0])
    if core is None:
        return None
    before, after = one[: core.start], one[core.end :]
    first = _find_core(two, 0, *calls[0])
    second = None if first is None else _find_core(two, first.end, *calls[1])
    if first is None or second is None:
        return _tool_format("", before, core, after, "", None)
    between = two[first.end : second.start]
    if "".join(between.split()) == "".join((after + before).split()):
        return _tool_format("", before, core, after, "", None)
    call_end = _common_start(between, after)
    call_begin = _common_end(between[len(call_end) :], before)
    separator = between[len(call_end) : len(between) - len(call_begin)]
    return _tool_format(
        before[: len(before) - len(call_begin)], call_begin, core, call_end, after[len(call_end) :], separator
    )


def _tool_format(
    begin: str, call_begin: str, core: _Core, call_end: str, end: str, separator: str | None
) -> ToolFormat:
    opener = to_parts((begin + call_begin).lstrip())
    return ToolFormat(
        call=(
            *to_parts(call_begin if begin.strip() else call_begin.lstrip()),
            *core.parts,
            *to_parts(call_end),
        ),
        begin=to_parts(begin.lstrip()),
        separator=None if separator is None else to_parts(separator),
        end=to_parts(end.rstrip()),
        opens_answer=not any(isinstance(part, str) and len(part.strip()) > 1 for part in opener),
    )


def _common_start(first: str, second: str) -> str:
    """The common start of two texts, without the start of a marker."""
    return re.sub(r"<[^<>]*$", "", first[: num_common(first, second)])


def _common_end(first: str, second: str) -> str:
    """The common end of two texts, without the end of a marker."""
    number = num_common(first[::-1], second[::-1])
    return re.sub(r"^[^<>]*>", "", first[len(first) - number :])


def num_common(first: str, second: str) -> int:
    """The number of characters with which both texts begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def to_parts(text: str) -> tuple[Part, ...]:
    """A text as parts: markers, whitespace, and texts between them."""
    return tuple(filter(None, PART.split(text)))


def _find_core(turn: str, start: int, name: str, arguments: Mapping[str, Any]) -> _Core | None:
    """The call at or after `start`."""
    position = turn.find("{", start)
    while position >= 0:
        try:
            value, end = DECODER.raw_decode(turn, position)
        except ValueError:
            value, end = None, position
        if value == {name: arguments}:
            return _Core(position, end, ('{"', Name(), '":', SPACE, JsonArguments(), SPACE, "}"))
        if value == arguments:
            return _with_name(turn, start, name, _Core(position, end, (JsonArguments(),)))
        if isinstance(value, dict) and (core := _json_call(value, name, arguments)) is not None:
            return _Core(position, end, (core,))
        position = turn.find("{", max(end, position + 1))
    return _tagged_call(turn, start, name, arguments)


def _json_call(value: Mapping[str, Any], name: str, arguments: Mapping[str, Any]) -> JsonCall | None:
    name_keys = [key for key, item in value.items() if item == name]
    argument_keys = [key for key, item in value.items() if item == arguments]
    others = [key for key, item in value.items() if "id" in key and isinstance(item, str) and item != name]
    if not name_keys or not argument_keys:
        return None
    id_key = others[0] if others else None
    return JsonCall(
        name_keys[0], argument_keys[0], id_key, ".*" if id_key else "", next(iter(value)) == id_key
    )


def _with_name(turn: str, start: int, name: str, arguments: _Core) -> _Core | None:
    position = turn.find(name, start, arguments.start)
    if position < 0:
        return None
    between = to_parts(turn[position + len(name) : arguments.start])
    return _Core(position, arguments.end, (Name(), *between, *arguments.parts))


def _tagged_call(turn: str, start: int, name: str, arguments: Mapping[str, Any]) -> _Core | None:
    """A name, and one element for each of two arguments."""
    places: list[tuple[int, int]] = []
    position = start
    for text in (name, *(str(text) for item in arguments.items() for text in item)):
        found = turn.find(text, position)
        if found < 0:
            return None
        position = found + len(text)
        places.append((found, position))
    gaps = [turn[end:begin] for (_, end), (begin, _) in pairwise(places)]
    after_name, key_end, between_items = gaps[0], gaps[1], gaps[2]
    key_begin = _common_end(after_name, between_items)
    value_end = between_items[: len(between_items) - len(key_begin)]
    key_begin_text = key_begin.lstrip()
    # Whitespace that opens an element belongs between elements.
    between = key_begin[: len(key_begin) - len(key_begin_text)] + value_end[len(value_end.rstrip()) :]
    closer = value_end.rstrip()
    padding = "\n" if key_end.endswith("\n") and closer.startswith("\n") else ""
    tail = turn[places[-1][1] :]
    if not key_begin_text or not closer.strip() or not tail.startswith(closer):
        return None
    tagged = TaggedArguments(
        key_begin_text,
        key_end.removesuffix(padding),
        closer.removeprefix(padding),
        padding=padding,
        between=between,
    )
    header = after_name[: len(after_name) - len(key_begin)]
    end = places[-1][1] + len(closer + between if tail.startswith(closer + between) else closer)
    return _Core(places[0][0], end, (Name(), *to_parts(header), between, tagged))


def find_markers(turn: str, text: str) -> tuple[str, str, str] | None:
    """The markers before and after a text, and the whitespace between; None if it has none on a side."""
    before, found, after = turn.partition(text)
    begin = re.search(rf"({MARKER})(\s*)$", before)
    end = re.match(rf"\s*({MARKER})", after)
    return (begin[1], end[1], begin[2]) if found and begin is not None and end is not None else None
