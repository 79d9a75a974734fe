"""POST /v1/embeddings, /v1/rerank and /v1/score, also under the paths of Jina, Cohere and vLLM"""

from __future__ import annotations

import time
import uuid
from array import array
from base64 import b64encode
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from foreword.embedding.encoder_messages import FLOAT_BYTES, normalize_embedding
from foreword.errors import InvalidRequest, shown
from foreword.server.answering.embeddings import (
    TokenizeOptions,
    get_embedder,
    tokenize_inputs,
    with_metrics,
)
from foreword.server.apis.body import TABLES, RequestBody, TextOrIds, TextsOrIds, is_token_ids
from foreword.server.auth.keys import PermissionsDep
from foreword.server.http.responses import CLIENT_CLOSED, json_pieces
from foreword.server.intake import IntakeRoute
from foreword.server.registry import ModelsDep
from foreword.utils.threads import join_in_own_thread

MAX_INPUTS = 2048  # inputs of one request, OpenAI's limit
router = APIRouter(route_class=IntakeRoute)
THREAD_MIN_BYTES = (1 << 15) * FLOAT_BYTES  # vectors above which JSON is written in a thread
VECTOR_LEVELS = 3  # lists and maps of an answer around a vector


class PoolingBody(RequestBody):
    """Fields of every request for vectors or scores."""

    peer_fields = TABLES["pooling"]
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None  # -1: the model's limit


class EmbeddingBody(PoolingBody):
    """OpenAI's fields, vLLM's, and `pooling` and `prompt_name`."""

    peer_fields = TABLES["embedding"]
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
                f"input must be a text, token ids, or a list of either, not empty, got {shown(given)}",
                "input",
            )
        if len(given) > MAX_INPUTS:
            raise InvalidRequest(f"input has {len(given)} items; at most {MAX_INPUTS} are taken", "input")
        for index, item in enumerate(given):
            if not isinstance(item, str) and not (item and is_token_ids(item)):
                name = f"input[{index}]"
                raise InvalidRequest(
                    f"{name} must be a text or token ids, not empty, got {shown(item)}", name
                )
        return given


@router.post("/v1/embeddings")
async def embeddings(
    body: EmbeddingBody, request: Request, permissions: PermissionsDep, models: ModelsDep
) -> Response:
    """Vectors of texts."""
    await models.check_fields(body, request)
    server = await models.acquire(body.model, permissions, request, allow_encoder=True)
    embedder = get_embedder(server, body.model, permissions)
    context = server.request_context(permissions, body)
    normalize = body.should_normalize
    if body.dimensions is not None and body.dimensions > embedder.hidden_size:
        problem = f"dimensions must be at most {embedder.hidden_size}, got {body.dimensions}"
        raise InvalidRequest(problem, "dimensions")
    inputs = await server.intake.offload_if_large(request, body.inputs)
    server.admission.check(len(inputs), context.meter)
    options = TokenizeOptions(
        body.truncate_prompt_tokens, body.add_special_tokens is not False, body.prompt_name
    )
    named = {f"input[{index}]": text for index, text in enumerate(inputs)}
    ids = await server.intake.offload_if_large(request, lambda: tokenize_inputs(embedder, named, options))
    num_tokens = sum(map(len, ids))

    vectors = await with_metrics(
        server,
        request,
        context,
        embedder.name,
        "embed",
        len(ids),
        num_tokens,
        lambda: embedder.embed(ids, body.pooling, context),
    )
    if vectors is None:
        return Response(status_code=CLIENT_CLOSED)

    def pieces() -> Iterator[bytes]:
        values = [normalize_embedding(vector, body.dimensions, normalize) for vector in vectors]
        answer = {
            "object": "list",
            "id": f"embd-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": embedder.name,
            "data": _embedding_data(values, body.encoding_format == "base64"),
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        return json_pieces(answer, VECTOR_LEVELS)

    is_large = sum(map(len, vectors)) > THREAD_MIN_BYTES
    content = await join_in_own_thread(pieces) if is_large else b"".join(pieces())
    return Response(content, media_type="application/json")


def _embedding_data(vectors: Sequence[array[float]], base64: bool) -> list[dict[str, object]]:
    encoded = [b64encode(vector).decode() if base64 else vector.tolist() for vector in vectors]
    return [
        {"object": "embedding", "index": index, "embedding": value} for index, value in enumerate(encoded)
    ]
