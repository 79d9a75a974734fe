"""From engine requests to an HTTP response, streamed or whole."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastapi import Response
from starlette.types import Receive, Scope, Send

from foreword.core.params import SamplingParams
from foreword.serve.disconnect import CLIENT_CLOSED, unless_disconnected
from foreword.serve.generation import Generation
from foreword.serve.schema.sampling import SamplingBody
from foreword.serve.sse import AnswerStream
from foreword.serve.state import Server
from foreword.serve.wire import Json
from foreword.serve.writer import Head, Wanted, Writer

__all__ = ["head_of", "respond", "wanted_of"]


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


def respond(generation: Generation, writer: Writer, stream: bool) -> Response:
    """Start the engine's work; what can be refused has been refused before, or is now."""
    generation.start()
    return AnswerStream(generation, writer) if stream else WholeAnswer(generation, writer)


class WholeAnswer(Response):
    """An answer in one piece. It is waited for when its route is over: of what was sent nothing is kept so long."""

    def __init__(self, generation: Generation, writer: Writer) -> None:
        super().__init__()
        self._generation = generation
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await unless_disconnected(receive, _whole(self._generation, self._writer))
        finally:
            self._generation.close()
        response = Response(status_code=CLIENT_CLOSED) if body is None else Json(body)
        await response(scope, receive, send)


async def _whole(generation: Generation, writer: Writer) -> dict[str, Any]:
    await generation.collect()
    writer.returned(len(writer.chosen()))
    return writer.whole()
