"""Converts a checkpoint's `response_template`, as transformers reads it, to a record.

It is the `response_template` of tokenizer_config.json: for each field of a message the literal or the pattern
that opens and closes it, and how its text is parsed. Only what a record can express is converted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from foreword.chat_formats.chat_format import ChatFormat, ReasoningFormat, ToolFormat
from foreword.chat_formats.parts.json import JsonArguments, JsonCall
from foreword.chat_formats.parts.keywords import BareArguments
from foreword.chat_formats.parts.part import SPACE, Header, Name, Part
from foreword.chat_formats.parts.tagged import TaggedArguments

NAME_GROUP: Final = re.compile(r"\(\?P<name>[^()]*\)")
KEY_GROUP: Final = re.compile(r"\(\?P<key>[^()]*\)")
VALUE_GROUP: Final = re.compile(r"\(\?P<value>[^()]*\)")
PLACEHOLDER: Final = re.compile(r"\{(?:content\.)?(\w+)\}")


def from_response_template(template: Mapping[str, Any]) -> ChatFormat | None:
    """The record; None if the template has no calls, or a form that no record has."""
    fields = template.get("fields")
    if not isinstance(fields, Mapping) or not isinstance(fields.get("tool_calls"), Mapping):
        return None
    try:
        tools = _read_tools(fields["tool_calls"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    if tools is None:
        return None
    thinking: Any = next((fields[name] for name in ("thinking", "reasoning_content") if name in fields), {})
    begin, end = _literal(thinking, "open"), _literal(thinking, "close")
    reasoning = ReasoningFormat(begin, end) if begin and end else None
    content = fields.get("content", {})
    begin, end = _literal(content, "open"), _literal(content, "close")
    return ChatFormat(
        "response_template", tools, reasoning=reasoning, content=(begin, end) if begin and end else None
    )


def _literal(field: Any, key: str) -> str | None:
    """A literal without whitespace around it, the first of several; None for a pattern, or without one."""
    value = field.get(key) if isinstance(field, Mapping) else None
    value = value[0] if isinstance(value, list) and value else value
    return value.strip() if isinstance(value, str) and value.strip() else None


def _read_tools(field: Mapping[str, Any]) -> ToolFormat | None:
    close, transform = _literal(field, "close"), field["transform"]
    function = transform.get("function", transform)
    options = field.get("content_args", {})
    if close is None:
        return None
    if (opener := _literal(field, "open")) is not None:
        call = JsonCall() if function == "{content}" else _json_call(function)
        if field.get("content") != "json" or options or call is None:
            return None
        if field.get("transform_each"):
            return ToolFormat((call,), (opener, SPACE, "["), (",", SPACE), (SPACE, "]", SPACE, close))
        return ToolFormat((opener, SPACE, call, SPACE, close))
    if function != {"name": "{name}", "arguments": "{content}"}:
        return None
    before, after = NAME_GROUP.split(field["open_pattern"])
    opening = (*_parts(before), Name(), *_parts(after))
    if not isinstance(opening[0], str) or not opening[0].strip():
        return None  # no marker tells a call from content
    if field.get("content") == "json":
        if options.get("unquoted_keys"):
            ((quote, _),) = options["string_delims"]
            return ToolFormat((*opening, "{", BareArguments(quote), "}", close))
        return None if options else ToolFormat((*opening, SPACE, JsonArguments(), SPACE, close))
    if field.get("content") == "xml-inline":
        arguments, inner_close = _tagged(options["tag_pattern"]), _inner_close(opening)
        return ToolFormat((*opening, SPACE, arguments, *inner_close, close))
    return None


def _json_call(function: Mapping[str, Any]) -> JsonCall | None:
    name, arguments = (PLACEHOLDER.fullmatch(function[key]) for key in ("name", "arguments"))
    return None if name is None or arguments is None else JsonCall(name[1], arguments[1])


def _tagged(pattern: str) -> TaggedArguments:
    key_begin, rest = KEY_GROUP.split(pattern)
    key_end, value_end = VALUE_GROUP.split(rest)
    padding = "\n" if r"\s*" in key_end and r"\s*" in value_end else ""
    begin, middle, end = (_unescape(text.replace(r"\s*", "")) for text in (key_begin, key_end, value_end))
    return TaggedArguments(begin, middle, end, padding=padding)


def _inner_close(opening: tuple[Part, ...]) -> tuple[Part, ...]:
    """The closer of an element `<function=NAME>` inside of the call's markers, which patterns leave out."""
    element = [
        part for part in opening if isinstance(part, str) and part.startswith("<") and part.endswith("=")
    ]
    return (f"</{element[-1][1:-1]}>", SPACE) if element else ()


def _parts(pattern: str) -> list[Part]:
    r"""A pattern of literals, `\s*` and `.*?` as parts. Raises ValueError for another."""
    parts: list[Part] = []
    for piece in re.split(r"(\\s\*|\.\*\?)", pattern):
        if piece == r"\s*":
            parts.append(SPACE)
        elif piece == ".*?":
            parts.append(Header(" json"))
        elif piece:
            parts.append(_unescape(piece))
    return parts


def _unescape(pattern: str) -> str:
    text = re.sub(r"\\(\W)", r"\1", pattern)
    if re.search(r"(?<!\\)[*+?(){}\[\]^$|]", pattern):
        raise ValueError(f"{pattern!r} is no literal")
    return text
