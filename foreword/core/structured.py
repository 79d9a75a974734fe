"""What an answer must look like, as the caller asked for it."""

from __future__ import annotations

from dataclasses import dataclass

from foreword.errors import InvalidRequest

__all__ = ["KINDS", "StructuredOutput"]

KINDS = ("json_schema", "json_object", "regex", "choice", "lark", "gbnf", "structural_tag")
MAX_BYTES = 1 << 20  # of `text`


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """One constraint on the text of an answer.

    kind        one of KINDS
    text        json_schema: the schema as JSON; regex: the expression; choice: a JSON list of texts; lark, gbnf: the
                grammar; structural_tag: its description as JSON; json_object: empty
    whitespace  JSON may hold whitespace between its parts (bounded; see docs/structured-output.md)
    after       the constraint begins behind this text, for models that reason first; None: at the first token
    field       what the caller calls the field, for errors

    Raises InvalidRequest. Whether `text` means anything is for foreword.grammar to say.
    """

    kind: str
    text: str = ""
    whitespace: bool = True
    after: str | None = None
    field: str = "structured_outputs"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidRequest(f"{self.field} must be one of {', '.join(KINDS)}, got {self.kind!r:.80}", self.field)
        if not isinstance(self.text, str) or (not self.text and self.kind != "json_object"):
            raise InvalidRequest(f"{self.field} must hold a {self.kind} that is not empty", self.field)
        size = len(self.text.encode("utf-8", "surrogatepass"))
        if size > MAX_BYTES:
            raise InvalidRequest(f"{self.field} has {size} bytes; at most {MAX_BYTES} are taken", self.field)
        if self.after is not None and (not isinstance(self.after, str) or not self.after):
            raise InvalidRequest(f"{self.field}.after must be a text that is not empty", self.field)
