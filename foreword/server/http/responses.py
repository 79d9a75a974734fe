"""JSON responses, and work that is cancelled when its client disconnects."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive

T = TypeVar("T")
JSON_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
PIECE_ITEMS = 64
CLIENT_CLOSED = 499  # nginx's status for a client that disconnected; it is never read
EVENT_STREAM = "text/event-stream"
DONE_EVENT = b"data: [DONE]\n\n"  # the last of a stream
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
MESSAGES_ROUTE = "/v1/messages"
REQUEST_ID_PATTERN = re.compile(r"[\x21-\x7e]{1,128}")  # X-Request-Id and request_id


def json_bytes(value: Any) -> bytes:
    """Compact UTF-8 JSON. Raises ValueError for a NaN."""
    # A lone surrogate of a request that an error quotes becomes its JSON escape.
    return JSON_ENCODER.encode(value).encode("utf-8", "backslashreplace")


def json_pieces(value: Any, levels: int = 4) -> Iterator[bytes]:
    """The parts of json_bytes(value), so that none holds the interpreter's lock for long.

    levels  of lists and maps that are taken apart; longer lists below them are cut
    """
    if levels and isinstance(value, dict):
        for number, (name, item) in enumerate(value.items()):
            yield (b"," if number else b"{") + json_bytes(name) + b":"
            yield from json_pieces(item, levels - 1)
        yield b"}" if value else b"{}"
    elif levels and isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield b"," if number else b"["
            yield from json_pieces(item, levels - 1)
        yield b"]" if value else b"[]"
    elif isinstance(value, (list, tuple)) and len(value) > PIECE_ITEMS:
        for start in range(0, len(value), PIECE_ITEMS):
            yield b"," if start else b"["
            yield json_bytes(value[start : start + PIECE_ITEMS])[1:-1]
        yield b"]"
    else:
        yield json_bytes(value)


def sse_event(value: Any, in_pieces: bool = False) -> bytes:
    """A server-sent event of one JSON value, of which large ones are written by json_pieces()."""
    data = b"".join(json_pieces(value)) if in_pieces else json_bytes(value)
    return b"data: " + data + b"\n\n"


def is_messages_path(path: str) -> bool:
    """Whether a path belongs to Anthropic's API, whose errors and headers have other names."""
    return path == MESSAGES_ROUTE or path.startswith(f"{MESSAGES_ROUTE}/")


class JSONResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None, with `work` cancelled, once the client disconnects."""
    task = asyncio.create_task(work)
    disconnected = asyncio.create_task(_wait_disconnect(receive))
    try:
        await asyncio.wait((task, disconnected), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for pending in (task, disconnected):
            pending.cancel()
        await asyncio.gather(task, disconnected, return_exceptions=True)


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
