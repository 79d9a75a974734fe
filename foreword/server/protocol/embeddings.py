"""The body of /v1/embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from foreword.errors import InvalidRequest
from foreword.server.protocol.base import StrictModel

__all__ = ["MAX_INPUTS", "EmbeddingBody", "EmbeddingInput", "PoolingBody"]

MAX_INPUTS = 2048  # of one request, as OpenAI has it
_TEXT_SCHEMA = {"type": "string"}
_IDS_SCHEMA = {"type": "array", "items": {"type": "integer"}}
InputField = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT_SCHEMA,
                _IDS_SCHEMA,
                {"type": "array", "items": _TEXT_SCHEMA},
                {"type": "array", "items": _IDS_SCHEMA},
            ]
        }
    ),
]
EmbeddingInput = str | Sequence[int]


class PoolingBody(StrictModel):
    """Fields of all requests that yield vectors or scores.

    truncate_prompt_tokens  cut longer texts at their end to so many tokens; -1: to what the model takes
    """

    ignored: ClassVar[frozenset[str]] = frozenset({"user", "request_id"})
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "truncation_side": ("right",),
        "padding": ("do_not_pad",),
        "mm_processor_kwargs": ({},),
        "cache_salt": ("",),
    }
    model: str | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    priority: int | None = None


class EmbeddingBody(PoolingBody):
    """OpenAI's fields, vLLM's, and `pooling` and `prompt_name`.

    prompt_name  the text that the checkpoint wants in front of an input for this purpose, where it names any
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **PoolingBody.unsupported,
        "messages": (),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
    }
    input: InputField
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    pooling: str | None = None
    prompt_name: str | None = None
    add_special_tokens: bool | None = None

    @property
    def should_normalize(self) -> bool:
        """Vectors have length 1; `use_activation` is what vLLM calls it now. Raises InvalidRequest if the two differ."""
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise InvalidRequest("normalize and use_activation mean the same, and differ", "normalize")
        return self.normalize is not False and self.use_activation is not False

    def inputs(self) -> list[EmbeddingInput]:
        """Texts, or token ids. Raises InvalidRequest for what is neither."""
        given = self.input
        if isinstance(given, str) or _is_token_ids(given):
            return [given]
        if not isinstance(given, list) or not given:
            raise InvalidRequest(
                f"input must be a text, token ids, or a list of either, not empty, got {given!r:.80}", "input"
            )
        if len(given) > MAX_INPUTS:
            raise InvalidRequest(f"input has {len(given)} items; at most {MAX_INPUTS} are taken", "input")
        for index, item in enumerate(given):
            if not isinstance(item, str) and not _is_token_ids(item):
                raise InvalidRequest(
                    f"input[{index}] must be a text or token ids, not empty, got {item!r:.80}",
                    f"input[{index}]",
                )
        return given


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
