"""Comments in a stream that waits until its model is loaded, and what keeps the model loaded."""

from __future__ import annotations

from contextlib import ExitStack

from fastapi import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreword.errors import ForewordError
from foreword.server.apis.choices_writer import DONE_EVENT
from foreword.server.http.errors import error_body
from foreword.server.http.responses import EVENT_STREAM, STREAM_HEADERS, is_messages_path, sse_event

RESPONSES_PATH = "/v1/responses"


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
            await self._app(scope, receive, stream.send)


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

    async def send(self, message: Message) -> None:
        """Pass the application's messages on; after a comment without the start of its response."""
        if not self.is_started or message["type"] != "http.response.start":
            await self._send(message)

    def error_event(self, error: ForewordError) -> bytes:
        """The last event of a stream without an answer, in the form of the API of its path."""
        envelope, path = error_body(error, self._scope), self._scope["path"]
        if is_messages_path(path):
            return b"event: error\n" + sse_event(envelope)
        if path.startswith(RESPONSES_PATH):
            event = {**envelope["error"], "type": "error", "sequence_number": 0}
            return b"event: error\n" + sse_event(event)
        return sse_event(envelope) + DONE_EVENT
