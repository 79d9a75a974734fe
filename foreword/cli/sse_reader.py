"""Server-sent events of chat and completion streams, parsed strictly: the server may send anything."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Final

import httpx

from foreword.chat_formats.events import CallArguments, CallStart
from foreword.errors import ForewordError

MAX_EVENT_BYTES: Final = 16 << 20
DONE: Final = b"[DONE]"
MAX_SHOWN_CHARS: Final = 80  # characters of invalid data in a message

Chunk = Mapping[str, Any]


class EventReader:
    """Incremental parser: bytes in any pieces become the JSON objects of complete events.

    Raises ForewordError for data that is not a JSON object, and for an event that is too long.
    """

    __slots__ = ("_after_cr", "_data", "_line", "_size")

    def __init__(self) -> None:
        self._line: list[bytes] = []  # pieces of an incomplete line
        self._data: list[bytes] = []  # data lines of an incomplete event
        self._size = 0  # bytes of the incomplete event
        self._after_cr = False  # the last piece ended in CR, so a leading LF belongs to it

    def feed(self, received: bytes) -> Iterator[Chunk]:
        """Objects that are complete now."""
        if received and self._after_cr:
            received, self._after_cr = received.removeprefix(b"\n"), False
        self._size += len(received)
        if self._size > MAX_EVENT_BYTES:
            raise ForewordError(f"the server's stream holds an event of more than {MAX_EVENT_BYTES} bytes")
        self._line.append(received)
        if b"\n" not in received and b"\r" not in received:
            return
        self._after_cr = received.endswith(b"\r")
        lines = b"".join(self._line).splitlines(keepends=True)
        self._line = [] if lines[-1].endswith((b"\n", b"\r")) else [lines.pop()]
        for line in lines:
            yield from self._process_line(line.rstrip(b"\r\n"))

    def _process_line(self, line: bytes) -> Iterator[Chunk]:
        """A line without its end; an empty line ends the event."""
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        if line:
            return
        data, self._data = b"\n".join(self._data), []
        self._size = sum(map(len, self._line))
        if data and data != DONE:
            yield _parse_object(data)


def iter_chunks(response: httpx.Response) -> Iterator[Chunk]:
    """The JSON objects of a stream. Raises httpx.HTTPError, and ForewordError for invalid data."""
    reader = EventReader()
    for received in response.iter_bytes():
        yield from reader.feed(received)


async def iter_chunks_async(response: httpx.Response) -> AsyncIterator[Chunk]:
    """See iter_chunks()."""
    reader = EventReader()
    async for received in response.aiter_bytes():
        for chunk in reader.feed(received):
            yield chunk


def choices_of(chunk: Chunk) -> Sequence[Mapping[str, Any]]:
    """Raises ForewordError for an error event, and for invalid choices."""
    if "error" in chunk:
        error = chunk["error"]
        message = error.get("message") if isinstance(error, dict) else error
        raise ForewordError(
            str(message or f"the server's stream holds an error without a message: {_shown(error)}")
        )
    choices = chunk.get("choices") or ()
    if not isinstance(choices, list | tuple) or not all(isinstance(choice, dict) for choice in choices):
        raise ForewordError(f"the server's stream holds invalid choices: {_shown(choices)}")
    return choices


def text_of(choice: Mapping[str, Any]) -> str:
    """New text of a chat or completion choice; often empty."""
    delta = choice.get("delta")
    text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
    return text if isinstance(text, str) else ""


def reasoning_of(choice: Mapping[str, Any]) -> str:
    """New reasoning of a chat choice, under either of the names that servers use; often empty."""
    delta = choice.get("delta")
    fields = delta if isinstance(delta, dict) else {}
    text = fields.get("reasoning_content") or fields.get("reasoning")
    return text if isinstance(text, str) else ""


def call_events(choice: Mapping[str, Any]) -> Iterator[CallStart | CallArguments]:
    """New parts of calls of a chat choice. Raises ForewordError for invalid ones."""
    delta = choice.get("delta")
    calls = (delta.get("tool_calls") if isinstance(delta, dict) else None) or []
    if not isinstance(calls, list):
        raise ForewordError(f"the server's stream holds invalid calls: {_shown(calls)}")
    for call in calls:
        match call:
            case {"index": int(index), "function": {**function}}:
                name, arguments = function.get("name"), function.get("arguments")
            case _:
                raise ForewordError(f"the server's stream holds an invalid call: {_shown(call)}")
        if isinstance(name, str) and name:
            yield CallStart(index, str(call.get("id") or f"call_{index}"), name)
        if isinstance(arguments, str) and arguments:
            yield CallArguments(index, arguments)


def token_ids_of(choice: Mapping[str, Any]) -> Sequence[int]:
    """`token_ids`, which a Foreword server sends on request."""
    ids = choice.get("token_ids") or ()
    if not isinstance(ids, list | tuple) or not all(isinstance(token_id, int) for token_id in ids):
        raise ForewordError(f"the server's stream holds invalid token ids: {_shown(ids)}")
    return ids


def _parse_object(data: bytes) -> Chunk:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        shown = data[:MAX_SHOWN_CHARS]
        raise ForewordError(f"the server's stream holds data that is not a JSON object: {shown!r}")
    return value


def _shown(value: object) -> str:
    return repr(value)[:MAX_SHOWN_CHARS]
