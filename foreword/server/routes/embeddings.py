"""POST /v1/embeddings"""

from __future__ import annotations

import asyncio
import time
import uuid
from array import array
from base64 import b64encode
from collections.abc import Coroutine, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from foreword.embedding.vectors import FLOAT_BYTES, normalize_embedding
from foreword.errors import InvalidRequest
from foreword.server.auth.keys import PermissionsDep
from foreword.server.context import ServerDep, offload_if_large
from foreword.server.disconnect import CLIENT_CLOSED
from foreword.server.embeddings import TokenizeOptions, get_embedder, tokenize_inputs, with_metrics
from foreword.server.json_response import JSONResponse
from foreword.server.protocol.embeddings import EmbeddingBody

__all__ = ["router"]

router = APIRouter()
THREAD_MIN_VALUES = 1 << 15  # that are written out in a thread: others would wait


@router.post("/v1/embeddings")
async def embeddings(
    body: EmbeddingBody, request: Request, permissions: PermissionsDep, server: ServerDep
) -> Response:
    """Vectors of texts."""
    embedder = get_embedder(server, body.model, permissions)
    caller = server.request_context(permissions, body.priority)
    inputs, normalize = body.inputs(), body.should_normalize
    server.admission.check(len(inputs), caller.meter)
    reading = TokenizeOptions(
        body.truncate_prompt_tokens, body.add_special_tokens is not False, body.prompt_name
    )
    named = {f"input[{index}]": text for index, text in enumerate(inputs)}
    ids = await offload_if_large(request, lambda: tokenize_inputs(embedder, named, reading))
    num_tokens = sum(map(len, ids))

    def work() -> Coroutine[Any, Any, list[bytes]]:
        return embedder.embed(ids, body.pooling, caller)

    vectors = await with_metrics(server, request, caller, "embed", len(ids), num_tokens, work)
    if vectors is None:
        return Response(status_code=CLIENT_CLOSED)
    _check_dimensions(body.dimensions, vectors)

    def answer() -> Response:
        values = [normalize_embedding(vector, body.dimensions, normalize) for vector in vectors]
        return JSONResponse(
            {
                "object": "list",
                "id": f"embd-{uuid.uuid4().hex}",
                "created": int(time.time()),
                "model": embedder.name,
                "data": _embedding_data(values, body.encoding_format == "base64"),
                "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            }
        )

    return (
        await asyncio.to_thread(answer)
        if sum(map(len, vectors)) > THREAD_MIN_VALUES * FLOAT_BYTES
        else answer()
    )


def _check_dimensions(dimensions: int | None, vectors: Sequence[bytes]) -> None:
    size = len(vectors[0]) // FLOAT_BYTES
    if dimensions is not None and dimensions > size:
        raise InvalidRequest(f"dimensions must be at most {size}, got {dimensions}", "dimensions")


def _embedding_data(vectors: Sequence[array[float]], base64: bool) -> list[dict[str, object]]:
    return [
        {
            "object": "embedding",
            "index": index,
            "embedding": b64encode(vector).decode() if base64 else vector.tolist(),
        }
        for index, vector in enumerate(vectors)
    ]
