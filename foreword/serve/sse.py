"""Server-sent events, and noticing that nobody listens any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from foreword.errors import ForewordError
from foreword.serve.errors import envelope
from foreword.serve.generation import Generation
from foreword.serve.wire import json_bytes
from foreword.serve.writer import Writer

__all__ = ["AnswerStream", "unless_disconnected"]

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


class AnswerStream(Response):
    """Streams a generation as `data:` lines; a client that goes away frees it at once."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, writer: Writer) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send_all(send))
        finally:
            self._generation.close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for line in _lines(self._generation, self._writer):
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None, and `work` cancelled, as soon as the client is gone."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for leftover in (task, gone):
            leftover.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _lines(generation: Generation, writer: Writer) -> AsyncIterator[bytes]:
    """Errors come last: clients stop reading at one, and the other choices are to be heard to their end."""
    for opening in writer.opening():
        yield _data(opening)
    errors: list[ForewordError] = []
    async for index, item in generation.deltas():
        if isinstance(item, ForewordError):
            errors.append(item)
        elif (chunk := writer.chunk(index, item)) is not None:
            yield _data(chunk)
    for error in errors:
        yield _data(envelope(error))
    if not errors and (usage := writer.usage_chunk()) is not None:
        yield _data(usage)
    writer.returned(len(generation.answers) - len(errors))
    yield DONE


def _data(value: Any) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"
