"""From engine requests to an HTTP response: server-sent events, or one JSON body."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Response
from starlette.types import Receive, Scope, Send

from foreword.errors import ForewordError
from foreword.server.answering.generation import Generation
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
from foreword.tokenizer.output_processor import ChoiceOutput, OutputDelta
from foreword.utils.threads import join_in_own_thread, run_in_own_thread

# Most tokens whose JSON is written on the event loop: with log-probabilities, and ids alone
INLINE_LOGPROBS, INLINE_IDS = 512, 16_384


class ResponseWriter(ABC):
    """Writes a generation in the form of one API, whole or as server-sent events."""

    keeps_logprobs = False  # its last events write all log-probabilities of a stream again

    def __init__(self, server: LoadedModel, generation: Generation, wants_metrics: bool) -> None:
        """wants_metrics  the request asks for `metrics`"""
        self.server = server
        self.outputs: Sequence[ChoiceOutput] = generation.outputs
        self.wants_metrics = wants_metrics

    @property
    def num_returned(self) -> int:
        """Choices of a whole response."""
        return len(self.outputs)

    @abstractmethod
    def first_events(self) -> Iterable[bytes]:
        """Events before the first token."""

    @abstractmethod
    def event(self, index: int, delta: OutputDelta) -> bytes | None:
        """The events of one delta of choice `index`; None if this API shows nothing of it."""

    def is_slow(self, delta: OutputDelta | None) -> bool:
        """Whether to write the events of a delta, or with None the last ones, in a thread."""
        return False

    @abstractmethod
    def last_events(self) -> Iterable[bytes]:
        """Events after the last token, if no choice failed."""

    def on_written(self) -> None:
        """Called on the event loop when a whole response or a last event is written, and not yet sent."""
        return

    @abstractmethod
    def error_event(self, error: ForewordError) -> bytes:
        """The last events of a stream that fails after its first token."""

    @abstractmethod
    def full(self) -> dict[str, Any]:
        """The body of a whole response, once all choices are finished."""

    def metrics(self, *outputs: ChoiceOutput) -> dict[str, Any]:
        """`metrics` of these choices together, if the request asks for it."""
        if not self.wants_metrics:
            return {}
        metrics = self.server.recorder.answer_metrics(*(output.request.id for output in outputs))
        return {} if metrics is None else {"metrics": metrics.as_dict()}

    def record_returned(self, num_choices: int) -> None:
        """Count choices that were sent completely."""
        self.server.recorder.on_response(num_choices)


def is_large(outputs: Sequence[ChoiceOutput]) -> bool:
    """Whether to write choices in a thread: a response may have their log-probabilities and ids."""
    num_logprobs = sum(len(output.logprobs) + len(output.prompt_logprobs) for output in outputs)
    num_ids = sum(len(output.request.prompt_ids) + output.num_tokens for output in outputs)
    return num_logprobs > INLINE_LOGPROBS or num_ids > INLINE_IDS


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
