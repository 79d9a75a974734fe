"""From engine requests to an HTTP response: server-sent events, or one JSON body."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any, Protocol

from fastapi import Response
from starlette.types import Receive, Scope, Send

from foreword.core.params import SamplingParams
from foreword.errors import ForewordError
from foreword.server.answering.generation import Generation
from foreword.server.apis.chat.body import ReasoningBody
from foreword.server.apis.choices_writer import ResponseHeader, ResponseOptions, is_large
from foreword.server.apis.sampling import SamplingBody
from foreword.server.http.errors import error_response
from foreword.server.http.responses import (
    CLIENT_CLOSED,
    EVENT_STREAM,
    STREAM_HEADERS,
    cancel_on_disconnect,
    json_bytes,
    json_pieces,
)
from foreword.server.loaded_model import LoadedModel
from foreword.tokenizer.output_processor import OutputDelta
from foreword.utils.threads import join_in_own_thread, run_in_own_thread


class ResponseWriter(Protocol):
    """Writes a generation in the form of one API, whole or as server-sent events."""

    keeps_logprobs: bool  # its last events write all log-probabilities of a stream again

    @property
    def num_returned(self) -> int:
        """Choices of a whole response."""

    def first_events(self) -> Iterable[bytes]:
        """Events before the first token."""

    def event(self, index: int, delta: OutputDelta) -> bytes | None:
        """The events of one delta of choice `index`; None if this API shows nothing of it."""

    def is_slow(self, delta: OutputDelta | None) -> bool:
        """Whether to write the events of a delta, or with None the last ones, in a thread."""

    def last_events(self) -> Iterable[bytes]:
        """Events after the last token, if no choice failed."""

    def on_written(self) -> None:
        """Called on the event loop when a whole response or a last event is written, and not yet sent."""

    def error_event(self, error: ForewordError) -> bytes:
        """The last events of a stream that fails after its first token."""

    def full(self) -> dict[str, Any]:
        """The body of a whole response, once all choices are finished."""

    def record_returned(self, num_choices: int) -> None:
        """Count choices that were sent completely."""


def response_header(server: LoadedModel, prefix: str, params: SamplingParams) -> ResponseHeader:
    assert params.seed is not None, "the seed must be resolved first"
    return ResponseHeader(
        id=f"{prefix}-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=server.served.name,
        system_fingerprint=server.served.fingerprint(server.info().fingerprint),
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
        reasoning=not isinstance(body, ReasoningBody) or body.include_reasoning is not False,
    )


def respond(generation: Generation, writer: ResponseWriter, stream: bool) -> Response:
    """Submit the requests and return the response. Raises Overloaded, EngineDead."""
    generation.start()
    return SSEResponse(generation, writer) if stream else FullResponse(generation, writer)


class SSEResponse(Response):
    """Streams a generation as `data:` events; a disconnect frees it at once.

    The headers wait for the first token, so that an earlier error is answered with its own status.
    """

    media_type = EVENT_STREAM

    def __init__(self, generation: Generation, writer: ResponseWriter) -> None:
        super().__init__(headers=STREAM_HEADERS)
        del self.headers["content-length"]
        self._generation = generation
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # For a shutdown, which cuts the stream off.
        scope.setdefault("state", {})["error_event"] = self._writer.error_event
        try:
            await cancel_on_disconnect(receive, self._send_all(scope, receive, send))
        finally:
            self._generation.close()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        try:
            async with aclosing(_events(self._generation, self._writer)) as events:
                event = await anext(events)
                await send(start)
                await send({"type": "http.response.body", "body": event, "more_body": True})
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ForewordError as error:
            await error_response(error, scope)(scope, receive, send)


async def _events(generation: Generation, writer: ResponseWriter) -> AsyncGenerator[bytes, None]:
    """Events of all choices. An error comes last, because clients stop reading at it.

    Raises the first error, before any event, if no choice has a token.
    """
    first_error: ForewordError | None = None
    started, begun = False, set[int]()
    async for index, item in generation.deltas():
        if isinstance(item, ForewordError):
            first_error = first_error or item
            continue
        if not started:
            started = True
            for event in writer.first_events():
                yield event
        has_long_prompt = index not in begun and is_large([generation.outputs[index]])  # in its first event
        if has_long_prompt or writer.is_slow(item):
            events = await run_in_own_thread(writer.event, index, item)
        else:
            events = writer.event(index, item)
        if events is not None:
            begun.add(index)
            yield events
        generation.drop_logprobs(index, item, writer.keeps_logprobs)  # up to 3 KB a token
        if item.finish_reason is not None:
            writer.record_returned(1)  # after the yield: a client that disconnected did not get it
    await generation.commit_usage()
    first_error = first_error or generation.error
    if first_error is None:
        async for event in _last_events(generation, writer):
            yield event
    elif started:
        yield writer.error_event(first_error)
    else:
        raise first_error


async def _last_events(generation: Generation, writer: ResponseWriter) -> AsyncGenerator[bytes, None]:
    """Each is written when the one before is sent: the answer may end with an error until then."""
    events, is_slow = iter(writer.last_events()), writer.is_slow(None)
    while True:
        event = await run_in_own_thread(next, events, None) if is_slow else next(events, None)
        if generation.error is not None:
            yield writer.error_event(generation.error)
            return
        if event is None:
            return
        writer.on_written()
        yield event


class FullResponse(Response):
    """All choices in one JSON body. It waits after its route has returned, which frees the request's body."""

    def __init__(self, generation: Generation, writer: ResponseWriter) -> None:
        super().__init__()
        self._generation = generation
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await cancel_on_disconnect(receive, self._collect_body())
        finally:
            self._generation.close()
        response = Response(status_code=CLIENT_CLOSED)
        if body is not None:
            response = Response(body, media_type="application/json")
        await response(scope, receive, send)

    async def _collect_body(self) -> bytes:
        await self._generation.collect()
        await self._generation.commit_usage()
        self._writer.record_returned(self._writer.num_returned)
        if not is_large(self._generation.outputs):
            body = json_bytes(self._writer.full())
        else:
            body = await join_in_own_thread(lambda: json_pieces(self._writer.full()))
        self._writer.on_written()
        return body
