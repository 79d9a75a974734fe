"""From engine requests to an HTTP response: server-sent events, or one JSON body."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Response
from starlette.types import Receive, Scope, Send

from foreword.core.params import SamplingParams
from foreword.errors import ForewordError
from foreword.server.context import ServerContext
from foreword.server.errors import error_body, error_response
from foreword.server.generation import Generation
from foreword.server.http import CLIENT_CLOSED, JSONResponse, cancel_on_disconnect, sse_event
from foreword.server.protocol.sampling import SamplingBody
from foreword.server.responses import ResponseBuilder, ResponseHeader, ResponseOptions

__all__ = ["SSEResponse", "final_error_event", "respond", "response_header", "response_options"]

DONE_EVENT = b"data: [DONE]\n\n"


def response_header(server: ServerContext, prefix: str, params: SamplingParams) -> ResponseHeader:
    assert params.seed is not None, "the seed must be resolved first"
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
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        usage=body.wants_usage,
        continuous_usage=body.wants_continuous_usage,
        prediction=params.prediction is not None,
    )


def respond(generation: Generation, builder: ResponseBuilder, stream: bool) -> Response:
    """Submit the requests and return the response. Raises Overloaded, EngineDead."""
    generation.start()
    return SSEResponse(generation, builder) if stream else FullResponse(generation, builder)


class SSEResponse(Response):
    """Streams a generation as `data:` events; a disconnect frees it at once.

    The headers wait for the first token, so that an earlier error is answered with its own status.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, builder: ResponseBuilder) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._builder = builder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await cancel_on_disconnect(receive, self._send_all(scope, receive, send))
        finally:
            self._generation.close()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        try:
            async with aclosing(_events(self._generation, self._builder)) as events:
                event = await anext(events)
                await send(start)
                await send({"type": "http.response.body", "body": event, "more_body": True})
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ForewordError as error:
            await error_response(error)(scope, receive, send)


async def _events(generation: Generation, builder: ResponseBuilder) -> AsyncGenerator[bytes, None]:
    """Events of all choices. Errors come last, because clients stop reading at the first error.

    Raises the first error, before any event, if no choice has a token.
    """
    errors: list[ForewordError] = []
    started = False
    async for index, item in generation.deltas():
        if isinstance(item, ForewordError):
            errors.append(item)
            continue
        if not started:
            started = True
            for first_chunk in builder.first_chunks():
                yield sse_event(first_chunk)
        if (event := builder.event(index, item)) is not None:
            yield event
        if item.finish_reason is not None:
            builder.record_returned(1)  # after the yield: a client that disconnected did not get it
    if not started:
        raise errors[0]
    for error in errors:
        yield sse_event(error_body(error))
    if not errors and (usage := builder.usage_chunk()) is not None:
        yield sse_event(usage)
    yield DONE_EVENT


def final_error_event(error: ForewordError) -> bytes:
    """The last events of a stream that the server cuts off."""
    return sse_event(error_body(error)) + DONE_EVENT


class FullResponse(Response):
    """All choices in one JSON body. It waits after its route has returned, which frees the request's body."""

    def __init__(self, generation: Generation, builder: ResponseBuilder) -> None:
        super().__init__()
        self._generation = generation
        self._builder = builder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await cancel_on_disconnect(receive, self._collect_body())
        finally:
            self._generation.close()
        response = Response(status_code=CLIENT_CLOSED) if body is None else JSONResponse(body)
        await response(scope, receive, send)

    async def _collect_body(self) -> dict[str, Any]:
        await self._generation.collect()
        self._builder.record_returned(len(self._builder.returned_choices()))
        return self._builder.full()
