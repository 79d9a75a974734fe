"""What an answer must look like, as the caller asked for it.

What the engine sees of the grammar of one request. Implemented in foreword/grammar.

What the tokens of a model spell: all that a grammar must know of a tokenizer.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from foreword.errors import InvalidRequest

if TYPE_CHECKING:  # whoever only submits requests needs no torch
    from torch import Tensor

__all__ = ["CONSTRAINT_TYPES", "RequestGrammar", "StructuredOutput", "Vocabulary"]

CONSTRAINT_TYPES = ("json_schema", "json_object", "regex", "choice", "lark", "gbnf", "structural_tag")
MAX_CONSTRAINT_BYTES = 1 << 20  # of `text`


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """One constraint on the text of an answer; `json_schema`, `regex`, `choice` and `grammar` below make the usual ones.

    kind        one of KINDS
    text        json_schema: the schema as JSON; regex: the expression; choice: a JSON list of texts; lark, gbnf: the
                grammar; structural_tag: its description as JSON; json_object: empty
    whitespace  JSON may hold whitespace between its parts (bounded; see docs/structured-output.md)
    after       the constraint begins behind this text, for models that reason first; None: at the first token
    field       what the caller calls the field, for errors

    Raises InvalidRequest. Whether `text` means anything is for foreword.grammar to say.
    """

    constraint_type: str
    text: str = dataclasses.field(default="", repr=False)  # long, and nothing for a log
    whitespace: bool = True
    after: str | None = None
    field: str = "structured_outputs"

    def __post_init__(self) -> None:
        if self.constraint_type not in CONSTRAINT_TYPES:
            raise InvalidRequest(
                f"{self.field} must be one of {', '.join(CONSTRAINT_TYPES)}, got {self.constraint_type!r:.80}",
                self.field,
            )
        if not isinstance(self.text, str) or (not self.text and self.constraint_type != "json_object"):
            raise InvalidRequest(
                f"{self.field} must hold a {self.constraint_type} that is not empty", self.field
            )
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"{self.field} is not Unicode: a lone surrogate at character {error.start}", self.field
            ) from None
        if size > MAX_CONSTRAINT_BYTES:
            raise InvalidRequest(
                f"{self.field} has {size} bytes; at most {MAX_CONSTRAINT_BYTES} are taken", self.field
            )
        if self.after is not None and (not isinstance(self.after, str) or not self.after):
            raise InvalidRequest(f"{self.field}.after must be a text that is not empty", self.field)

    @classmethod
    def json_schema(cls, schema: Any, **options: Any) -> StructuredOutput:
        """A JSON document that conforms.

        schema  JSON Schema as a mapping, a boolean or its text; or a class that has one, such as a pydantic model
        """
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        field = options.get("field", "structured_outputs")
        if not isinstance(schema, str | Mapping | bool):
            raise InvalidRequest(f"{field} must be a JSON schema, got {schema!r:.80}", field)
        return cls("json_schema", schema if isinstance(schema, str) else _to_json(schema, field), **options)

    @classmethod
    def json_object(cls, **options: Any) -> StructuredOutput:
        """Any JSON object."""
        return cls("json_object", **options)

    @classmethod
    def regex(cls, pattern: str, **options: Any) -> StructuredOutput:
        """A text that the whole expression matches."""
        return cls("regex", pattern, **options)

    @classmethod
    def choice(cls, texts: Sequence[str], **options: Any) -> StructuredOutput:
        """One of these texts."""
        field = options.get("field", "structured_outputs")
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise InvalidRequest(
                f"{field} must be a list of texts, none of them empty, got {texts!r:.80}", field
            )
        return cls("choice", _to_json(list(texts), field), **options)

    @classmethod
    def grammar(cls, text: str, **options: Any) -> StructuredOutput:
        """A text of this grammar: GBNF (as llama.cpp's) where rules are written with `::=`, else Lark."""
        return cls("gbnf" if isinstance(text, str) and "::=" in text else "lark", text, **options)

    @classmethod
    def structural_tag(cls, description: str | Mapping[str, Any], **options: Any) -> StructuredOutput:
        """Free text with constrained parts."""
        field = options.get("field", "structured_outputs")
        text = description if isinstance(description, str) else _to_json(description, field)
        return cls("structural_tag", text, **options)


def _to_json(value: object, field: str) -> str:
    """Compact, in the order given: a schema's properties are written in it."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field} cannot be written as JSON: {error}", field) from None


class RequestGrammar(Protocol):
    """The constraint on one request's output, at the end of its committed output.

    It never raises because of its grammar: where the automaton gives up (a limit on its size is reached), `error` says why,
    and from then on everything is masked.
    """

    error: str | None

    def accept(self, token_ids: Sequence[int]) -> None:
        """Output tokens were committed. Tokens behind the end of the answer are none of its business."""

    def num_legal(self, draft: Sequence[int]) -> int:
        """How many tokens of a draft may follow the output: 0..len(draft). Ending tokens count where the answer may end."""

    def forced(self, max_tokens: int) -> tuple[int, ...]:
        """Tokens that must follow, most likely in this spelling, and the id that ends the answer where only that is left."""

    def mask(self, draft: tuple[int, ...]) -> Tensor | None:
        """The ids that may follow output and draft: int32 [ceil(V / 32)], bit i % 32 of word i // 32 for id i.

        None: nothing is constrained there (the model still reasons, or the answer is over). `draft` is legal.
        """

    def reset(self) -> None:
        """Begin again from the committed output: a step was interrupted, and nobody knows where."""

    def must_end(self, draft: tuple[int, ...]) -> bool:
        """Nothing but the end of the answer may follow output and draft."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as plain values (picklable).

    tokens         bytes of each id below the tokenizer's size; empty where no token has the id
    special_ids    ids of special tokens, ascending
    eos_ids        ids that end an answer
    """

    tokens: tuple[bytes, ...]
    special_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
