"""The grammar of a whole answer: reasoning, content and calls in the format of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, Final

from foreword.chat_formats.call_grammar import (
    ANY_TEXT,
    BLANK,
    SPACE_TEXT,
    SPACES,
    GrammarWriter,
    Item,
    Text,
    ToolItems,
    ToolSchema,
    evaluate,
    join,
    literal,
    space,
)
from foreword.chat_formats.chat_format import BoundFormat, ToolFormat
from foreword.chat_formats.parts.part import Name, Part
from foreword.chat_formats.tools import Tool, ToolUse
from foreword.core.structured_output import ConstraintScope, Marker, StructuredOutput
from foreword.errors import InvalidRequest, shown
from foreword.grammar import limits
from foreword.grammar.compiler import constraint_body
from foreword.grammar.json_schema import (
    SUPPORTED_KEYWORDS,
    UNSUPPORTED_KEYWORDS,
    GrammarError,
    SchemaConverter,
    is_pattern_known,
)
from foreword.grammar.lark import embed_lark, lark_regex

ANY_SPACES: Final = rf"{SPACES}{{0,16}}"
LEADING_SPACE: Final = Text(rf"(\n\n|{BLANK})?", is_space=True)  # whitespace before the first call, or JSON

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
                f"{tool.field}: {shown(keyword)} cannot be enforced in this model's calls (at {path})",
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


class AnswerGrammar:
    """Writes the grammar of one answer. Each method returns the body of a rule."""

    def __init__(self, bound: BoundFormat, use: ToolUse) -> None:
        self._bound = bound
        self._parallel = use.parallel
        self._writer = ToolGrammarWriter(bound.pieces, use)

    @property
    def dropped(self) -> tuple[str, ...]:
        """Places and names of keywords that the grammar does not enforce."""
        return self._writer.dropped

    @property
    def _calls(self) -> ToolFormat:
        assert self._bound.format.tools is not None, "the format has no calls"
        return self._bound.format.tools

    def finish(self, start: str) -> str:
        """The text of the grammar."""
        return self._writer.finish(start)

    def whole_answer(self, document: StructuredOutput | None) -> str:
        """Calls and nothing else, or a document."""
        calls = self._calls
        section = self._writer.rule("section", self._section(calls.begin + calls.call))
        body = section
        if calls.separator is None and self._parallel:
            body = f"{section} ({join([SPACE_TEXT])} {section})*"
        answer = f"{join([LEADING_SPACE])} {body}"
        return f"({answer}) | ({self.document(document)})" if document is not None else answer

    def document(self, document: StructuredOutput) -> str:
        """A text by a user's constraint, in the markers of content."""
        try:
            body = constraint_body(document)
        except GrammarError as error:
            raise InvalidRequest(f"{document.field}: {error}", document.field) from None
        if not body.startswith("%json"):
            body = self._writer.rule("DOCUMENT", body)
        begin, end = self._bound.format.content or ("", "")
        before = join([LEADING_SPACE]) if document.may_follow_space else ""
        return f"{before} {self._writer.optional(begin)} {body} {self._writer.optional(end)}"

    def after_reasoning(self, body: str, scope: ConstraintScope) -> str:
        """The body after the reasoning, which is a part of the grammar if the scope holds it."""
        body = " ".join([*map(self._writer.optional, self._bound.format.dropped), f"({body})"])
        if not scope.holds_reasoning:
            return body
        reasoning = self._reasoning(scope)
        return f"{reasoning} {body}" if scope.starts_in_reasoning else f"{reasoning}? {body}"

    def after_trigger(self, trigger: Marker, rest: Marker) -> str:
        """The text behind a trigger: the rest of its section, and free text up to the next trigger."""
        calls = self._calls
        parts = calls.begin + calls.call
        section = self._writer.rule("section", self._section(parts[1:], self._writer.pieces(rest)))
        if not self._parallel:
            return section
        if not is_token(trigger):
            return f"{section} <[*]>*"
        return f"{section} (<[^{trigger[0]}]>* <[{trigger[0]}]> {section})* <[^{trigger[0]}]>*"

    def text_with_calls(self, scope: ConstraintScope) -> str:
        """Free text, and a call wherever a text opens one."""
        if self._calls.opens_answer:
            return self.after_reasoning(self._opening_call(), scope)
        begin = (
            marker_text(scope.reasoning_begin)
            if scope.holds_reasoning and not scope.starts_in_reasoning
            else ""
        )
        body = self._text_until_calls("")
        if not begin:
            return self.after_reasoning(body, scope)
        first = self._text_until_calls(begin)
        return f"({self._reasoning(scope)} {body}) | ({first})"

    def _text_until_calls(self, excluded: str) -> str:
        """Free text, and a section behind each trigger.

        excluded  a text that does not open the answer
        """
        calls = self._calls
        parts = calls.begin + calls.call
        assert isinstance(parts[0], str)
        trigger = literal(parts[0])
        head = self._writer.lazy_rule("text_and_trigger", f"/(?s:.*){trigger}/")
        first, text = head, ANY_TEXT
        if excluded:
            start = f"/{SPACES}*{literal(excluded)}(?s:.*)/"
            text = self._writer.rule("FIRST_TEXT", f"{ANY_TEXT} & ~({start})")
            body = self._writer.rule("FIRST_TEXT_AND_TRIGGER", f"/(?s:.*){trigger}/ & ~({start})")
            first = self._writer.lazy_rule("first_text_and_trigger", body)
        section = self._writer.rule("section", self._section(parts[1:]))
        if not self._parallel:
            return f"{first} {section} | {text}"
        return f"{first} {section} ({head} {section})* {ANY_TEXT} | {text}"

    def _opening_call(self) -> str:
        """A call at the start of the answer, or any other text."""
        calls = self._calls
        items = _part_items(self._writer, calls.begin + calls.call)
        prefix = [
            item for item in takewhile(lambda item: isinstance(item, Text), items) if not callable(item)
        ]
        named: list[str] = []
        heads: list[str] = []
        for tool in self._writer.tools:
            own = evaluate(items[len(prefix) :], tool)
            name = own[: 1 + isinstance(calls.call[0], Name)]  # up to the text after it
            head = "".join(item.regex for item in (SPACE_TEXT, *prefix, *name) if isinstance(item, Text))
            heads.append(head.replace(SPACE_TEXT.regex, ANY_SPACES))  # the parser reads more
            named.append(self._writer.rule(f"opening_{tool.rule}", join([LEADING_SPACE, *prefix, *own])))
        other = self._writer.rule("OTHER_TEXT", f"{ANY_TEXT} & ~(/({'|'.join(heads)})(?s:.*)/)")
        more = self._more_calls()
        if calls.separator is None and self._parallel:
            section = self._writer.rule("section", self._section(calls.begin + calls.call))
            more += f" ({join([SPACE_TEXT])} {section})*"
        return f"(({' | '.join(named)}) {more}) | {other}"

    def _reasoning(self, scope: ConstraintScope) -> str:
        begin = [] if scope.starts_in_reasoning else self._writer.pieces(scope.reasoning_begin)
        head, *tail = scope.reasoning_end
        if isinstance(head, int):
            # Special tokens are no text: one of them would end the answer.
            text = f"<[^{_id_ranges({head, *self._bound.special_ids})}]>*"
            return self._writer.rule(
                "reasoning", join([*begin, text, *self._writer.pieces(scope.reasoning_end)])
            )
        first_end = self._writer.lazy_rule("reasoning_end", f"/(?s:.*){literal(head)}/")
        return self._writer.rule("reasoning", join([*begin, first_end, *self._writer.pieces(tuple(tail))]))

    def _section(self, parts: Sequence[Part], first: Sequence[Item] = ()) -> str:
        """One section, without the first of its texts if `parts` lack it."""
        calls = self._calls
        num_begin = len(parts) - len(calls.call)
        begin, call = (parts[:num_begin], calls.call) if num_begin >= 0 else ((), parts)
        opening = [*first, *self._items(begin)]
        return f"{self._call(call, opening)} {self._more_calls()}"

    def _more_calls(self) -> str:
        """The rest of a section after a call."""
        calls = self._calls
        end = join(self._items(calls.end))
        if calls.separator is None or not self._parallel:
            return end
        between = self._items(calls.separator)
        if not between or not isinstance(between[0], Text) or not between[0].is_space:
            between.insert(0, SPACE_TEXT)
        return f"({self._call(calls.call, between)})* {end}"

    def _call(self, parts: Sequence[Part], opening: Sequence[Item] = ()) -> str:
        """A call of one of the tools; what they share is written once.

        The opening is joined with the call's first text: the lexer takes the longest terminal, which
        whitespace alone would not be where other text may follow it.
        """
        items = _part_items(self._writer, parts)
        own = [index for index, item in enumerate(items) if callable(item)]
        first, last = own[0], own[-1] + 1
        name = f"call_{len(items)}"
        tools = []
        for tool in self._writer.tools:
            body = join(evaluate(items[first:last], tool))
            tools.append(self._writer.rule(f"{name}_{tool.rule}", body))
        choice = self._writer.rule(f"{name}_any", " | ".join(tools))
        before = [*opening, *evaluate(items[:first], None)]
        return f"{join(before)} {choice} {join(evaluate(items[last:], None))}"

    def _items(self, parts: Iterable[Part]) -> list[Item]:
        """Parts beside a call, which are the same for every tool."""
        return evaluate(_part_items(self._writer, parts), None)


def _part_items(writer: GrammarWriter, parts: Iterable[Part]) -> list[Item | ToolItems]:
    items: list[Item | ToolItems] = []
    for part in parts:
        if not isinstance(part, str):
            items += part.grammar(writer)
        elif not part.strip():
            items.append(space(part))
        else:
            items += writer.marker(part)
    return items


def is_token(marker: Marker) -> bool:
    return len(marker) == 1 and isinstance(marker[0], int)


def marker_text(marker: Marker) -> str:
    """The texts of a marker, without its tokens."""
    return "".join(piece for piece in marker if isinstance(piece, str))


def _id_ranges(token_ids: Iterable[int]) -> str:
    """Ids as Lark writes them: 1,3-5."""
    ranges: list[list[int]] = []
    for token_id in sorted(token_ids):
        if ranges and ranges[-1][1] == token_id - 1:
            ranges[-1][1] = token_id
        else:
            ranges.append([token_id, token_id])
    return ",".join(f"{low}-{high}" if low < high else str(low) for low, high in ranges)
