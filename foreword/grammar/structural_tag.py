"""Structural tags: free text with parts that are constrained, as vLLM and XGrammar describe them.

Two forms are known: {"structures": [{"begin", "schema", "end"}], "triggers": [...]} and {"format": {"type": ...}}.
Free text ends where a trigger begins: a lazy terminal takes text up to the first trigger.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from foreword.grammar import limits
from foreword.grammar.gbnf import gbnf_to_lark
from foreword.grammar.json_schema import compiled_schema
from foreword.grammar.json_text import GrammarError, read_json
from foreword.grammar.lark import literal, pattern

__all__ = ["structural_tag_to_lark"]

ANY: Final = "/(?s:.*)/"
# What each format may hold beside its type; a field that is not known here would change what conforms.
FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "any_text": ("excludes",),
    "const_string": ("value",),
    "grammar": ("grammar",),
    "json_schema": ("json_schema", "style"),
    "optional": ("content",),
    "or": ("elements",),
    "plus": ("content",),
    "regex": ("pattern",),
    "repeat": ("content", "min", "max"),
    "sequence": ("elements",),
    "star": ("content",),
    "tag": ("begin", "content", "end"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first", "excludes"),
}


def structural_tag_to_lark(text: str, whitespace: bool) -> str:
    """Lark rules that begin with `start`. Raises GrammarError for what is malformed or not supported."""
    value = read_json(text, "the structural tag")
    if not isinstance(value, dict):
        raise GrammarError("a structural tag must be an object")
    return _Writer(whitespace).lark(value["format"] if "format" in value else _as_format(value))


def _as_format(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """The older form as the newer one."""
    tags = [
        {"begin": tag.get("begin"), "content": {"type": "json_schema", "json_schema": _schema_of(tag)}, "end": tag.get("end")}
        for tag in _objects(value, "structures")
    ]
    return {"type": "triggered_tags", "triggers": value.get("triggers"), "tags": tags}


def _schema_of(tag: Mapping[str, Any]) -> Any:
    schema = tag.get("schema")
    return read_json(schema, "the schema") if isinstance(schema, str) else schema


class _Writer:
    """Writes one rule for each part."""

    def __init__(self, whitespace: bool) -> None:
        self._whitespace = whitespace
        self._lines: list[str] = []
        self._num_rules = 0
        self._kinds: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
            "any_text": self._any_text,
            "const_string": lambda part: self._rule(literal(_text(part, "value"))),
            "grammar": self._grammar,
            "json_schema": self._schema,
            "optional": lambda part: self._times(part, "?"),
            "or": self._or,
            "plus": lambda part: self._times(part, "+"),
            "regex": lambda part: self._rule(pattern(_text(part, "pattern"))),
            "repeat": self._repeat,
            "sequence": self._sequence,
            "star": lambda part: self._times(part, "*"),
            "tag": self._tag,
            "tags_with_separator": self._separated,
            "triggered_tags": self._triggered,
        }

    def lark(self, part: Mapping[str, Any]) -> str:
        start = self._part(part)
        return "\n".join([f"start: {start}", *self._lines]) + "\n"

    def _part(self, part: Any) -> str:
        """The name of a rule for one part."""
        if not isinstance(part, dict):
            raise GrammarError(f"a format must be an object, got {json.dumps(part):.80}")
        kind = _checked_kind(part)
        return self._kinds[kind](part)

    def _rule(self, body: str, lazy: bool = False) -> str:
        self._num_rules += 1
        if self._num_rules > limits.MAX_PROPERTIES:
            raise GrammarError(f"a structural tag may have {limits.MAX_PROPERTIES} parts")
        name = f"part_{self._num_rules}"
        self._lines.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _schema(self, part: Mapping[str, Any]) -> str:
        if part.get("style", "json") != "json":
            raise GrammarError(f"the style {json.dumps(part['style']):.80} of a json_schema is not supported")
        return self._rule(f"%json {compiled_schema(part.get('json_schema'), self._whitespace)}")

    def _grammar(self, part: Mapping[str, Any]) -> str:
        name = self._rule(f"root_{self._num_rules + 1}")
        self._lines.append(gbnf_to_lark(_text(part, "grammar"), name.replace("part", "root")))
        return name

    def _or(self, part: Mapping[str, Any]) -> str:
        return self._rule(" | ".join(self._part(option) for option in _objects(part, "elements")))

    def _times(self, part: Mapping[str, Any], times: str) -> str:
        return self._rule(f"({self._part(part.get('content'))}){times}")

    def _repeat(self, part: Mapping[str, Any]) -> str:
        low, high = part.get("min"), part.get("max")
        if type(low) is not int or type(high) is not int or not 0 <= low <= high <= limits.MAX_REPEAT:
            raise GrammarError(f"`min` and `max` must be whole numbers between 0 and {limits.MAX_REPEAT}, `min` the smaller one")
        return self._times(part, f"{{{low},{high}}}")

    def _any_text(self, part: Mapping[str, Any]) -> str:
        return self._rule(self._free_text(part))

    def _sequence(self, part: Mapping[str, Any]) -> str:
        """Free text takes all it can: within a sequence it reaches to the constant text behind it."""
        elements = _objects(part, "elements")
        names: list[str] = []
        for index, element in enumerate(elements):
            last = index + 1 == len(elements)
            if element.get("type") == "triggered_tags" and not last:
                raise GrammarError("triggered_tags must be the last element of a sequence")
            if element.get("type") == "any_text" and not last:
                names.append(self._until(element, [_opening(elements[index + 1])]))
            elif index and elements[index - 1].get("type") == "any_text":
                names += self._opened(element)
            else:
                names.append(self._part(element))
        return self._rule(" ".join(names))

    def _opened(self, part: Mapping[str, Any]) -> list[str]:
        """A part whose opening text was read already."""
        return [] if part["type"] == "const_string" else [self._tag(part, skip=len(_opening(part)))]

    def _tag(self, part: Mapping[str, Any], skip: int = 0) -> str:
        """begin content end, without the first `skip` characters."""
        _checked_kind({"type": "tag", **part})
        begin, content, ends = _text(part, "begin")[skip:], part.get("content"), _ends(part)
        head = literal(begin) if begin else ""
        if isinstance(content, dict) and content.get("type") == "any_text" and ends:
            return self._rule(f"{head} {self._until(content, ends)}")
        tail = f"({' | '.join(map(literal, ends))})" if ends else ""
        return self._rule(f"{head} {self._part(content)} {tail}")

    def _until(self, part: Mapping[str, Any], ends: Sequence[str]) -> str:
        """Free text up to the first of these texts, which is part of it."""
        return self._rule(f"{self._free_text(part)} ({' | '.join(map(literal, ends))})", lazy=True)

    def _free_text(self, part: Mapping[str, Any]) -> str:
        """A terminal for any text without those that are excluded."""
        if not part.get("excludes"):
            return ANY
        name = f"TEXT_{len(self._lines)}"
        without = [f"~({ANY} {literal(text)} {ANY})" for text in _texts(part, "excludes")]
        self._lines.append(f"{name}: {' & '.join([ANY, *without])}")
        return name

    def _triggered(self, part: Mapping[str, Any]) -> str:
        """Free text, and a tag wherever one of the triggers appears."""
        triggers, tags = _texts(part, "triggers"), _tags(part)
        calls = " | ".join(self._behind_trigger(part, trigger, tags) for trigger in triggers)
        rest = "" if part.get("stop_after_first") else f" {self._rule(self._free_text(part))}"
        if part.get("stop_after_first"):
            return self._rule(f"({calls})" if part.get("at_least_one") else f"({calls}) | {self._rule(self._free_text(part))}")
        return self._rule(f"({calls}){'+' if part.get('at_least_one') else '*'}{rest}")

    def _behind_trigger(self, part: Mapping[str, Any], trigger: str, tags: Sequence[Mapping[str, Any]]) -> str:
        mine = [tag for tag in tags if _text(tag, "begin").startswith(trigger)]
        if not mine:
            raise GrammarError(f"no tag begins with the trigger {trigger!r:.80}")
        return f"{self._until(part, [trigger])} ({' | '.join(self._tag(tag, skip=len(trigger)) for tag in mine)})"

    def _separated(self, part: Mapping[str, Any]) -> str:
        """Tags with a text between them, and nothing else."""
        tag = self._rule(" | ".join(self._tag(tag) for tag in _tags(part)))
        separator = part.get("separator", "")
        between = f"{literal(separator)} " if isinstance(separator, str) and separator else ""
        several = tag if part.get("stop_after_first") else f"{tag} ({between}{tag})*"
        return self._rule(several if part.get("at_least_one") else f"({several})?")


def _checked_kind(part: Mapping[str, Any]) -> str:
    """The type of a format, all of whose fields are known."""
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in FIELDS:
        raise GrammarError(f"the format {json.dumps(kind):.80} is not supported; known are {', '.join(FIELDS)}")
    for name, value in part.items():
        if name != "type" and name not in FIELDS[kind] and value not in (None, False, []):
            raise GrammarError(f"the field {name!r:.80} of the format {kind!r} is not supported")
    return kind


def _opening(part: Mapping[str, Any]) -> str:
    """The constant text that a part begins with."""
    if part.get("type") == "const_string":
        return _text(part, "value")
    if part.get("type") == "tag":
        return _text(part, "begin")
    raise GrammarError("any_text must be followed by a const_string or a tag, or be the last of its sequence")


def _ends(tag: Mapping[str, Any]) -> list[str]:
    """One of them closes the tag; an empty one closes it at once."""
    end = tag.get("end", "")
    ends = [end] if isinstance(end, str) else end
    if not isinstance(ends, list) or not all(isinstance(text, str) for text in ends):
        raise GrammarError(f"the end of a tag must be a text or a list of texts, got {json.dumps(end):.80}")
    return [] if "" in ends else ends


def _tags(part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    tags = _objects(part, "tags")
    if len(tags) > limits.MAX_TAGS:
        raise GrammarError(f"a structural tag may have {limits.MAX_TAGS} tags, got {len(tags)}")
    return tags


def _objects(part: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    values = part.get(name)
    if not isinstance(values, list) or not values or not all(isinstance(value, dict) for value in values):
        raise GrammarError(f"`{name}` must be a list of objects that is not empty")
    return values


def _texts(part: Mapping[str, Any], name: str) -> list[str]:
    values = part.get(name)
    if not isinstance(values, list) or not values or not all(isinstance(value, str) and value for value in values):
        raise GrammarError(f"`{name}` must be a list of texts that are not empty")
    return list(dict.fromkeys(values))


def _text(part: Mapping[str, Any], name: str) -> str:
    value = part.get(name)
    if not isinstance(value, str) or not value:
        raise GrammarError(f"`{name}` must be a text that is not empty")
    return value
