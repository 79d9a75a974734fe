"""Converts structural tags (vLLM, XGrammar) to Lark: free text with constrained parts.

Two forms: {"structures": [{"begin", "schema", "end"}], "triggers": [...]} and {"format": {"type": ...}}.
A lazy terminal matches free text up to the first trigger.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from foreword.errors import shown
from foreword.grammar import limits
from foreword.grammar.gbnf import gbnf_to_lark
from foreword.grammar.json_schema import GrammarError, convert_schema, is_text_list, read_json
from foreword.grammar.lark import lark_literal, lark_regex

ANY_TEXT: Final = "/(?s:.*)/"
# Fields of each format, besides `type`. Other fields are errors, because they would change the language.
FORMAT_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
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
    """Lark rules with the start rule `start`. Raises GrammarError for malformed or unsupported tags."""
    value = read_json(text, "the structural tag")
    if not isinstance(value, dict):
        raise GrammarError("a structural tag must be an object")
    return _Writer(whitespace).write(value["format"] if "format" in value else _upgrade_format(value))


def _upgrade_format(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Converts the first form to the second."""
    tags = []
    for tag in _read_objects(value, "structures"):
        schema = tag.get("schema")
        schema = read_json(schema, "the schema") if isinstance(schema, str) else schema
        content = {"type": "json_schema", "json_schema": schema}
        tags.append({"begin": tag.get("begin"), "content": content, "end": tag.get("end")})
    return {"type": "triggered_tags", "triggers": value.get("triggers"), "tags": tags}


class _Writer:
    """Writes one rule per part."""

    def __init__(self, whitespace: bool) -> None:
        self._whitespace = whitespace
        self._lines: list[str] = []
        self._num_rules = 0
        self._format_writers: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
            "any_text": lambda part: self._add_rule(self._text_terminal(part)),
            "const_string": lambda part: self._add_rule(lark_literal(_read_text(part, "value"))),
            "grammar": self._write_grammar,
            "json_schema": self._write_schema,
            "optional": lambda part: self._write_repeated(part, "?"),
            "or": self._write_or,
            "plus": lambda part: self._write_repeated(part, "+"),
            "regex": lambda part: self._add_rule(lark_regex(_read_text(part, "pattern"))),
            "repeat": self._write_repeat,
            "sequence": self._write_sequence,
            "star": lambda part: self._write_repeated(part, "*"),
            "tag": self._write_tag,
            "tags_with_separator": self._write_separated_tags,
            "triggered_tags": self._write_triggered_tags,
        }

    def write(self, part: Mapping[str, Any]) -> str:
        start = self._write_part(part)
        return "\n".join([f"start: {start}", *self._lines]) + "\n"

    def _write_part(self, part: Any) -> str:
        """Writes the rules of a part; returns its name."""
        if not isinstance(part, dict):
            raise GrammarError(f"a format must be an object, got {json.dumps(part):.80}")
        return self._format_writers[_check_format(part)](part)

    def _add_rule(self, body: str, lazy: bool = False) -> str:
        self._num_rules += 1
        if self._num_rules > limits.MAX_PROPERTIES:
            raise GrammarError(f"a structural tag may have at most {limits.MAX_PROPERTIES} parts")
        name = f"part_{self._num_rules}"
        self._lines.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _write_schema(self, part: Mapping[str, Any]) -> str:
        if part.get("style", "json") != "json":
            raise GrammarError(f"the style {json.dumps(part['style']):.80} of a json_schema is not supported")
        return self._add_rule(f"%json {convert_schema(part.get('json_schema'), self._whitespace)}")

    def _write_grammar(self, part: Mapping[str, Any]) -> str:
        name = self._add_rule(f"root_{self._num_rules + 1}")
        self._lines.append(gbnf_to_lark(_read_text(part, "grammar"), name.replace("part", "root")))
        return name

    def _write_or(self, part: Mapping[str, Any]) -> str:
        return self._add_rule(" | ".join(map(self._write_part, _read_objects(part, "elements"))))

    def _write_repeated(self, part: Mapping[str, Any], quantifier: str) -> str:
        return self._add_rule(f"({self._write_part(part.get('content'))}){quantifier}")

    def _write_repeat(self, part: Mapping[str, Any]) -> str:
        low, high = part.get("min"), part.get("max")
        if type(low) is not int or type(high) is not int or not 0 <= low <= high <= limits.MAX_REPEAT:
            raise GrammarError(f"`min` and `max` must be integers: 0 <= min <= max <= {limits.MAX_REPEAT}")
        return self._write_repeated(part, f"{{{low},{high}}}")

    def _write_sequence(self, part: Mapping[str, Any]) -> str:
        """Free text is greedy, so inside a sequence it ends at the constant text after it."""
        elements = _read_objects(part, "elements")
        names: list[str] = []
        for index, element in enumerate(elements):
            last = index + 1 == len(elements)
            if element.get("type") == "triggered_tags" and not last:
                raise GrammarError("triggered_tags must be the last element of a sequence")
            if element.get("type") == "any_text" and not last:
                names.append(self._write_text_until(element, [_opening_text(elements[index + 1])]))
            elif index and elements[index - 1].get("type") == "any_text":
                if element["type"] == "tag":  # its opening text is part of the free text before
                    names.append(self._write_tag(element, skip_chars=len(_opening_text(element))))
            else:
                names.append(self._write_part(element))
        return self._add_rule(" ".join(names))

    def _write_tag(self, part: Mapping[str, Any], skip_chars: int = 0) -> str:
        """begin content end, without the first `skip_chars` characters."""
        _check_format({"type": "tag", **part})
        begin = _read_text(part, "begin")[skip_chars:]
        content, ends = part.get("content"), _closing_texts(part)
        head = lark_literal(begin) if begin else ""
        if isinstance(content, dict) and content.get("type") == "any_text" and ends:
            return self._add_rule(f"{head} {self._write_text_until(content, ends)}")
        tail = f"({' | '.join(map(lark_literal, ends))})" if ends else ""
        return self._add_rule(f"{head} {self._write_part(content)} {tail}")

    def _write_text_until(self, part: Mapping[str, Any], ends: Sequence[str]) -> str:
        """Free text up to and including the first of `ends`."""
        end = " | ".join(map(lark_literal, ends))
        return self._add_rule(f"{self._text_terminal(part)} ({end})", lazy=True)

    def _text_terminal(self, part: Mapping[str, Any]) -> str:
        """A terminal for any text that contains none of `excludes`."""
        if not part.get("excludes"):
            return ANY_TEXT
        name = f"TEXT_{len(self._lines)}"
        without = [f"~({ANY_TEXT} {lark_literal(text)} {ANY_TEXT})" for text in _read_texts(part, "excludes")]
        self._lines.append(f"{name}: {' & '.join([ANY_TEXT, *without])}")
        return name

    def _write_triggered_tags(self, part: Mapping[str, Any]) -> str:
        """Free text, with a tag after each trigger."""
        triggers, tags = _read_texts(part, "triggers"), _read_tags(part)
        calls = " | ".join(self._write_tags_after(part, trigger, tags) for trigger in triggers)
        if part.get("stop_after_first"):
            if part.get("at_least_one"):
                return self._add_rule(f"({calls})")
            return self._add_rule(f"({calls}) | {self._add_rule(self._text_terminal(part))}")
        rest = self._add_rule(self._text_terminal(part))
        return self._add_rule(f"({calls}){'+' if part.get('at_least_one') else '*'} {rest}")

    def _write_tags_after(
        self, part: Mapping[str, Any], trigger: str, tags: Sequence[Mapping[str, Any]]
    ) -> str:
        triggered = [tag for tag in tags if _read_text(tag, "begin").startswith(trigger)]
        if not triggered:
            raise GrammarError(f"no tag begins with the trigger {shown(trigger)}")
        text = self._write_text_until(part, [trigger])
        return f"{text} ({' | '.join(self._write_tag(tag, len(trigger)) for tag in triggered)})"

    def _write_separated_tags(self, part: Mapping[str, Any]) -> str:
        """Tags with a separator between them."""
        tag = self._add_rule(" | ".join(self._write_tag(tag) for tag in _read_tags(part)))
        separator = part.get("separator", "")
        between = f"{lark_literal(separator)} " if isinstance(separator, str) and separator else ""
        several = tag if part.get("stop_after_first") else f"{tag} ({between}{tag})*"
        return self._add_rule(several if part.get("at_least_one") else f"({several})?")


def _check_format(part: Mapping[str, Any]) -> str:
    """The type of a format. Raises GrammarError for unknown types and fields."""
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in FORMAT_FIELDS:
        supported = ", ".join(FORMAT_FIELDS)
        raise GrammarError(f"the format {json.dumps(kind):.80} is not supported; supported: {supported}")
    for name, value in part.items():
        if name != "type" and name not in FORMAT_FIELDS[kind] and value not in (None, False, []):
            raise GrammarError(f"the field {shown(name)} of the format {shown(kind)} is not supported")
    return kind


def _opening_text(part: Mapping[str, Any]) -> str:
    """The constant text at the start of a part."""
    if part.get("type") == "const_string":
        return _read_text(part, "value")
    if part.get("type") == "tag":
        return _read_text(part, "begin")
    raise GrammarError("any_text must be the last element of a sequence, or precede a const_string or a tag")


def _closing_texts(tag: Mapping[str, Any]) -> list[str]:
    """Texts that close a tag; [] if it has no end."""
    end = tag.get("end", "")
    ends = [end] if isinstance(end, str) else end
    if not isinstance(ends, list) or not all(isinstance(text, str) for text in ends):
        raise GrammarError(f"the end of a tag must be a text or a list of texts, got {json.dumps(end):.80}")
    return [] if "" in ends else ends


def _read_tags(part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    tags = _read_objects(part, "tags")
    if len(tags) > limits.MAX_TAGS:
        raise GrammarError(f"a structural tag may have at most {limits.MAX_TAGS} tags, got {len(tags)}")
    return tags


def _read_objects(part: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    values = part.get(name)
    if not isinstance(values, list) or not values or not all(isinstance(value, dict) for value in values):
        raise GrammarError(f"`{name}` must be a non-empty list of objects")
    return values


def _read_texts(part: Mapping[str, Any], name: str) -> list[str]:
    values = part.get(name)
    if not is_text_list(values):
        raise GrammarError(f"`{name}` must be a list of non-empty texts")
    return list(dict.fromkeys(cast("list[str]", values)))


def _read_text(part: Mapping[str, Any], name: str) -> str:
    value = part.get(name)
    if not isinstance(value, str) or not value:
        raise GrammarError(f"`{name}` must be a non-empty text")
    return value
