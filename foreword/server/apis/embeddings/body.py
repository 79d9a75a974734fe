"""The body of /v1/embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from foreword.errors import InvalidRequest
from foreword.server.apis.body import RequestBody, TextOrIds, TextsOrIds, is_token_ids
from foreword.server.apis.ignored_fields import EMBEDDING, POOLING, IgnoredField

MAX_INPUTS = 2048  # inputs of one request, OpenAI's limit


class PoolingBody(RequestBody):
    """Fields of every request for vectors or scores."""

    peer_fields: ClassVar[Mapping[str, IgnoredField]] = POOLING
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None  # -1: the model's limit


class EmbeddingBody(PoolingBody):
    """OpenAI's fields, vLLM's, and `pooling` and `prompt_name`."""

    peer_fields: ClassVar[Mapping[str, IgnoredField]] = EMBEDDING
    input: TextsOrIds
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None  # vLLM's newer name of `normalize`
    pooling: str | None = None
    prompt_name: str | None = None  # one of the checkpoint's named prefixes
    add_special_tokens: bool | None = None

    @property
    def should_normalize(self) -> bool:
        """Raises InvalidRequest if normalize and use_activation differ."""
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise InvalidRequest("normalize and use_activation mean the same, and differ", "normalize")
        return self.normalize is not False and self.use_activation is not False

    def inputs(self) -> list[TextOrIds]:
        """Texts or token ids. Raises InvalidRequest."""
        given = self.input
        if isinstance(given, str) or (given and is_token_ids(given)):
            return [given]
        if not isinstance(given, list) or not given:
            raise InvalidRequest(
                f"input must be a text, token ids, or a list of either, not empty, got {given!r:.80}", "input"
            )
        if len(given) > MAX_INPUTS:
            raise InvalidRequest(f"input has {len(given)} items; at most {MAX_INPUTS} are taken", "input")
        for index, item in enumerate(given):
            if not isinstance(item, str) and not (item and is_token_ids(item)):
                name = f"input[{index}]"
                raise InvalidRequest(f"{name} must be a text or token ids, not empty, got {item!r:.80}", name)
        return given
