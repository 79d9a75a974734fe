"""What surrounds every route: request ids, the limit of a body, and the last resort."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreword.errors import PayloadTooLarge, RequestFailed
from foreword.serve.errors import error_response

__all__ = ["BodyLimit", "LastResort", "RequestIds"]

logger = logging.getLogger("foreword.serve")
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
DRAIN_S = 10.0  # how long a client may go on sending what was refused


class RequestIds:
    """Every response has an X-Request-Id: the caller's, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class LastResort:
    """An exception that nobody expected is logged and answered with a 500 in the envelope."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_noting(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        except Exception:
            if scope["type"] != "http" or started:
                raise
            logger.exception("%s %s failed", scope["method"], scope["path"])
            await error_response(RequestFailed("the server failed on this request"))(scope, receive, send)


class BodyLimit:
    """Reads the body before anyone else does, and refuses it while reading if it grows too large."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return await self._app(scope, receive, send)
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            return await self._refuse(receive, send)
        parts: list[bytes] = []
        more, size = True, 0
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            parts.append(message.get("body", b""))
            more, size = message.get("more_body", False), size + len(parts[-1])
            if size > self._max_bytes:
                return await self._refuse(receive, send, more)
        scope.setdefault("state", {})["body_bytes"] = size
        await self._app(scope, _replay(parts, receive), send)

    async def _refuse(self, receive: Receive, send: Send, more: bool = True) -> None:
        """Answer at once, then let the client finish: closing on unread data would lose the answer."""
        error = PayloadTooLarge(f"the body is larger than {self._max_bytes} bytes")
        response = error_response(error)
        response.headers["Connection"] = "close"
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while more:
                    message = await receive()
                    more = message.get("more_body", False)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _replay(parts: Sequence[bytes], receive: Receive) -> Receive:
    """A `receive` that gives the whole body once and then listens on."""
    body: bytes | None = b"".join(parts)

    async def replay() -> Message:
        nonlocal body
        if body is None:
            return await receive()
        message = {"type": "http.request", "body": body, "more_body": False}
        body = None
        return message

    return replay
