"""The schemas of a request's tools, as far as llguidance can enforce them in calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from foreword.chat_formats.call_grammar import GrammarWriter, ToolSchema
from foreword.chat_formats.tools import Tool, ToolUse
from foreword.core.structured_output import Marker
from foreword.errors import InvalidRequest
from foreword.grammar import limits
from foreword.grammar.json_schema import (
    SUPPORTED_KEYWORDS,
    UNSUPPORTED_KEYWORDS,
    GrammarError,
    SchemaConverter,
    is_pattern_known,
)
from foreword.grammar.lark import embed_lark, lark_regex

CALL_WHITESPACE: Final = r" |\n"  # whitespace between parts of JSON
LENGTHS: Final = ("minLength", "maxLength")
STRING_ALTERNATIVES: Final = ("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref")
DEFINITION_KEYWORDS: Final = ("$anchor", "$defs", "$id", "$schema", "definitions", "id")
CONSTRAINING_KEYWORDS: Final = (*SUPPORTED_KEYWORDS, *UNSUPPORTED_KEYWORDS)
NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolGrammarWriter(GrammarWriter):
    """Collects the rules of a grammar with the callable tools of one request."""

    def __init__(self, to_marker: Callable[[str], Marker], use: ToolUse) -> None:
        super().__init__(to_marker)
        self._dropped: dict[str, None] = {}
        # Each tool's converter, and the keywords that it left out.
        self._converters: dict[int, tuple[SchemaConverter, list[str]]] = {}
        callable_names = {tool.name for tool in use.callable_tools}
        self.tools = [
            self._add_tool(index, tool) for index, tool in enumerate(use.tools) if tool.name in callable_names
        ]

    @property
    def dropped(self) -> tuple[str, ...]:
        """Places and names of keywords that the grammar does not enforce."""
        return tuple(self._dropped)

    def _add_tool(self, index: int, definition: Tool) -> ToolSchema:
        tool = ToolSchema(index, definition, _parameters(definition))
        unsupported: list[str] = []
        converter = SchemaConverter(
            tool.parameters, None if tool.is_strict else unsupported, closes_objects=True
        )
        self._converters[index] = converter, unsupported
        return tool

    def lark_input(self, tool: ToolSchema, in_json: bool) -> str | None:
        grammar = tool.definition.input_grammar
        if grammar is None or grammar.constraint_type != "lark":
            return None
        try:
            start, rules = embed_lark(grammar.text, f"input_{tool.rule}", in_json)
        except GrammarError as error:
            raise InvalidRequest(f"{grammar.field}: {error}", grammar.field) from None
        for head, body in rules.items():
            self.rule(head, body)
        return start

    def json(self, tool: ToolSchema, schema: Any, path: str) -> str:
        converter, unsupported = self._converters[tool.index]
        try:
            converted = converter.convert(schema, path, CALL_WHITESPACE)
        except GrammarError as error:
            raise InvalidRequest(f"{tool.field}: {error}", tool.field) from None
        for place in unsupported:
            self.drop(tool, place)
        unsupported.clear()
        return f"%json {converted}"

    def string_terminals(self, tool: ToolSchema, schema: Mapping[str, Any], path: str) -> list[str]:
        terminals = []
        for keyword in schema:
            if keyword == "pattern" and isinstance(schema["pattern"], str):
                if is_pattern_known(schema["pattern"]):
                    terminals.append(_search_regex(schema["pattern"]))
                else:
                    self.drop(tool, f"{path}: pattern")
            elif keyword in CONSTRAINING_KEYWORDS and keyword not in (*LENGTHS, *STRING_ALTERNATIVES):
                self.drop(tool, f"{path}: {keyword}")
        low, high = (schema.get(keyword) for keyword in LENGTHS)
        if isinstance(low, int) or isinstance(high, int):
            if max(low or 0, high or 0) > limits.MAX_REPEAT:
                self.drop(tool, f"{path}: {'maxLength' if high else 'minLength'}")
            else:
                terminals.append(f"/(?s:.{{{low or 0},{'' if high is None else high}}})/")
        return terminals

    def drop(self, tool: ToolSchema, place: str) -> None:
        if tool.is_strict:
            path, _, keyword = place.rpartition(": ")
            raise InvalidRequest(
                f"{tool.field}: {keyword!r} cannot be enforced in this model's calls (at {path})",
                tool.field,
            )
        self._dropped[f"{tool.field}{place}"] = None

    def drop_others(
        self, tool: ToolSchema, schema: Mapping[str, Any], path: str, keywords: Iterable[str]
    ) -> None:
        for keyword, value in schema.items():
            is_known = keyword in keywords or keyword in DEFINITION_KEYWORDS
            is_neutral = keyword in UNSUPPORTED_KEYWORDS and value == UNSUPPORTED_KEYWORDS[keyword]
            if keyword in CONSTRAINING_KEYWORDS and not is_known and not is_neutral:
                self.drop(tool, f"{path}: {keyword}")


def _parameters(tool: Tool) -> Mapping[str, Any]:
    """The schema of a tool's arguments."""
    if not tool.is_custom:
        parameters = tool.parameters or NO_ARGUMENTS
        return parameters if "type" in parameters else {"type": "object", **parameters}
    text: dict[str, Any] = {"type": "string"}
    grammar = tool.input_grammar
    if grammar is not None and grammar.constraint_type == "regex":
        text["pattern"] = f"^(?:{grammar.text})$"
    elif grammar is not None and grammar.constraint_type != "lark":
        raise InvalidRequest(f"{grammar.field}: the input of a tool may be a regex or Lark", grammar.field)
    return {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }


def _search_regex(pattern: str) -> str:
    """A terminal for texts in which a pattern matches somewhere."""
    before = "" if pattern.startswith("^") else "(?s:.*)"
    after = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
    body = lark_regex(pattern)[1:-1]
    return f"/{before}({body}){after}/"
