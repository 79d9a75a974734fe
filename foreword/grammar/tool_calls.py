"""The constraint on an answer with tools, derived from the record of the model's chat format.

The answer is text until a trigger opens a call (`auto`), or calls and nothing else (`required`). A call has
the form of the record, the name of a callable tool, and arguments by that tool's schema: each part of the
record writes its own grammar (`chat_formats/parts/`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from foreword.chat_formats.call_grammar import ANY_TEXT
from foreword.chat_formats.chat_format import BoundFormat, ToolFormat
from foreword.chat_formats.parts.json import JsonCall
from foreword.chat_formats.parts.part import Part
from foreword.chat_formats.tools import NO_TOOLS, ReasoningOptions, ToolUse
from foreword.core.structured_output import ConstraintScope, Marker, StructuredOutput
from foreword.errors import InvalidRequest
from foreword.grammar.answer_grammar import AnswerGrammar, is_token, marker_text

# Fields of formats of the content alone, of which an answer of calls has none.
CONTENT_FIELDS: Final = ("response_format", "text.format", "output_config.format", "output_format")
EMBEDDABLE_TYPES: Final = ("json_schema", "json_object", "regex", "choice")


@dataclass(frozen=True, slots=True)
class ToolConstraint:
    """Constraint of an answer, and the schema keywords that it drops."""

    structured: StructuredOutput | None  # None: nothing
    dropped: tuple[str, ...] = ()  # "tools[3].function.parameters/properties/x: not"


@dataclass(frozen=True, slots=True)
class ConstraintTask:
    """Inputs of an answer's constraint: on its calls, its content and the length of its reasoning.

    Equal tasks have equal constraints; picklable, since a worker writes them.
    """

    bound: BoundFormat = dataclasses.field(compare=False)
    use: ToolUse = dataclasses.field(compare=False)
    reasoning: ReasoningOptions
    starts_in_reasoning: bool  # whether the rendered prompt opened a reasoning block
    # Of the content; with tools, the answer is a call or such a document.
    response_format: StructuredOutput | None
    _key: Hashable = dataclasses.field(init=False, repr=False)  # format and tools

    def __post_init__(self) -> None:
        tools = [
            (
                tool.name,
                tool.parameters,
                tool.strict,
                tool.is_custom,
                tool.input_grammar and [tool.input_grammar.constraint_type, tool.input_grammar.text],
                tool.schema_field,
            )
            for tool in self.use.tools
        ]
        key = (
            self.bound.format,
            *sorted(self.bound.token_ids.items()),
            json.dumps(tools, default=dict),
            self.use.choice,
            self.use.allowed,
            self.use.parallel,
        )
        object.__setattr__(self, "_key", key)

    @property
    def field(self) -> str:
        """The field that errors name."""
        document = None if self.use.callable_tools else self.response_format
        return "tools" if document is None else document.field

    def constrain(self) -> ToolConstraint:
        """Raises InvalidRequest for a schema or grammar that cannot be enforced, unless it may be dropped."""
        if not self.use.callable_tools or self.bound.format.tools is None:
            return ToolConstraint(_constrain_content(self))
        try:
            return _constrain_calls(self)
        except RecursionError:
            raise InvalidRequest("tools: a schema is nested too deeply", "tools") from None


def _constrain_calls(task: ConstraintTask) -> ToolConstraint:
    """The constraint on an answer with tools."""
    bound, use, document = task.bound, task.use, task.response_format
    calls = bound.format.tools
    assert calls is not None, "the format has no calls"
    if document is not None and use.choice == "required":
        if not document.field.startswith(CONTENT_FIELDS):
            raise InvalidRequest(
                f"{document.field} constrains the answer, and cannot be used with a tool_choice that asks "
                'for a call: send tool_choice "auto" or "none"',
                document.field,
            )
        document = None
    scope = _reasoning_scope(bound, task.reasoning, task.starts_in_reasoning)
    grammar = AnswerGrammar(bound, use)
    trigger, rest = _split_trigger(bound, calls)
    if use.choice == "required" or document is not None:
        body = grammar.after_reasoning(grammar.whole_answer(document), scope)
        if not scope.holds_reasoning:
            usual = () if document is not None else _usual_begin(bound, calls.begin + calls.call)
            scope = replace(scope, early_begin=_early_begin(bound, calls), usual=usual)
    elif trigger:
        body = grammar.after_trigger(trigger, rest)
        reasoning_format = bound.format.reasoning
        scope = replace(
            scope,
            holds_reasoning=False,
            trigger=trigger,
            usual=(*rest, *_usual_begin(bound, (calls.begin + calls.call)[1:])),
            is_trigger_in_reasoning=reasoning_format is not None and reasoning_format.ended_by_call,
        )
    else:
        body = grammar.text_with_calls(scope)
        if calls.opens_answer and not scope.holds_reasoning:
            scope = replace(scope, opening=calls.first[0] if isinstance(calls.first, str) else "{")
    structured = StructuredOutput("tools", grammar.finish(body), field="tools", scope=scope)
    return ToolConstraint(structured, grammar.dropped)


def may_follow_space(document: StructuredOutput | None) -> bool | None:
    """Whether whitespace before constrained content is no part of it; None: content is free."""
    return None if document is None else document.may_follow_space


def _reasoning_scope(
    bound: BoundFormat, options: ReasoningOptions, starts_in_reasoning: bool
) -> ConstraintScope:
    reasoning = bound.format.reasoning
    if reasoning is None:
        return ConstraintScope()
    begin, end = bound.pieces(reasoning.begin), bound.pieces(reasoning.end)
    may_begin = options.enabled is not False
    is_one_token = is_token(end) and (starts_in_reasoning or is_token(begin))
    return ConstraintScope(
        reasoning_begin=begin if may_begin else (),
        reasoning_end=end,
        starts_in_reasoning=starts_in_reasoning,
        max_reasoning_tokens=options.budget_tokens,
        holds_reasoning=not is_one_token and (may_begin or starts_in_reasoning),
    )


def _constrain_content(task: ConstraintTask) -> StructuredOutput | None:
    """The constraint on an answer without tools."""
    bound, document = task.bound, task.response_format
    if document is None and task.reasoning.budget_tokens is None:
        return None
    scope = _reasoning_scope(bound, task.reasoning, task.starts_in_reasoning)
    has_budget = scope.max_reasoning_tokens is not None
    if document is None:
        free = replace(scope, constrains=False, holds_reasoning=False)
        any_text = f"start: {ANY_TEXT}"
        return StructuredOutput("tools", any_text, field="reasoning", scope=free) if has_budget else None
    name = document.field
    if document.after is not None:
        if has_budget:
            raise InvalidRequest(
                f"{name}.after cannot be combined with a limit of the reasoning", f"{name}.after"
            )
        return document
    if not scope.reasoning_end and not bound.format.content:
        return document
    if document.constraint_type in EMBEDDABLE_TYPES:
        return StructuredOutput("tools", _embed_document(bound, scope, document), field=name, scope=scope)
    if not scope.holds_reasoning:
        return replace(document, scope=scope)
    if has_budget:
        kind = document.constraint_type
        raise InvalidRequest(f"{name}: {kind} cannot be combined with a limit of the reasoning", name)
    return replace(document, after=marker_text(scope.reasoning_end)) if task.starts_in_reasoning else document


def _embed_document(bound: BoundFormat, scope: ConstraintScope, document: StructuredOutput) -> str:
    """The grammar of an answer that is a document."""
    grammar = AnswerGrammar(bound, NO_TOOLS)
    return grammar.finish(grammar.after_reasoning(grammar.document(document), scope))


def _usual_begin(bound: BoundFormat, parts: Iterable[Part]) -> Marker:
    """The template's text up to the name of the tool, or its id."""
    marker: list[str | int] = []
    for part in parts:
        if isinstance(part, str):
            marker += bound.pieces(part)
        else:
            if isinstance(part, JsonCall):
                marker.append(part.opening)
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
    first = calls.first
    if bound.format.reasoning is None or not bound.format.reasoning.ended_by_call:
        return None
    pieces = bound.pieces(first) if isinstance(first, str) else ()
    return pieces[0] if pieces and isinstance(pieces[0], int) else None


def _split_trigger(bound: BoundFormat, calls: ToolFormat) -> tuple[Marker, Marker]:
    """The tokens that open a section, and the rest of its first text; () if a text opens it.

    The last character of a longer trigger is left to the grammar: it may merge with the text after it.
    """
    first = calls.first
    pieces = bound.pieces(first) if isinstance(first, str) else ()
    start = next((i for i, piece in enumerate(pieces) if isinstance(piece, int)), None)
    if start is None or calls.opens_answer:
        return (), ()
    trigger, last = pieces[start:], pieces[-1]
    if isinstance(last, str) and not last[-1].isalnum():
        return (*trigger[:-1], *filter(None, (last[:-1],))), (last[-1],)
    return trigger, ()
