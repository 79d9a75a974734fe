"""ASGI middleware: a proxy's prefix, exceptions, the limit on bodies, models held until a response ends."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import ExitStack
from functools import partial

from fastapi import Response
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreword.errors import ForewordError, Overloaded, PayloadTooLarge, RequestFailed
from foreword.server.http.errors import error_body, error_response
from foreword.server.http.request_log import OTHER_ROUTE, RouteTable
from foreword.server.http.responses import (
    DONE_EVENT,
    EVENT_STREAM,
    STREAM_HEADERS,
    is_messages_path,
    sse_event,
)

logger = logging.getLogger("foreword.serve")
MAX_BODIES_IN_MEMORY = 16  # bodies of the largest size held at once
RETRY_AFTER_S = 1.0
RESPONSES_PATH = "/v1/responses"


class RootPathMiddleware:
    """Drops --root-path from a path that is no route with it: a proxy may pass its prefix on or strip it."""

    def __init__(self, app: ASGIApp, root_path: str, routes: RouteTable) -> None:
        self._app = app
        self._root_path = root_path
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path.startswith(f"{self._root_path}/") and self._routes.template(path) == OTHER_ROUTE:
            scope = {**scope, "path": path.removeprefix(self._root_path)}
        await self._app(scope, receive, send)


class ServerErrorMiddleware:
    """Logs an unexpected exception and answers 500 in the error envelope."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception:
            if scope["type"] != "http" or scope["state"]["sent"].status:
                raise
            logger.exception("%s %s failed", scope["method"], scope["path"])
            error = RequestFailed("the server failed on this request")
            await error_response(error, scope)(scope, receive, send)


class BodyLimitMiddleware:
    """Reads the whole body first, and refuses it as soon as it, or the sum of all bodies, is too large.

    No proxy does this for us: chunked bodies declare no length, and the sum of all bodies is ours to bound.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self.held_bytes = 0  # sum of all bodies in memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return await self._app(scope, receive, send)
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            return await error_response(self._too_large(), scope)(scope, receive, send)
        body = _Body(receive)
        try:
            async for size in body.read():
                self.held_bytes += size
                if (error := self._size_error(body.size)) is not None:
                    self._release(body)
                    return await error_response(error, scope)(scope, receive, send)
            if body.complete:
                state = scope.setdefault("state", {})
                state.update(body_bytes=body.size, forget_body=partial(self._release, body))
                await self._app(scope, body.replay, send)
        finally:
            self._release(body)

    def _release(self, body: _Body) -> None:
        self.held_bytes -= body.release()

    def _size_error(self, size: int) -> ForewordError | None:
        if size > self._max_bytes:
            return self._too_large()
        limit = MAX_BODIES_IN_MEMORY * self._max_bytes
        if self.held_bytes <= limit:
            return None
        return Overloaded(
            f"the bodies of open requests fill their {limit} bytes of memory; try again later",
            retry_after_s=RETRY_AFTER_S,
        )

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"the body is larger than {self._max_bytes} bytes")


def release_body(request: Request) -> None:
    """Free and uncount a large body while its answer is computed."""
    request.state.forget_body()
    for name in ("_body", "_json"):  # starlette's copies, which live as long as the request
        vars(request).pop(name, None)


class _Body:
    """A request's body, read in parts and then replayed in one."""

    __slots__ = ("_buffer", "_receive", "complete", "has_more", "size")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._buffer: bytearray | None = bytearray()  # a list of tiny parts would be many times their size
        self.size = 0
        self.has_more = True
        self.complete = False

    async def read(self) -> AsyncIterator[int]:
        """Yields the size of each part; `complete` is then set, unless the client disconnected."""
        assert self._buffer is not None
        while self.has_more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return
            part = message.get("body", b"")
            self._buffer += part
            self.size += len(part)
            self.has_more = message.get("more_body", False)
            yield len(part)
        self.complete = True

    def release(self) -> int:
        """Free the body; returns the freed bytes."""
        size, self.size, self._buffer = self.size, 0, None
        return size

    async def replay(self) -> Message:
        """A `receive` that returns the whole body once, then the client's later messages."""
        if self._buffer is None:
            return await self._receive()
        body, self._buffer = bytes(self._buffer), None
        return {"type": "http.request", "body": body, "more_body": False}


class HeldModelsMiddleware:
    """Keeps the models of a request loaded until its ASGI call has ended."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        stream = EarlyStream(scope, send)
        with ExitStack() as holds:
            scope.setdefault("state", {}).update(model_holds=holds, early_stream=stream)
            await self._app(scope, receive, send)


class EarlyStream:
    """Begins a stream before its answer, with comments; error_response() then writes an error as an event."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.is_started = False
        self._scope = scope
        self._send = send

    async def comment(self, text: str) -> None:
        """Send a comment, which clients skip."""
        if not self.is_started:
            self.is_started = True
            self._scope["state"]["error_event"] = (
                self.error_event
            )  # for a shutdown, which cuts the stream off
            headers = Response(headers=STREAM_HEADERS, media_type=EVENT_STREAM).raw_headers
            headers = [(name, value) for name, value in headers if name != b"content-length"]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        line = text.replace("\r", " ").replace("\n", " ")
        body = f": {line}\n\n".encode("utf-8", "replace")
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    def error_event(self, error: ForewordError) -> bytes:
        """The last event of a stream without an answer, in the form of the API of its path."""
        envelope, path = error_body(error, self._scope), self._scope["path"]
        if is_messages_path(path):
            return b"event: error\n" + sse_event(envelope)
        if path.startswith(RESPONSES_PATH):
            event = {**envelope["error"], "type": "error", "sequence_number": 0}
            return b"event: error\n" + sse_event(event)
        return sse_event(envelope) + DONE_EVENT
