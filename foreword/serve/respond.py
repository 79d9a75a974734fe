"""From engine requests to an HTTP response, streamed or whole."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastapi import Request, Response

from foreword.core.params import SamplingParams
from foreword.serve.generation import Generation
from foreword.serve.schema.sampling import SamplingBody
from foreword.serve.sse import AnswerStream, unless_disconnected
from foreword.serve.state import Server
from foreword.serve.wire import Json
from foreword.serve.writer import Head, Wanted, Writer

__all__ = ["head_of", "respond", "wanted_of"]

CLIENT_CLOSED = 499


def head_of(server: Server, prefix: str, params: SamplingParams) -> Head:
    assert params.seed is not None, "parameters that nobody settled"
    return Head(
        id=f"{prefix}-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=server.model_name,
        system_fingerprint=server.info().fingerprint,
        seed=params.seed,
    )


def wanted_of(body: SamplingBody, params: SamplingParams) -> Wanted:
    return Wanted(
        logprobs=params.logprobs is not None,
        prompt_logprobs=body.prompt_logprobs is not None,
        metrics=bool(body.metrics),
        token_ids=bool(body.return_token_ids),
        usage=body.wants_usage,
        prediction=params.prediction is not None,
    )


async def respond(request: Request, generation: Generation, writer: Writer, stream: bool) -> Response:
    """Start the engine's work; what can be refused has been refused before, or is now."""
    generation.start()
    if stream:
        return AnswerStream(generation, writer)
    try:
        body = await unless_disconnected(request.receive, _whole(generation, writer))
    finally:
        generation.close()
    return Response(status_code=CLIENT_CLOSED) if body is None else Json(body)


async def _whole(generation: Generation, writer: Writer) -> dict[str, Any]:
    await generation.collect()
    writer.returned(len(writer.chosen()))
    return writer.whole()
