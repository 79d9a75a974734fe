"""Server-sent events, and noticing that nobody listens any more.

From engine requests to an HTTP response, streamed or whole.

Work that is for nobody once its client is gone.

JSON as it leaves the server: compact, UTF-8, and never a NaN.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from foreword.core.params import SamplingParams
from foreword.errors import ForewordError
from foreword.server.context import ServerContext
from foreword.server.disconnect import CLIENT_CLOSED, cancel_on_disconnect
from foreword.server.errors import error_body, error_response
from foreword.server.generation import Generation
from foreword.server.json_response import JSONResponse, json_bytes
from foreword.server.protocol.sampling import SamplingBody
from foreword.server.responses import ResponseBuilder, ResponseHeader, ResponseOptions

__all__ = [
    "SSEResponse",
    "final_error_event",
    "respond",
    "response_header",
    "response_options",
]

T = TypeVar("T")


DONE_EVENT = b"data: [DONE]\n\n"


class SSEResponse(Response):
    """Streams a generation as `data:` lines; a client that goes away frees it at once.

    The head waits for the first token: what fails before it is answered with its own status.
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
        try:
            async with aclosing(_events(self._generation, self._builder)) as lines:
                await self._send_events(lines, send)
        except ForewordError as error:
            await error_response(error)(scope, receive, send)

    async def _send_events(self, events: AsyncIterator[bytes], send: Send) -> None:
        line = await anext(events)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": line, "more_body": True})
        async for line in events:
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _events(generation: Generation, builder: ResponseBuilder) -> AsyncGenerator[bytes, None]:
    """Errors come last: clients stop reading at one, and the other choices are to be heard to their end.

    Raises the first error if no choice has said anything; then no line came before it.
    """
    errors: list[ForewordError] = []
    opened = False
    async for index, item in generation.deltas():
        if isinstance(item, ForewordError):
            errors.append(item)
            continue
        if not opened:
            opened = True
            for opening in builder.first_chunks():
                yield _event(opening)
        if (chunk := builder.chunk(index, item)) is not None:
            yield _event(chunk)
        if item.finish_reason is not None:
            builder.record_returned(1)  # whoever left before did not get it
    if not opened:
        raise errors[0]
    for line in _final_events(builder, errors):
        yield line
    yield DONE_EVENT


def _final_events(builder: ResponseBuilder, errors: Sequence[ForewordError]) -> Iterator[bytes]:
    for error in errors:
        yield _event(error_body(error))
    if not errors and (usage := builder.usage_chunk()) is not None:
        yield _event(usage)


def final_error_event(error: ForewordError) -> bytes:
    """How a stream ends that was cut off."""
    return _event(error_body(error)) + DONE_EVENT


def _event(value: Any) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"


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
