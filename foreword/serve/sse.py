"""Server-sent events, and noticing that nobody listens any more."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Response
from starlette.types import Receive, Scope, Send

from foreword.errors import ForewordError
from foreword.serve.disconnect import unless_disconnected
from foreword.serve.errors import envelope, error_response
from foreword.serve.generation import Generation
from foreword.serve.wire import json_bytes
from foreword.serve.writer import Writer

__all__ = ["AnswerStream", "last_words"]

DONE = b"data: [DONE]\n\n"


class AnswerStream(Response):
    """Streams a generation as `data:` lines; a client that goes away frees it at once.

    The head waits for the first token: what fails before it is answered with its own status.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, writer: Writer) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send_all(scope, receive, send))
        finally:
            self._generation.close()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(_lines(self._generation, self._writer)) as lines:
                await self._send_lines(lines, send)
        except ForewordError as error:
            await error_response(error)(scope, receive, send)

    async def _send_lines(self, lines: AsyncIterator[bytes], send: Send) -> None:
        line = await anext(lines)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": line, "more_body": True})
        async for line in lines:
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _lines(generation: Generation, writer: Writer) -> AsyncGenerator[bytes, None]:
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
            for opening in writer.opening():
                yield _data(opening)
        if (chunk := writer.chunk(index, item)) is not None:
            yield _data(chunk)
        if item.finish_reason is not None:
            writer.returned(1)  # whoever left before did not get it
    if not opened:
        raise errors[0]
    for line in _endings(writer, errors):
        yield line
    yield DONE


def _endings(writer: Writer, errors: Sequence[ForewordError]) -> Iterator[bytes]:
    for error in errors:
        yield _data(envelope(error))
    if not errors and (usage := writer.usage_chunk()) is not None:
        yield _data(usage)


def last_words(error: ForewordError) -> bytes:
    """How a stream ends that was cut off."""
    return _data(envelope(error)) + DONE


def _data(value: Any) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"
