"""From engine requests to an HTTP response, streamed or whole."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastapi import Response
from starlette.types import Receive, Scope, Send

from foreword.core.params import SamplingParams
from foreword.serve.disconnect import CLIENT_CLOSED, cancel_on_disconnect
from foreword.serve.generation import Generation
from foreword.serve.schema.sampling import SamplingBody
from foreword.serve.sse import SSEResponse
from foreword.serve.state import ServerContext
from foreword.serve.wire import JSONResponse
from foreword.serve.writer import ResponseHeader, ResponseOptions, ResponseBuilder

__all__ = ["response_header", "respond", "response_options"]


def response_header(server: ServerContext, prefix: str, params: SamplingParams) -> ResponseHeader:
    assert params.seed is not None, "parameters that nobody settled"
    return ResponseHeader(
        id=f"{prefix}-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=server.model_name,
        system_fingerprint=server.info().fingerprint,
        seed=params.seed,
    )


def response_options(body: SamplingBody, params: SamplingParams) -> ResponseOptions:
    return ResponseOptions(
        logprobs=params.logprobs is not None,
        prompt_logprobs=body.prompt_logprobs is not None,
        metrics=bool(body.metrics),
        token_ids=bool(body.return_token_ids),
        usage=body.wants_usage,
        prediction=params.prediction is not None,
    )


def respond(generation: Generation, builder: ResponseBuilder, stream: bool) -> Response:
    """Start the engine's work; what can be refused has been refused before, or is now."""
    generation.start()
    return SSEResponse(generation, builder) if stream else FullResponse(generation, builder)


class FullResponse(Response):
    """An answer in one piece. It is waited for when its route is over: of what was sent nothing is kept so long."""

    def __init__(self, generation: Generation, builder: ResponseBuilder) -> None:
        super().__init__()
        self._generation = generation
        self._builder = builder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await cancel_on_disconnect(receive, _collect_body(self._generation, self._builder))
        finally:
            self._generation.close()
        response = Response(status_code=CLIENT_CLOSED) if body is None else JSONResponse(body)
        await response(scope, receive, send)


async def _collect_body(generation: Generation, builder: ResponseBuilder) -> dict[str, Any]:
    await generation.collect()
    builder.record_returned(len(builder.returned_choices()))
    return builder.full()
