"""The constraint on an answer with tools, derived from the record of the model's chat format.

The answer is text until a trigger opens a call (`auto`), or calls and nothing else (`required`). A call has
the form of the record, the name of a callable tool, and arguments by that tool's schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Any, Final

from foreword.core.structured_output import AnswerGate, Marker, StructuredOutput
from foreword.errors import InvalidRequest
from foreword.formats.record import (
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
from foreword.formats.tools import ReasoningOptions, Tool, ToolUse
from foreword.grammar import limits
from foreword.grammar.compiler import constraint_body
from foreword.grammar.json_schema import WHITESPACE, GrammarError, convert_schema
from foreword.grammar.lark import escape_char, lark_regex

__all__ = ["ToolConstraint", "tool_constraint"]

ANY_TEXT: Final = "/(?s:.*)/"
SPACES: Final = r"[ \t\r\n]"
MAX_SPACES: Final = 16
JSON_SPACE: Final = f"({WHITESPACE})?"
PLAIN_CHARS: Final = frozenset(' _,:;=<>"\'%!@&')  # of a regular expression, besides letters and digits
NUMBER: Final = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"
PYTHON_STRING: Final = r"'([^'\\\x00-\x1f]|\\[\\'\"nrtbf]|\\u[0-9a-fA-F]{4})*'"
JSON_STRING: Final = r'"([^"\\\x00-\x1f]|\\["\\\/bfnrt]|\\u[0-9a-fA-F]{4})*"'
KEY: Final = "[a-zA-Z_][a-zA-Z0-9_.-]*"
MAX_ANY_ORDER: Final = 64  # bits of llguidance's parameter; more arguments come in the schema's order
MAX_REFERENCES: Final = 100  # followed to a schema
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
    tools, calls = use.callable_tools, bound.format.tools
    gate = _reasoning_gate(bound, reasoning, starts_in_reasoning)
    if not tools or calls is None:
        return ToolConstraint(_constrain_content(bound, gate, response_format))
    described = _describe(use, tools)
    if use.choice != "auto" or response_format is not None:
        document = response_format if use.choice == "auto" else None
        lark, dropped = _whole_answer(bound, calls, described, use.parallel, gate, document)
        return ToolConstraint(StructuredOutput("tools", lark, field="tools", gate=gate), dropped)
    trigger, rest = _split_trigger(bound, calls)
    if trigger:
        lark, dropped = _after_trigger(bound, calls, described, use.parallel, trigger, rest)
        fmt = bound.format.reasoning
        gate = AnswerGate(
            **{name: getattr(gate, name) for name in ("reasoning_begin", "reasoning_end", "starts_in_reasoning")},
            max_reasoning_tokens=gate.max_reasoning_tokens,
            trigger=trigger,
            is_trigger_in_reasoning=fmt is not None and fmt.ended_by_call,
        )
    else:
        lark, dropped = _text_with_calls(bound, calls, described, use.parallel, gate)
    return ToolConstraint(StructuredOutput("tools", lark, field="tools", gate=gate), dropped)
