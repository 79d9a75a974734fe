"""How a server ends: nobody new comes in, who is in may finish, and what is left then is handed back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreword.errors import ShuttingDown
from foreword.serve.auth import PUBLIC_PATHS
from foreword.serve.errors import error_response
from foreword.serve.sse import final_error_event

__all__ = ["DrainState", "DrainMiddleware"]

FINAL_ERROR_TIMEOUT_S = 1.0  # a client may take to read why its answer ends


class DrainState:
    """Which requests are open, and whether the server is about to end.

    began  no new requests are taken
    """

    __slots__ = ("_empty", "_open", "draining")

    def __init__(self) -> None:
        self.draining = False
        self._open: set[asyncio.Timeout] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def begin(self) -> None:
        """Refuse new requests from now on."""
        self.draining = True

    async def wait_empty(self) -> None:
        """Wait until no request is open."""
        await self._empty.wait()

    def cancel_open(self) -> None:
        """End what is still open: it gets an error that says so."""
        for limit in self._open:
            limit.reschedule(asyncio.get_running_loop().time())

    @contextlib.contextmanager
    def track_request(self, limit: asyncio.Timeout) -> Iterator[None]:
        """A request is open, and ends when its limit expires."""
        self._open.add(limit)
        self._empty.clear()
        try:
            yield
        finally:
            self._open.discard(limit)
            if not self._open:
                self._empty.set()


class DrainMiddleware:
    """Counts the requests, and refuses or ends them when the time has come; health and metrics stay readable."""

    def __init__(self, app: ASGIApp, drain: DrainState, on_refusal: Callable[[str], None]) -> None:
        self._app = app
        self._drain = drain
        self._on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PUBLIC_PATHS:
            return await self._app(scope, receive, send)
        if self._drain.draining:
            self._on_refusal("draining")
            return await _reject(scope, receive, send)
        response, limit = _TrackedResponse(send), asyncio.timeout(None)
        with self._drain.track_request(limit):
            try:
                async with limit:
                    await self._app(scope, receive, response.send)
            except TimeoutError:
                if not limit.expired():
                    raise
                await response.send_final_error(scope, receive)


class _TrackedResponse:
    """What was sent of a response, in case it has to be ended early."""

    __slots__ = ("_ended", "_send", "_started", "_is_stream")

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = self._is_stream = self._ended = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            self._is_stream = Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-stream")
        else:
            self._ended = not message.get("more_body", False)
        await self._send(message)

    async def send_final_error(self, scope: Scope, receive: Receive) -> None:
        """Say why there is no more: as a response, or as the last event of a stream. A client that reads nothing is left."""
        error = ShuttingDown("the server is ending, and the answer was not finished in time; ask again")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINAL_ERROR_TIMEOUT_S):
                if not self._started:
                    await error_response(error)(scope, receive, self._send)
                elif self._is_stream and not self._ended:
                    await self._send({"type": "http.response.body", "body": final_error_event(error), "more_body": False})


async def _reject(scope: Scope, receive: Receive, send: Send) -> None:
    response = error_response(ShuttingDown("the server is ending and takes no new requests"))
    response.headers["Connection"] = "close"
    await response(scope, receive, send)
