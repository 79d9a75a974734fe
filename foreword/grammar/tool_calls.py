"""The constraint on an answer with tools, derived from the record of the model's chat format.

The answer is text until a trigger opens a call (`auto`), or calls and nothing else (`required`). A call has
the form of the record, the name of a callable tool, and arguments by that tool's schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import groupby, takewhile
from typing import Any, Final

from foreword.chat_formats.record import (
    BareArguments,
    BoundFormat,
    CallId,
    Header,
    JsonArguments,
    JsonCall,
    Name,
    NameInId,
    Part,
    PythonArguments,
    Space,
    TaggedArguments,
    ToolFormat,
)
from foreword.chat_formats.tools import NO_TOOLS, ReasoningOptions, Tool, ToolUse
from foreword.chat_formats.values import MAX_SCHEMA_DEPTH, SchemaTypes, resolve_reference
from foreword.core.structured_output import MAX_TOOLS_BYTES, ConstraintScope, Marker, StructuredOutput
from foreword.errors import InvalidRequest
from foreword.grammar import limits
from foreword.grammar.compiler import constraint_body
from foreword.grammar.json_schema import (
    SUPPORTED_KEYWORDS,
    UNSUPPORTED_KEYWORDS,
    GrammarError,
    SchemaConverter,
    is_pattern_known,
)
from foreword.grammar.lark import embed_lark, escape_char, lark_regex

ANY_TEXT: Final = "/(?s:.*)/"
SPACES: Final = r"[ \t\r\n]"
ANY_SPACES: Final = rf"{SPACES}{{0,16}}"
# One separator: a small model would write blank lines up to the end of its answer.
SPACE: Final = r"[ \n]"
CALL_WHITESPACE: Final = r" |\n"  # between parts of JSON
PLAIN_CHARS: Final = frozenset(" _,:;=<>\"'%!@&")  # of a regular expression, besides letters and digits
NUMBER: Final = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"
PYTHON_STRING: Final = r"'([^'\\\x00-\x1f]|\\[\\'\"nrtbf]|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4})*'"
JSON_STRING: Final = r'"([^"\\\x00-\x1f]|\\["\\\/bfnrt]|\\u[0-9a-fA-F]{4})*"'
KEY: Final = "[a-zA-Z_][a-zA-Z0-9_.-]*"
LITERAL_TEXTS: Final = {"boolean": "/true|false/", "null": "/null/"}
MAX_ANY_ORDER: Final = 64  # bits of llguidance's parameter; more arguments come in the schema's order
LENGTHS: Final = ("minLength", "maxLength")
STRING_KEYWORDS: Final = frozenset(("const", "enum", "pattern", *LENGTHS))
STRING_ALTERNATIVES: Final = ("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref")
NUMBER_KEYWORDS: Final = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf")
OBJECT_KEYWORDS: Final = ("type", "properties", "required", "additionalProperties")
DEFINITION_KEYWORDS: Final = ("$anchor", "$defs", "$id", "$schema", "definitions", "id")
CONSTRAINING_KEYWORDS: Final = (*SUPPORTED_KEYWORDS, *UNSUPPORTED_KEYWORDS)
# Fields of formats of the content alone, of which an answer of calls has none.
CONTENT_FIELDS: Final = ("response_format", "text.format", "output_config.format", "output_format")
EMBEDDABLE_TYPES: Final = ("json_schema", "json_object", "regex", "choice")
OPEN_BRACE, CLOSE_BRACE, OPEN_BRACKET, CLOSE_BRACKET, COMMA = (
    rf"/{SPACE}?{sign}{SPACE}?/" for sign in (r"\{", r"\}", r"\[", r"\]", ",")
)
MIN_VISITS: Final = 256  # of alternatives of a tool's arguments; more for a schema of more parts
MAX_PATH_CHARS: Final = 1000  # of a place in a schema; a longer one is hashed
MAX_CACHED: Final = 16  # constraints; one of 512 tools has about 1 MB
NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolConstraint:
    """What is enforced on an answer, and what is not."""

    structured: StructuredOutput | None  # None: nothing
    dropped: tuple[str, ...] = ()  # "tools[3].function.parameters/properties/x: not"


def tool_constraint(
    bound: BoundFormat,
    use: ToolUse,
    reasoning: ReasoningOptions,
    starts_in_reasoning: bool,
    response_format: StructuredOutput | None,
) -> ToolConstraint:
    """The constraint of one answer: on its calls, its content and the length of its reasoning.

    starts_in_reasoning  of the rendered prompt
    response_format      of the content; with tools, the answer is a call or such a document

    Raises InvalidRequest for a schema or grammar that cannot be enforced, unless the keyword may be dropped.
    """
    tools = [
        (
            tool.name,
            tool.parameters,
            tool.strict,
            tool.is_custom,
            tool.input_grammar and [tool.input_grammar.constraint_type, tool.input_grammar.text],
            tool.schema_field,
        )
        for tool in use.tools
    ]
    for tool in use.callable_tools:
        tool.argument_types(None)  # now: the parser asks on the event loop
    key = (
        bound.format,
        *sorted(bound.token_ids.items()),
        json.dumps(tools, default=dict),
        use.choice,
        use.allowed,
        use.parallel,
    )
    try:
        return _cached_constraint(_Task(key, reasoning, starts_in_reasoning, response_format, bound, use))
    except RecursionError:
        raise InvalidRequest("tools: a schema is nested too deeply", "tools") from None


@dataclass(frozen=True, slots=True)
class _Task:
    """Arguments of `tool_constraint`; equal ones have equal constraints."""

    key: tuple[Any, ...]  # of bound and use
    reasoning: ReasoningOptions
    starts_in_reasoning: bool
    response_format: StructuredOutput | None
    bound: BoundFormat = field(compare=False)
    use: ToolUse = field(compare=False)


@lru_cache(maxsize=MAX_CACHED)
def _cached_constraint(task: _Task) -> ToolConstraint:
    bound, use, response_format = task.bound, task.use, task.response_format
    tools, calls = use.callable_tools, bound.format.tools
    gate = _reasoning_gate(bound, task.reasoning, task.starts_in_reasoning)
    if not tools or calls is None:
        return ToolConstraint(_constrain_content(bound, gate, response_format))
    writer = _Writer(bound, use)
    document = response_format if use.choice == "auto" else None
    if (
        response_format is not None
        and document is None
        and not response_format.field.startswith(CONTENT_FIELDS)
    ):
        raise InvalidRequest(
            f"{response_format.field} constrains the answer, and cannot be used with a tool_choice that asks "
            'for a call: send tool_choice "auto" or "none"',
            response_format.field,
        )
    trigger, rest = _split_trigger(bound, calls)
    if use.choice == "required" or document is not None:
        body = writer.whole_answer(calls, use.parallel, document)
        lark = writer.finish(writer.after_reasoning(body, gate))
        if not gate.holds_reasoning:
            gate = replace(gate, early_begin=_early_begin(bound, calls))
            if document is None:
                gate = replace(gate, usual=_usual_begin(bound, calls.begin + calls.call))
    elif trigger:
        reasoning_format = bound.format.reasoning
        lark = writer.finish(writer.after_trigger(calls, use.parallel, trigger, rest))
        gate = replace(
            gate,
            holds_reasoning=False,
            trigger=trigger,
            usual=(*rest, *_usual_begin(bound, (calls.begin + calls.call)[1:])),
            is_trigger_in_reasoning=reasoning_format is not None and reasoning_format.ended_by_call,
        )
    else:
        lark = writer.finish(writer.text_with_calls(calls, use.parallel, gate))
        if calls.opens_answer and not gate.holds_reasoning:
            first = (calls.begin + calls.call)[0]
            gate = replace(gate, opening=first[0] if isinstance(first, str) else "{")
    return ToolConstraint(StructuredOutput("tools", lark, field="tools", gate=gate), writer.dropped)


def may_follow_space(document: StructuredOutput | None) -> bool | None:
    """Whether whitespace may precede constrained content and is no part of it; None: content is free.

    Models write some behind their reasoning, before JSON too; another constraint may begin with its own.
    """
    if document is None:
        return None
    return document.whitespace and document.constraint_type in ("json_schema", "json_object")


def _reasoning_gate(
    bound: BoundFormat, options: ReasoningOptions, starts_in_reasoning: bool
) -> ConstraintScope:
    reasoning = bound.format.reasoning
    if reasoning is None:
        return ConstraintScope()
    begin, end = bound.pieces(reasoning.begin), bound.pieces(reasoning.end)
    may_begin = options.enabled is not False
    is_one_token = _is_token(end) and (starts_in_reasoning or _is_token(begin))
    return ConstraintScope(
        reasoning_begin=begin if may_begin else (),
        reasoning_end=end,
        starts_in_reasoning=starts_in_reasoning,
        max_reasoning_tokens=options.budget_tokens,
        holds_reasoning=not is_one_token and (may_begin or starts_in_reasoning),
    )


def _constrain_content(
    bound: BoundFormat, gate: ConstraintScope, response_format: StructuredOutput | None
) -> StructuredOutput | None:
    """The constraint on an answer without tools."""
    has_budget = gate.max_reasoning_tokens is not None
    if response_format is None:
        free = replace(gate, constrains=False, holds_reasoning=False)
        return (
            StructuredOutput("tools", f"start: {ANY_TEXT}", field="reasoning", gate=free)
            if has_budget
            else None
        )
    field = response_format.field
    if response_format.after is not None:
        if has_budget:
            raise InvalidRequest(
                f"{field}.after cannot be combined with a limit of the reasoning", f"{field}.after"
            )
        return response_format
    if not gate.reasoning_end and not bound.format.content:
        return response_format
    if response_format.constraint_type in EMBEDDABLE_TYPES:
        writer = _Writer(bound, NO_TOOLS)
        body = writer.after_reasoning(writer.document(response_format), gate)
        return StructuredOutput("tools", writer.finish(body), field=field, gate=gate)
    if not gate.holds_reasoning:
        return replace(response_format, gate=gate)
    if has_budget:
        kind = response_format.constraint_type
        raise InvalidRequest(f"{field}: {kind} cannot be combined with a limit of the reasoning", field)
    return (
        replace(response_format, after=_text(gate.reasoning_end))
        if gate.starts_in_reasoning
        else response_format
    )


def _is_token(marker: Marker) -> bool:
    return len(marker) == 1 and isinstance(marker[0], int)


def _text(marker: Marker) -> str:
    return "".join(piece for piece in marker if isinstance(piece, str))


def _usual_begin(bound: BoundFormat, parts: Iterable[Part]) -> Marker:
    """What the template writes up to the name of the tool, or its id."""
    marker: list[str | int] = []
    for part in parts:
        if isinstance(part, str):
            marker += bound.pieces(part)
        elif isinstance(part, Space):
            marker.append(part.usual)
        else:
            if isinstance(part, JsonCall):
                key = part.id_key if part.id_key is not None and part.id_first else part.name_key
                marker.append('{"' + key + '": "')
            break
    texts: list[str | int] = []
    for piece in marker:
        if isinstance(piece, str) and texts and isinstance(texts[-1], str):
            texts[-1] += piece  # neighbouring texts are tokenized together
        elif piece != "":
            texts.append(piece)
    return tuple(texts)


def _early_begin(bound: BoundFormat, calls: ToolFormat) -> int | None:
    """The token that ends the reasoning by a call, if the family's models call there."""
    first = (calls.begin + calls.call)[0]
    if bound.format.reasoning is None or not bound.format.reasoning.ended_by_call:
        return None
    pieces = bound.pieces(first) if isinstance(first, str) else ()
    return pieces[0] if pieces and isinstance(pieces[0], int) else None


def _split_trigger(bound: BoundFormat, calls: ToolFormat) -> tuple[Marker, Marker]:
    """The tokens that open a section, and what follows them in its first text; () if a text opens it.

    The last character of a longer trigger is left to the grammar: it may merge with the text after it.
    """
    first = (calls.begin + calls.call)[0]
    pieces = bound.pieces(first) if isinstance(first, str) else ()
    start = next((i for i, piece in enumerate(pieces) if isinstance(piece, int)), None)
    if start is None or calls.opens_answer:
        return (), ()
    trigger, last = pieces[start:], pieces[-1]
    if isinstance(last, str) and not last[-1].isalnum():
        return (*trigger[:-1], *filter(None, (last[:-1],))), (last[-1],)
    return trigger, ()


@dataclass(frozen=True, slots=True)
class _Text:
    """Text by a regular expression. Neighbours are joined to one terminal."""

    regex: str
    is_space: bool = False  # it may be empty, which a terminal may not


Item = _Text | str  # a text, or a part of a Lark rule
SPACE_TEXT: Final = _Text(f"{SPACE}?", is_space=True)
LEADING_SPACE: Final = _Text(rf"(\n\n|{SPACE})?", is_space=True)  # of the first call, or of JSON


@dataclass(frozen=True, slots=True)
class _ToolSchema:
    index: int  # in the request
    tool: Tool
    parameters: Mapping[str, Any]
    converter: SchemaConverter
    unsupported: list[str]  # keywords that the converter left out

    @property
    def field(self) -> str:
        return self.tool.schema_field or f"tools[{self.index}].function.parameters"

    @property
    def is_strict(self) -> bool:
        return self.tool.strict or self.tool.is_custom

    @property
    def rule(self) -> str:
        """In the names of its rules, where compiler.py finds it."""
        return f"tool{self.index}"


ToolItems = Callable[[_ToolSchema], list[Item]]  # what differs between tools


class _Writer:
    """Writes the rules of one grammar."""

    def __init__(self, bound: BoundFormat, use: ToolUse) -> None:
        self._bound = bound
        self._lines: dict[str, str] = {}  # head of each rule -> its body
        self._dropped: dict[str, None] = {}
        self._arguments: dict[int, list[Item]] = {}  # of tagged formats, by the tool's index
        self._num_chars = 0  # of rules, and of the arguments in them
        callable_names = {tool.name for tool in use.callable_tools}
        self._tools = [
            _read_tool(index, tool) for index, tool in enumerate(use.tools) if tool.name in callable_names
        ]

    @property
    def dropped(self) -> tuple[str, ...]:
        return tuple(self._dropped)

    def finish(self, start: str) -> str:
        return "\n".join(f"{head}: {body}" for head, body in {"start": start, **self._lines}.items()) + "\n"

    # Answers: each method returns the body of a rule.

    def whole_answer(self, calls: ToolFormat, parallel: bool, document: StructuredOutput | None) -> str:
        """Calls and nothing else, or a document."""
        section = self.rule("section", self._section(calls, calls.begin + calls.call, parallel))
        body = section
        if calls.separator is None and parallel:
            body = f"{section} ({_join([SPACE_TEXT])} {section})*"
        answer = f"{_join([LEADING_SPACE])} {body}"
        return f"({answer}) | ({self.document(document)})" if document is not None else answer

    def document(self, document: StructuredOutput) -> str:
        """A text by a user's constraint, in the markers of content."""
        try:
            body = constraint_body(document)
        except GrammarError as error:
            raise InvalidRequest(f"{document.field}: {error}", document.field) from None
        if not body.startswith("%json"):
            body = self.rule("DOCUMENT", body)
        begin, end = self._bound.format.content or ("", "")
        space = _join([LEADING_SPACE]) if may_follow_space(document) else ""
        return f"{space} {self._optional(begin)} {body} {self._optional(end)}"

    def after_reasoning(self, body: str, gate: ConstraintScope) -> str:
        """The body after the reasoning, which is a part of the grammar if the gate does not pass it."""
        body = " ".join([*map(self._optional, self._bound.format.dropped), f"({body})"])
        if not gate.holds_reasoning:
            return body
        reasoning = self._reasoning(gate)
        return f"{reasoning} {body}" if gate.starts_in_reasoning else f"{reasoning}? {body}"

    def after_trigger(self, calls: ToolFormat, parallel: bool, trigger: Marker, rest: Marker) -> str:
        """What follows a trigger: the rest of its section, and free text up to the next trigger."""
        parts = calls.begin + calls.call
        section = self.rule("section", self._section(calls, parts[1:], parallel, self.pieces(rest)))
        if not parallel:
            return section
        if not _is_token(trigger):
            return f"{section} <[*]>*"
        return f"{section} (<[^{trigger[0]}]>* <[{trigger[0]}]> {section})* <[^{trigger[0]}]>*"

    def text_with_calls(self, calls: ToolFormat, parallel: bool, gate: ConstraintScope) -> str:
        """Free text, and a call wherever a text opens one."""
        if calls.opens_answer:
            return self.after_reasoning(self._opening_call(calls, parallel), gate)
        begin = _text(gate.reasoning_begin) if gate.holds_reasoning and not gate.starts_in_reasoning else ""
        body = self._text_until_calls(calls, parallel, "")
        if not begin:
            return self.after_reasoning(body, gate)
        first = self._text_until_calls(calls, parallel, begin)
        return f"({self._reasoning(gate)} {body}) | ({first})"

    def _text_until_calls(self, calls: ToolFormat, parallel: bool, excluded: str) -> str:
        """`excluded` does not open the first text."""
        parts = calls.begin + calls.call
        assert isinstance(parts[0], str)
        trigger = _literal(parts[0])
        head = self.lazy_rule("text_and_trigger", f"/(?s:.*){trigger}/")
        first, text = head, ANY_TEXT
        if excluded:
            start = f"/{SPACES}*{_literal(excluded)}(?s:.*)/"
            text = self.rule("FIRST_TEXT", f"{ANY_TEXT} & ~({start})")
            body = self.rule("FIRST_TEXT_AND_TRIGGER", f"/(?s:.*){trigger}/ & ~({start})")
            first = self.lazy_rule("first_text_and_trigger", body)
        section = self.rule("section", self._section(calls, parts[1:], parallel))
        if not parallel:
            return f"{first} {section} | {text}"
        return f"{first} {section} ({head} {section})* {ANY_TEXT} | {text}"

    def _opening_call(self, calls: ToolFormat, parallel: bool) -> str:
        """A call at the start of the answer, or any other text."""
        items = self._items(calls.begin + calls.call)
        prefix = [
            item for item in takewhile(lambda item: isinstance(item, _Text), items) if not callable(item)
        ]
        named: list[str] = []
        heads: list[str] = []
        for described in self._tools:
            own = _evaluate(items[len(prefix) :], described)
            name = own[: 1 + isinstance(calls.call[0], Name)]  # up to the text after it
            head = "".join(item.regex for item in (SPACE_TEXT, *prefix, *name) if isinstance(item, _Text))
            heads.append(head.replace(SPACE_TEXT.regex, ANY_SPACES))  # as the parser reads it
            named.append(self.rule(f"opening_{described.rule}", _join([LEADING_SPACE, *prefix, *own])))
        other = self.rule("OTHER_TEXT", f"{ANY_TEXT} & ~(/({'|'.join(heads)})(?s:.*)/)")
        more = self._more_calls(calls, parallel)
        if calls.separator is None and parallel:
            section = self.rule("section", self._section(calls, calls.begin + calls.call, parallel))
            more += f" ({_join([SPACE_TEXT])} {section})*"
        return f"(({' | '.join(named)}) {more}) | {other}"

    def _reasoning(self, gate: ConstraintScope) -> str:
        begin = [] if gate.starts_in_reasoning else self.pieces(gate.reasoning_begin)
        head, *tail = gate.reasoning_end
        if isinstance(head, int):
            # Special tokens are no text: one of them would end the answer.
            text = f"<[^{_id_ranges({head, *self._bound.special_ids})}]>*"
            return self.rule("reasoning", _join([*begin, text, *self.pieces(gate.reasoning_end)]))
        end = self.lazy_rule("reasoning_end", f"/(?s:.*){_literal(head)}/")
        return self.rule("reasoning", _join([*begin, end, *self.pieces(tuple(tail))]))

    # Calls.

    def _section(
        self, calls: ToolFormat, parts: Sequence[Part], parallel: bool, first: Sequence[Item] = ()
    ) -> str:
        """One section, without the first of its texts if `parts` lack it."""
        num_begin = len(parts) - len(calls.call)
        begin, call = (parts[:num_begin], calls.call) if num_begin >= 0 else ((), parts)
        opening = [*first, *self._plain_items(begin)]
        return f"{self._call(call, opening)} {self._more_calls(calls, parallel)}"

    def _more_calls(self, calls: ToolFormat, parallel: bool) -> str:
        """The rest of a section after a call."""
        end = _join(self._plain_items(calls.end))
        if calls.separator is None or not parallel:
            return end
        between = self._plain_items(calls.separator)
        if not between or not isinstance(between[0], _Text) or not between[0].is_space:
            between.insert(0, SPACE_TEXT)
        return f"({self._call(calls.call, between)})* {end}"

    def _call(self, parts: Sequence[Part], opening: Sequence[Item] = ()) -> str:
        """A call of one of the tools; what they share is written once.

        The opening is joined with the call's first text: the lexer takes the longest terminal, which
        whitespace alone would not be where other text may follow it.
        """
        items = self._items(parts)
        own = [index for index, item in enumerate(items) if callable(item)]
        first, last = own[0], own[-1] + 1
        name = f"call_{len(items)}"
        tools = []
        for described in self._tools:
            body = _join(_evaluate(items[first:last], described))
            tools.append(self.rule(f"{name}_{described.rule}", body))
        choice = self.rule(f"{name}_any", " | ".join(tools))
        before = [*opening, *_evaluate(items[:first], None)]
        return f"{_join(before)} {choice} {_join(_evaluate(items[last:], None))}"

    def _items(self, parts: Iterable[Part]) -> list[Item | ToolItems]:
        return [item for part in parts for item in self._part_items(part)]

    def _plain_items(self, parts: Iterable[Part]) -> list[Item]:
        return _evaluate(self._items(parts), None)

    def _part_items(self, part: Part) -> list[Item | ToolItems]:
        match part:
            case str():
                return [_space(part)] if part.isspace() else [*self.marker(part)]
            case Space():
                return [_space(part.usual)]
            case Header():
                return [self._optional(part.usual)]
            case Name():
                return [_tool_name]
            case CallId():
                return [_Text(f"({part.pattern})")]
            case NameInId():
                return [
                    _Text(_literal(part.begin)),
                    _tool_name,
                    _Text(f"{_literal(part.separator)}({part.pattern})"),
                ]
            case JsonArguments():
                return [self._json_arguments]
            case JsonCall():
                return self._json_call(part)
            case TaggedArguments():
                return [lambda described: self._tagged(part, described)]
            case PythonArguments() | BareArguments():
                return [lambda described: _LiteralWriter(self, part, described).items()]

    def _tagged(self, part: TaggedArguments, described: _ToolSchema) -> list[Item]:
        """The arguments of a tool, written once for its first call and the further ones."""
        if described.index not in self._arguments:
            self._arguments[described.index] = _TaggedWriter(self, part, described).items()
        return self._arguments[described.index]

    def _optional(self, text: str) -> str:
        body = _join(self.marker(text))
        return f"({body})?" if body else ""

    def _json_call(self, part: JsonCall) -> list[Item | ToolItems]:
        def key(name: str) -> str:
            return f"{_literal(json.dumps(name))}{SPACE}?:{SPACE}?"

        comma = f"{SPACE}?,{SPACE}?"
        call_id = "" if part.id_key is None else f'{key(part.id_key)}"({part.id_pattern})"'
        before = f"{call_id}{comma}" if call_id and part.id_first else ""
        after = f"{comma}{call_id}" if call_id and not part.id_first else ""
        return [
            _Text(rf"\{{{SPACE}?{before}{key(part.name_key)}"),
            lambda described: [_Text(_literal(json.dumps(described.tool.name)))],
            _Text(f"{comma}{key(part.arguments_key)}"),
            self._json_arguments,
            _Text(rf"{after}{SPACE}?\}}"),
        ]

    def lark_input(self, described: _ToolSchema, in_json: bool) -> str | None:
        """The start rule of a custom tool's grammar; None if it has none in Lark."""
        grammar = described.tool.input_grammar
        if grammar is None or grammar.constraint_type != "lark":
            return None
        try:
            start, rules = embed_lark(grammar.text, f"input_{described.rule}", in_json)
        except GrammarError as error:
            raise InvalidRequest(f"{grammar.field}: {error}", grammar.field) from None
        for head, body in rules.items():
            self.rule(head, body)
        return start

    def _json_arguments(self, described: _ToolSchema) -> list[Item]:
        start = self.lark_input(described, in_json=True)
        if start is not None:
            key = f"{_literal(json.dumps('input'))}{SPACE}?:{SPACE}?"
            return [_Text(rf'\{{{SPACE}?{key}"'), start, _Text(rf'"{SPACE}?\}}')]
        return [self.json(described, described.parameters, "")]

    # Schemas.

    def json(self, described: _ToolSchema, schema: Any, path: str) -> str:
        """JSON by a schema at this path of the tool's parameters."""
        try:
            converted = described.converter.convert(schema, path, CALL_WHITESPACE)
        except GrammarError as error:
            raise InvalidRequest(f"{described.field}: {error}", described.field) from None
        for place in described.unsupported:
            self.drop(described, place)
        described.unsupported.clear()
        return f"%json {converted}"

    def string_terminals(self, described: _ToolSchema, schema: Mapping[str, Any], path: str) -> list[str]:
        """Terminals that a raw string must match, all of them."""
        terminals = []
        for keyword in schema:
            if keyword == "pattern" and isinstance(schema["pattern"], str):
                if is_pattern_known(schema["pattern"]):
                    terminals.append(_search_regex(schema["pattern"]))
                else:
                    self.drop(described, f"{path}: pattern")
            elif keyword in CONSTRAINING_KEYWORDS and keyword not in (*LENGTHS, *STRING_ALTERNATIVES):
                self.drop(described, f"{path}: {keyword}")
        low, high = (schema.get(keyword) for keyword in LENGTHS)
        if isinstance(low, int) or isinstance(high, int):
            if max(low or 0, high or 0) > limits.MAX_REPEAT:
                self.drop(described, f"{path}: {'maxLength' if high else 'minLength'}")
            else:
                terminals.append(f"/(?s:.{{{low or 0},{'' if high is None else high}}})/")
        return terminals

    def drop(self, described: _ToolSchema, place: str) -> None:
        """Leave out a keyword: "/properties/x: not". Raises for strict tools."""
        if described.is_strict:
            path, _, keyword = place.rpartition(": ")
            raise InvalidRequest(
                f"{described.field}: {keyword!r} cannot be enforced in this model's calls (at {path})",
                described.field,
            )
        self._dropped[f"{described.field}{place}"] = None

    def drop_others(
        self, described: _ToolSchema, schema: Mapping[str, Any], path: str, keywords: Iterable[str]
    ) -> None:
        """Leave out what constrains, besides these keywords and definitions."""
        for keyword, value in schema.items():
            is_known = keyword in keywords or keyword in DEFINITION_KEYWORDS
            is_neutral = keyword in UNSUPPORTED_KEYWORDS and value == UNSUPPORTED_KEYWORDS[keyword]
            if keyword in CONSTRAINING_KEYWORDS and not is_known and not is_neutral:
                self.drop(described, f"{path}: {keyword}")

    def rule(self, head: str, body: str) -> str:
        """Add a rule, which may be there already. Returns its name."""
        assert self._lines.setdefault(head, self.count(body)) == body, f"two rules {head}"
        return head.removesuffix("[lazy]").removesuffix("::_")

    def count(self, text: str) -> str:
        """A text of the grammar. Raises InvalidRequest for a grammar that is too large, while it grows."""
        self._num_chars += len(text)
        if self._num_chars > 2 * MAX_TOOLS_BYTES:
            raise InvalidRequest(
                "tools: their grammar is too large (fewer tools or simpler schemas fit)", "tools"
            )
        return text

    def lazy_rule(self, name: str, terminal: str) -> str:
        """A rule that ends as soon as the terminal matches."""
        return self.rule(f"{name}[lazy]", terminal)

    def text(self, text: str) -> list[Item]:
        return [_Text(_literal(text))] if text else []

    def pieces(self, marker: Marker) -> list[Item]:
        return [f"<[{piece}]>" if isinstance(piece, int) else _Text(_literal(piece)) for piece in marker]

    def marker(self, text: str) -> list[Item]:
        """A text of the record."""
        return self.pieces(self._bound.pieces(text))


class _TaggedWriter:
    """Writes the arguments of one tool as elements, in any order."""

    def __init__(self, writer: _Writer, part: TaggedArguments, described: _ToolSchema) -> None:
        self._writer = writer
        self._part = part
        self._tool = described
        self._types = SchemaTypes(described.parameters)
        self._num_visits_left = MIN_VISITS + 4 * self._types.num_parts
        end = writer.marker(part.value_end)
        self._end: list[Item] = [*end, _space(part.between)]

    def items(self) -> list[Item]:
        properties, required, others = _properties(self._tool.parameters)
        self._writer.drop_others(self._tool, self._tool.parameters, "", OBJECT_KEYWORDS)
        entries = {key: self._element(key, schema) for key, schema in properties.items()}
        if others is not None:
            return [f"({self._element(None, others)})*"]
        return [_any_order(self._writer, self._tool, "", entries, required, "")]

    def _element(self, key: str | None, schema: Any) -> str:
        """An argument; the key None is any."""
        part = self._part
        name = _Text(KEY if key is None else _literal(key))
        head = [*self._writer.marker(part.key_begin), name, *self._writer.marker(part.key_end)]
        path = "/additionalProperties" if key is None else _join_path("/properties", key)
        types = self._tool.tool.argument_types(key)
        strings = list(self._string_options(schema, path)) if "string" in types else []
        # A raw text that reads as a number or a literal is one: free text leaves objects and arrays to JSON.
        is_any_text = any(not {*option} & STRING_KEYWORDS for option, _ in strings)
        has_scalars = is_any_text and not part.types_in_tag
        others = types & {"object", "array"} if has_scalars else types - {"string"}
        bodies = [
            _join([*head, *self._value_begin(True), *self._string(option, others, place)])
            for option, place in strings
        ]
        if strings:
            schema = self._without_strings(schema, others, path)
        if not strings or (schema is not None and others):
            value = self._writer.json(self._tool, schema, path)
            bodies.append(_join([*head, *self._value_begin(False), value, SPACE_TEXT, *self._end]))
        return self._writer.count(" | ".join(bodies))

    def _string_options(self, schema: Any, path: str) -> Iterator[tuple[Mapping[str, Any], str]]:
        """The alternatives of a schema that allow strings, each with its path."""
        for option, place in self._expand(schema, path, lambda part: "string" not in self._types.of(part)):
            if "string" in self._types.of(option):
                yield (option if isinstance(option, Mapping) else {}), place

    def _expand(
        self, schema: Any, path: str, is_leaf: Callable[[Mapping[str, Any]], bool]
    ) -> Iterator[tuple[Any, str]]:
        """The alternatives of a schema, and theirs, each once and with its path.

        A schema of too many allows anything: its keyword is dropped.
        """
        visited: set[int] = set()
        pending = [(schema, path, 0)]
        while pending:
            schema, path, depth = pending.pop()
            if id(schema) in visited:
                continue
            visited.add(id(schema))
            is_plain = not isinstance(schema, Mapping) or is_leaf(schema)
            keyword, options = ("", {}) if is_plain else _alternatives(schema, self._tool.parameters)
            self._num_visits_left -= len(options)
            if not options:
                yield schema, path
            elif depth == MAX_SCHEMA_DEPTH or self._num_visits_left < 0:
                self._writer.drop(self._tool, f"{path}: {keyword}")
                yield {}, path
            else:
                below = [(option, _join_path(path, place), depth + 1) for place, option in options.items()]
                pending += reversed(below)

    def _without_strings(self, schema: Any, others: Iterable[str], path: str) -> Any:
        """The part of a schema that allows other values than strings; None if that is not plain.

        others  the types that they may have, if the schema does not tell
        """
        plain: list[Mapping[str, Any]] = []
        for option, _ in self._expand(schema, path, self._is_plain):
            if not isinstance(option, Mapping):
                continue
            if not option:
                plain.append({"type": sorted(others)})
            elif "string" not in self._types.of(option):
                plain.append(option)
            elif isinstance(option.get("type"), list):
                plain.append({**option, "type": [name for name in option["type"] if name != "string"]})
            elif isinstance(option.get("enum"), list):
                choices = [choice for choice in option["enum"] if not isinstance(choice, str)]
                plain += [{**option, "enum": choices}] if choices else []
        return {"anyOf": plain} if len(plain) > 1 else next(iter(plain), None)

    def _is_plain(self, schema: Mapping[str, Any]) -> bool:
        """Whether `_without_strings` can take the strings out of the schema itself."""
        has_list = isinstance(schema.get("type"), list) or isinstance(schema.get("enum"), list)
        return has_list or "string" not in self._types.of(schema)

    def _value_begin(self, is_string: bool) -> list[Item]:
        part = self._part
        types = f' string="{str(is_string).lower()}">' if part.types_in_tag else ""
        begin: list[Item] = (
            [_space(part.between), *self._writer.marker(part.value_begin)] if part.value_begin else []
        )
        return [*self._writer.text(types), *begin, *self._writer.text(part.padding)]

    def _string(self, schema: Mapping[str, Any], others: frozenset[str], path: str) -> list[Item]:
        """A raw string and its end; values of the other types have a form of their own."""
        start = self._writer.lark_input(self._tool, in_json=False)
        if start is not None:
            return [start, *self._writer.text(self._part.padding), *self._end]
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(choices, list):
            texts = [choice for choice in choices if isinstance(choice, str)]
            choice = _Text("(" + "|".join(map(_literal, texts)) + ")")
            return [choice, *self._writer.text(self._part.padding), *self._end]
        texts = self._writer.string_terminals(self._tool, schema, path)
        if others & {"object", "array"} and not self._part.types_in_tag:  # what begins like one is one
            texts.append(rf"~(/{SPACES}*[\[\{{](?s:.*)/)")
        head, *tail = self._end
        # A part of the same terminal: the lexer would stay with the text, which may go on with the end's.
        names = () if self._part.types_in_tag else sorted(others & LITERAL_TEXTS.keys())
        literals = [LITERAL_TEXTS[name] for name in names]
        if isinstance(head, _Text) and len(tail) == 1:  # the end is a text: up to the first
            if not texts:
                return [self._writer.lazy_rule("string_end", f"/(?s:.*){head.regex}/"), *tail]
            closer, padding = head.regex, _literal(self._part.padding)
            text = f"({' & '.join([ANY_TEXT, *texts, f'~(/(?s:.*){closer}(?s:.*)/)'])})"
            body = f"({' | '.join([text, *literals])}) /{padding}{closer}/"
            name = self._writer.rule(f"STRING_{self._tool.rule}_{_hex(path)}".upper(), body)
            return [self._writer.lazy_rule(name.lower(), name), *tail]
        closer = head.regex if isinstance(head, _Text) else ""  # text before the marker
        if not texts:
            return [f"/(?s:.*){closer}/", *(tail if closer else self._end)]
        closer = _literal(self._part.padding) + closer
        text = f"({' & '.join([ANY_TEXT, *texts])})"
        body = f"({' | '.join([text, *literals])})" + (f" /{closer}/" if closer else "")
        name = self._writer.rule(f"STRING_{self._tool.rule}_{_hex(path)}".upper(), body)
        return [name, *(tail if isinstance(head, _Text) else self._end)]


class _LiteralWriter:
    """Writes the arguments of one tool as keyword arguments, with values in a syntax like Python's."""

    def __init__(
        self, writer: _Writer, part: PythonArguments | BareArguments, described: _ToolSchema
    ) -> None:
        self._writer = writer
        self._tool = described
        self._is_python = isinstance(part, PythonArguments)
        self._quote = [] if isinstance(part, PythonArguments) else writer.marker(part.quote)
        self._references: dict[str, str] = {}
        self._words = ("True", "False", "None") if self._is_python else ("true", "false", "null")

    def items(self) -> list[Item]:
        grammar = self._tool.tool.input_grammar
        if grammar is not None:
            raise InvalidRequest(f"{grammar.field} cannot be enforced in this model's calls", grammar.field)
        assign = "=" if self._is_python else ":"
        properties, required, others = _properties(self._tool.parameters)
        self._writer.drop_others(self._tool, self._tool.parameters, "", OBJECT_KEYWORDS)
        entries = {
            key: _join([_Text(_literal(key) + assign), self._value(schema, _join_path("/properties", key))])
            for key, schema in properties.items()
        }
        if others is not None:
            value = self._value(others, "/additionalProperties")
            entry = _join([_Text(KEY.replace(".-", "") + assign), value])
            return [f"({entry} (/,{SPACE}?/ {entry})*)?"]
        return [_any_order(self._writer, self._tool, "", entries, required, ",")]

    def _value(self, schema: Any, path: str) -> str:
        """A value by a schema, as a part of a rule."""
        if not isinstance(schema, Mapping) or not schema:
            return self._any()
        reference = schema.get("$ref")
        if isinstance(reference, str):
            return self._reference(reference, path)
        if "const" in schema or isinstance(schema.get("enum"), list):
            choices = [schema["const"]] if "const" in schema else schema["enum"]
            return f"({' | '.join(map(self._constant, choices))})"
        for keyword in ("anyOf", "oneOf"):
            if isinstance(schema.get(keyword), list) and schema[keyword]:
                options = [
                    self._value(option, _join_path(path, f"{keyword}/{i}"))
                    for i, option in enumerate(schema[keyword])
                ]
                return f"({' | '.join(dict.fromkeys(options))})"
        types = schema.get("type", ())
        types = [types] if isinstance(types, str) else list(types)
        if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) == 1 and not types:
            return self._value(schema["allOf"][0], _join_path(path, "allOf/0"))
        if not types and "properties" in schema:
            types = ["object"]
        numbers = NUMBER_KEYWORDS if {*types} <= {"integer", "number", "null", "boolean"} else ()
        handled = (*OBJECT_KEYWORDS, "items", "minItems", "maxItems", *numbers)
        self._writer.drop_others(self._tool, schema, path, handled)
        return f"({' | '.join(self._typed(name, schema, path) for name in types)})" if types else self._any()

    def _typed(self, name: str, schema: Mapping[str, Any], path: str) -> str:
        match name:
            case "string":
                return self._string()
            case "integer" | "number":
                bounds = {key: schema[key] for key in NUMBER_KEYWORDS if key in schema}
                return self._writer.json(self._tool, {"type": name, **bounds}, path)
            case "boolean":
                return f'("{self._words[0]}" | "{self._words[1]}")'
            case "null":
                return f'"{self._words[2]}"'
            case "array":
                low, high = schema.get("minItems", 0), schema.get("maxItems")
                return self._list(self._value(schema.get("items"), _join_path(path, "items")), low, high)
            case "object":
                properties, required, others = _properties(schema)
                if others is not None:
                    return self._object(self._value(others, _join_path(path, "additionalProperties")))
                entries = {
                    key: _join(
                        [_Text(self._key(key)), self._value(value, _join_path(path, f"properties/{key}"))]
                    )
                    for key, value in properties.items()
                }
                inner = _any_order(self._writer, self._tool, path, entries, required, ",")
                return f"{OPEN_BRACE} {inner} {CLOSE_BRACE}"
        return self._any()

    def _reference(self, reference: str, path: str) -> str:
        target = resolve_reference(reference, self._tool.parameters) if reference[:1] == "#" else None
        if target is None:
            self._writer.drop(self._tool, f"{path}: $ref")
            return self._any()
        name = f"ref_{self._tool.rule}_{_hex(reference)}"
        if reference not in self._references:
            self._references[reference] = name
            self._writer.rule(name, self._value(target, reference.removeprefix("#")))
        return name

    def _key(self, key: str) -> str:
        colon = f":{SPACE}?"
        return (
            f"({_literal(repr(key))}|{_literal(json.dumps(key))})" if self._is_python else _literal(key)
        ) + colon

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            if self._is_python:
                return f"/{_literal(repr(value))}|{_literal(json.dumps(value, ensure_ascii=False))}/"
            return _join([*self._quote, *self._writer.text(value), *self._quote])
        if isinstance(value, bool) or value is None:
            return f'"{self._words[(True, False, None).index(value)]}"'
        if isinstance(value, int | float):
            return f"/{_literal(json.dumps(value))}/"
        return self._any()

    def _string(self) -> str:
        if self._is_python:
            return f"/{PYTHON_STRING}|{JSON_STRING}/"
        first = self._quote[0]
        if isinstance(first, str):
            return f"{first} {ANY_TEXT} {first}"
        return f"/{first.regex}/ {self._writer.lazy_rule('quoted', f'/(?s:.*){first.regex}/')}"

    def _list(self, item: str, low: int = 0, high: int | None = None) -> str:
        if high == 0:
            return f"{OPEN_BRACKET} {CLOSE_BRACKET}"
        count = f"{{{max(low - 1, 0)},{'' if high is None else high - 1}}}"
        items = f"({item} ({COMMA} {item}){count})" + ("" if low else "?")
        return f"{OPEN_BRACKET} {items} {CLOSE_BRACKET}"

    def _any(self) -> str:
        number = f"/{NUMBER}/"
        words = " | ".join(f'"{word}"' for word in self._words)
        name = "any_value"
        self._writer.rule(
            name, f"{self._string()} | {number} | {words} | {self._list(name)} | {self._object(name)}"
        )
        return name

    def _object(self, value: str) -> str:
        """An object of any keys."""
        colon = f":{SPACE}?"
        key = f"/({PYTHON_STRING}|{JSON_STRING}){colon}/" if self._is_python else f"/{KEY}{colon}/"
        return f"{OPEN_BRACE} ({key} {value} ({COMMA} {key} {value})*)? {CLOSE_BRACE}"


def _any_order(
    writer: _Writer,
    described: _ToolSchema,
    path: str,
    entries: Mapping[str, str],
    required: Sequence[str],
    separator: str,
) -> str:
    """Each entry at most once, in any order, the required ones present. Returns a part of a rule.

    A bit of the rule's parameter says that an entry is present.
    """
    if not entries:
        return ""
    name = f"object_{described.rule}_{_hex(path)}"
    keys = [*required, *(key for key in entries if key not in required)]
    rules = {key: writer.rule(f"{name}_{index}", entries[key]) for index, key in enumerate(keys)}
    between = f"/{separator}{SPACE}?/ " if separator else ""
    if len(keys) > MAX_ANY_ORDER:
        for key in required:
            writer.drop(described, f"{path}/properties/{key}: required")
        entry = writer.rule(f"{name}_any", " | ".join(rules.values()))
        return f"({entry} ({between}{entry})*)?"
    may_end = f'""{f" %if is_ones([0:{len(required)}])" if required else ""}'
    options = [
        f"{rules[key]} {name}_rest::set_bit({bit}) %if bit_clear({bit})" for bit, key in enumerate(keys)
    ]
    if separator:
        writer.rule(f"{name}::_", " | ".join([may_end, *options]))
    writer.rule(f"{name}_rest::_", " | ".join([may_end, *(between + option for option in options)]))
    return f"{name if separator else f'{name}_rest'}::0x0"


def _properties(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str], Any]:
    """The properties of an object's schema, the required ones, and the schema of others; None: no others."""
    others = schema.get("additionalProperties", True)
    names = schema.get("required")
    required = [
        name for name in dict.fromkeys(names if isinstance(names, list) else ()) if isinstance(name, str)
    ]
    properties = schema.get("properties")
    properties = dict(properties) if isinstance(properties, Mapping) else {}
    may_have_others = others is not False and "properties" not in schema and not required
    if others is not False:
        properties |= {name: others for name in required if name not in properties}
    others = others if isinstance(others, Mapping) else {}
    return properties, [name for name in required if name in properties], others if may_have_others else None


def _read_tool(index: int, tool: Tool) -> _ToolSchema:
    parameters, unsupported = _parameters(tool), list[str]()
    is_strict = tool.strict or tool.is_custom
    converter = SchemaConverter(parameters, None if is_strict else unsupported, closes_objects=True)
    return _ToolSchema(index, tool, parameters, converter, unsupported)


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


def _id_ranges(token_ids: Iterable[int]) -> str:
    """Ids as Lark writes them: 1,3-5."""
    ranges: list[list[int]] = []
    for token_id in sorted(token_ids):
        if ranges and ranges[-1][1] == token_id - 1:
            ranges[-1][1] = token_id
        else:
            ranges.append([token_id, token_id])
    return ",".join(f"{low}-{high}" if low < high else str(low) for low, high in ranges)


def _tool_name(described: _ToolSchema) -> list[Item]:
    return [_Text(_literal(described.tool.name))]


def _evaluate(items: Iterable[Item | ToolItems], described: _ToolSchema | None) -> list[Item]:
    evaluated: list[Item] = []
    for item in items:
        if isinstance(item, str | _Text):
            evaluated.append(item)
        else:
            assert described is not None, "a part of a call stands outside of it"
            evaluated += item(described)
    return evaluated


def _join(items: Iterable[Item]) -> str:
    """Items as a part of a rule: neighbouring texts are one terminal."""
    parts: list[str] = []
    for is_text, group in groupby(items, lambda item: isinstance(item, _Text)):
        if is_text:
            texts = [item for item in group if isinstance(item, _Text)]
            spaces = [f"/{item.regex[:-1]}/?" for item in texts if item.is_space]
            parts += spaces if len(spaces) == len(texts) else [f"/{''.join(item.regex for item in texts)}/"]
        else:
            parts += [item for item in group if isinstance(item, str) and item]
    return " ".join(parts)


def _space(usual: str) -> _Text:
    """At most one separator, or what the template writes."""
    return _Text(f"({_literal(usual)}|{SPACE})?", is_space=True) if len(usual) > 1 else SPACE_TEXT


@lru_cache(maxsize=4096)
def _literal(text: str) -> str:
    """A regular expression for a text."""
    return "".join(char if char in PLAIN_CHARS or char.isalnum() else escape_char(char) for char in text)


def _hex(text: str) -> str:
    """A part of a rule's name."""
    return text.encode().hex()


def _search_regex(pattern: str) -> str:
    """A terminal for texts in which a pattern matches somewhere."""
    before = "" if pattern.startswith("^") else "(?s:.*)"
    after = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
    body = lark_regex(pattern)[1:-1]
    return f"/{before}({body}){after}/"


def _alternatives(schema: Mapping[str, Any], root: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A keyword, and the schemas that a value conforms to instead, by their places; none: to this one."""
    if isinstance(schema.get("$ref"), str):
        target = resolve_reference(schema["$ref"], root)
        return "$ref", {} if target is None else {"$ref": target}
    for keyword in ("anyOf", "oneOf", "allOf"):
        options = schema.get(keyword)
        if isinstance(options, list) and (keyword != "allOf" or len(options) == 1):
            return keyword, {f"{keyword}/{index}": option for index, option in enumerate(options)}
    return "", {}


def _join_path(path: str, place: str) -> str:
    """The path of a part of a schema, a text of bounded length."""
    joined = f"{path}/{place}"
    return (
        joined
        if len(joined) <= MAX_PATH_CHARS
        else f"/{blake2b(joined.encode('utf-8', 'surrogatepass')).hexdigest()}"
    )
