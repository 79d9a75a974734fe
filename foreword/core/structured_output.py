"""Structured output: the user's constraint, a request's grammar (see foreword/grammar), the vocabulary."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from foreword.errors import InvalidRequest, shown

if TYPE_CHECKING:  # a client needs no torch
    from torch import Tensor

# `tools` is written by grammar.tool_calls; the others by users.
CONSTRAINT_TYPES = (
    *("json_schema", "json_object", "regex", "choice", "lark", "gbnf", "structural_tag"),
    "tools",
)
MAX_CONSTRAINT_BYTES = 1 << 20  # bytes of `text`
MAX_TOOLS_BYTES = 4 << 20  # bytes of the `text` of tools


# A text that divides an answer, as texts and ids. Only its token counts where there is an id.
Marker = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class ConstraintScope:
    """The parts of an answer that its constraint leaves alone: reasoning, and text before a trigger."""

    reasoning_begin: Marker = ()  # (): the model opens no reasoning of its own
    reasoning_end: Marker = ()
    starts_in_reasoning: bool = False  # the prompt has opened it
    max_reasoning_tokens: int | None = None  # markers excluded; then `reasoning_end` is forced
    holds_reasoning: bool = False  # the grammar covers the reasoning; the scope only counts its tokens
    trigger: Marker = ()  # the constraint starts after it; (): after the reasoning
    opening: str = ""  # the constraint is for answers that begin so, after whitespace; "": for all
    is_trigger_in_reasoning: bool = False  # the trigger ends the reasoning as well
    early_begin: int | None = None  # a token that ends the reasoning and begins the constrained text
    constrains: bool = True  # False: only the thinking budget applies
    usual: Marker = ()  # template spelling of the start, proposed as a draft

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids in its markers."""
        markers = (self.reasoning_begin, self.reasoning_end, self.trigger, self.usual, (self.early_begin,))
        return tuple(part for marker in markers for part in marker if isinstance(part, int))


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """One constraint on the output text, made by `json_schema`, `regex`, `choice` and others below.

    Raises InvalidRequest. foreword.grammar checks that `text` is valid for its type.
    """

    constraint_type: str  # one of CONSTRAINT_TYPES
    # json_schema: the schema as JSON; regex: the expression; choice: a JSON list of strings; lark, gbnf:
    # the grammar; structural_tag: its description as JSON; json_object: empty; tools: Lark of
    # grammar.tool_calls. Too long for a log.
    text: str = dataclasses.field(default="", repr=False)
    whitespace: bool = True  # JSON may contain (bounded) whitespace; see docs/structured-output.md
    after: str | None = None  # starts after this text, for reasoning models; None: at once
    field: str = "structured_outputs"  # the user's name of the field, for errors
    scope: ConstraintScope | None = None  # None: the whole answer, or what follows `after`

    def __post_init__(self) -> None:
        if self.constraint_type not in CONSTRAINT_TYPES:
            known = ", ".join(CONSTRAINT_TYPES)
            raise InvalidRequest(
                f"{self.field} must be one of {known}, got {shown(self.constraint_type)}", self.field
            )
        if not isinstance(self.text, str) or (not self.text and self.constraint_type != "json_object"):
            raise InvalidRequest(f"{self.field}: {self.constraint_type} must not be empty", self.field)
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"{self.field} is not Unicode: a lone surrogate at character {error.start}", self.field
            ) from None
        limit = MAX_TOOLS_BYTES if self.constraint_type == "tools" else MAX_CONSTRAINT_BYTES
        if size > limit:
            raise InvalidRequest(f"{self.field} has {size} bytes; the limit is {limit}", self.field)
        if self.after is not None and (not isinstance(self.after, str) or not self.after):
            raise InvalidRequest(f"{self.field}.after must be a non-empty string", self.field)

    @property
    def may_follow_space(self) -> bool:
        """Whether whitespace may precede the text and is no part of it.

        Models write some behind their reasoning, before JSON too; another constraint may begin with its own.
        """
        return self.whitespace and self.constraint_type in ("json_schema", "json_object")

    @classmethod
    def json_schema(cls, schema: Any, **options: Any) -> StructuredOutput:
        """A JSON document that conforms to the schema.

        schema  JSON Schema as a mapping, boolean or JSON text, or a pydantic model class
        """
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        field = options.get("field", "structured_outputs")
        if not isinstance(schema, str | Mapping | bool):
            raise InvalidRequest(f"{field} must be a JSON schema, got {shown(schema)}", field)
        return cls("json_schema", schema if isinstance(schema, str) else _to_json(schema, field), **options)

    @classmethod
    def json_object(cls, **options: Any) -> StructuredOutput:
        """Any JSON object."""
        return cls("json_object", **options)

    @classmethod
    def regex(cls, pattern: str, **options: Any) -> StructuredOutput:
        """A text that the expression matches from start to end."""
        return cls("regex", pattern, **options)

    @classmethod
    def choice(cls, texts: Sequence[str], **options: Any) -> StructuredOutput:
        """One of these texts."""
        field = options.get("field", "structured_outputs")
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise InvalidRequest(f"{field} must be a list of non-empty strings, got {shown(texts)}", field)
        return cls("choice", _to_json(list(texts), field), **options)

    @classmethod
    def grammar(cls, text: str, **options: Any) -> StructuredOutput:
        """A text of this grammar: GBNF (llama.cpp) if its rules use `::=`, else Lark."""
        return cls("gbnf" if isinstance(text, str) and "::=" in text else "lark", text, **options)

    @classmethod
    def structural_tag(cls, description: str | Mapping[str, Any], **options: Any) -> StructuredOutput:
        """Free text with constrained parts."""
        field = options.get("field", "structured_outputs")
        text = description if isinstance(description, str) else _to_json(description, field)
        return cls("structural_tag", text, **options)


def _to_json(value: object, field: str) -> str:
    """Compact JSON in the given order, which is the order of a schema's properties in the output."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field} cannot be written as JSON: {error}", field) from None


class RequestGrammar(Protocol):
    """The constraint on one request, positioned at the end of its committed output.

    It does not raise if the automaton exceeds a size limit: `error` gives the reason, and all ids are masked.
    Behind a draft they are masked without an `error`, which comes once the draft's tokens are output.
    """

    error: str | None

    def accept(self, token_ids: Sequence[int]) -> None:
        """Advance over committed output; tokens after the grammar's end are ignored."""

    def num_legal(self, draft: Sequence[int]) -> int:
        """Length of the longest legal prefix of a draft; stop tokens are legal where the output may end."""

    def forced(self, max_tokens: int) -> tuple[int, ...]:
        """Tokens of the text that must follow, most likely tokenized so; the stop id if it must end."""

    def mask(self, draft: tuple[int, ...]) -> Tensor | None:
        """Ids that may follow output and draft: int32 [ceil(V / 32)], bit i % 32 of word i // 32 for id i.

        None: unconstrained (before the reasoning ends, or after the grammar's end). `draft` is legal.
        """

    def reset(self) -> None:
        """Rebuild from the committed output, after an interrupted step."""

    def is_open(self, draft: Sequence[int]) -> bool:
        """Whether the constraint applies behind output and draft, so that EOS ends its text."""

    def must_end(self, draft: tuple[int, ...]) -> bool:
        """Whether only a stop id may follow output and draft."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as plain values (picklable)."""

    tokens: tuple[bytes, ...]  # bytes of each id; empty for ids without a token
    special_ids: tuple[int, ...]  # ascending
    eos_ids: tuple[int, ...]
    marker_ids: tuple[int, ...] = ()  # markers of chat formats, special or not: no text of a call holds them
    tokenizer: str = ""  # as in tokenizer.json, for drafters that write text
