"""Drain at shutdown: open requests may finish, new ones are refused."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreword.errors import ShuttingDown
from foreword.server.auth.keys import is_public
from foreword.server.http.errors import error_response

FINAL_ERROR_TIMEOUT_S = 1.0  # time to send the reason to a client
STOPPING_MESSAGE = "the server will shut down soon: requests are still taken, send new ones elsewhere"


class DrainState:
    """The open requests, and whether the server is shutting down."""

    __slots__ = ("_empty", "_open", "draining", "stopping")

    def __init__(self) -> None:
        self.stopping = False  # a signal came: /ready says so, requests are still taken
        self.draining = False  # new requests are refused
        self._open: set[asyncio.Timeout] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def wait_empty(self) -> None:
        """Wait until no request is open."""
        await self._empty.wait()

    def cancel_open(self) -> None:
        """End all open requests with an error."""
        for timeout in self._open:
            timeout.reschedule(asyncio.get_running_loop().time())

    @contextlib.contextmanager
    def track_request(self, timeout: asyncio.Timeout) -> Iterator[None]:
        """Count a request as open; cancel_open() expires its timeout."""
        self._open.add(timeout)
        self._empty.clear()
        try:
            yield
        finally:
            self._open.discard(timeout)
            if not self._open:
                self._empty.set()


class DrainMiddleware:
    """Tracks open requests; while draining, refuses new ones. Health and metrics stay readable."""

    def __init__(self, app: ASGIApp, drain: DrainState, on_refusal: Callable[[str], None]) -> None:
        self._app = app
        self._drain = drain
        self._on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_public(scope["path"]):
            return await self._app(scope, receive, send)
        if self._drain.draining:
            self._on_refusal("draining")
            error = ShuttingDown("the server is shutting down and takes no new requests")
            response = error_response(error, scope)
            response.headers["Connection"] = "close"
            return await response(scope, receive, send)
        tracked, timeout = _TrackedResponse(send), asyncio.timeout(None)
        with self._drain.track_request(timeout):
            try:
                async with timeout:
                    await self._app(scope, receive, tracked.send)
            except TimeoutError:
                if not timeout.expired():
                    raise
                await tracked.send_final_error(scope, receive)


class _TrackedResponse:
    """How much of a response was sent, so that it can be ended early."""

    __slots__ = ("_ended", "_is_stream", "_send", "_started")

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = self._is_stream = self._ended = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            content_type = Headers(raw=message["headers"]).get("content-type", "")
            self._is_stream = content_type.startswith("text/event-stream")
        else:
            self._ended = not message.get("more_body", False)
        await self._send(message)

    async def send_final_error(self, scope: Scope, receive: Receive) -> None:
        """Send the reason as a response, or as the last event of a stream, if the client still reads."""
        error = ShuttingDown("the server is shutting down, and the answer was not finished in time; retry")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINAL_ERROR_TIMEOUT_S):
                if not self._started:
                    await error_response(error, scope)(scope, receive, self._send)
                elif self._is_stream and not self._ended:
                    body = scope["state"]["error_event"](error)
                    await self._send({"type": "http.response.body", "body": body, "more_body": False})
