"""POST /v1/embeddings"""

from __future__ import annotations

import asyncio
import time
import uuid
from array import array
from base64 import b64encode
from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from foreword.embedding.vectors import FLOAT_BYTES, normalize_embedding
from foreword.errors import InvalidRequest
from foreword.server.answering.embeddings import TokenizeOptions, get_embedder, tokenize_inputs, with_metrics
from foreword.server.apis.embeddings.body import EmbeddingBody
from foreword.server.auth.keys import PermissionsDep
from foreword.server.http.responses import CLIENT_CLOSED, JSONResponse
from foreword.server.loaded_model import offload_if_large
from foreword.server.registry import ModelsDep

router = APIRouter()
THREAD_MIN_BYTES = (1 << 15) * FLOAT_BYTES  # vectors above which JSON is written in a thread


@router.post("/v1/embeddings")
async def embeddings(
    body: EmbeddingBody, request: Request, permissions: PermissionsDep, models: ModelsDep
) -> Response:
    """Vectors of texts."""
    models.check_fields(body, request)
    server = await models.acquire(body.model, permissions, request, allow_encoder=True)
    embedder = get_embedder(server, body.model, permissions)
    context = server.request_context(permissions, body)
    inputs, normalize = body.inputs(), body.should_normalize
    server.admission.check(len(inputs), context.meter)
    options = TokenizeOptions(
        body.truncate_prompt_tokens, body.add_special_tokens is not False, body.prompt_name
    )
    named = {f"input[{index}]": text for index, text in enumerate(inputs)}
    ids = await offload_if_large(request, lambda: tokenize_inputs(embedder, named, options))
    num_tokens = sum(map(len, ids))

    async def embed() -> list[bytes]:
        vectors = await embedder.embed(ids, body.pooling, context)
        hidden_size = len(vectors[0]) // FLOAT_BYTES
        if body.dimensions is not None and body.dimensions > hidden_size:
            problem = f"dimensions must be at most {hidden_size}, got {body.dimensions}"
            raise InvalidRequest(problem, "dimensions")
        return vectors

    vectors = await with_metrics(
        server,
        request,
        context,
        embedder.name,
        "embed",
        len(ids),
        num_tokens,
        embed,
    )
    if vectors is None:
        return Response(status_code=CLIENT_CLOSED)

    def build_response() -> Response:
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

    if sum(map(len, vectors)) > THREAD_MIN_BYTES:
        return await asyncio.to_thread(build_response)
    return build_response()


def _embedding_data(vectors: Sequence[array[float]], base64: bool) -> list[dict[str, object]]:
    encoded = [b64encode(vector).decode() if base64 else vector.tolist() for vector in vectors]
    return [
        {"object": "embedding", "index": index, "embedding": value} for index, value in enumerate(encoded)
    ]
