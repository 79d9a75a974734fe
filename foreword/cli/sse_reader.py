"""Reading streams of server-sent events as completions come in, from a server that may send anything."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Final

import httpx

from foreword.errors import ForewordError

__all__ = [
    "Chunk",
    "EventReader",
    "choices_of",
    "iter_chunks",
    "iter_chunks_async",
    "text_of",
    "token_ids_of",
]

MAX_EVENT_BYTES: Final = 16 << 20
DONE: Final = b"[DONE]"
MAX_SHOWN_CHARS: Final = 80  # bytes of what cannot be read

Chunk = Mapping[str, Any]


class EventReader:
    """Takes bytes in whatever pieces they come, and gives the JSON objects of whole events.

    An event that the end of the stream cuts off is none. Raises ForewordError for what is no JSON object, and for an
    event that does not end.
    """

    __slots__ = ("_after_cr", "_data", "_line", "_size")

    def __init__(self) -> None:
        self._line: list[bytes] = []  # pieces of a line that goes on
        self._data: list[bytes] = []  # lines of an event that goes on
        self._size = 0
        self._after_cr = False  # a line feed would belong to it

    def feed(self, received: bytes) -> Iterator[Chunk]:
        """Objects that are whole now."""
        if received and self._after_cr:
            received, self._after_cr = received.removeprefix(b"\n"), False
        self._check_size(len(received))
        self._line.append(received)
        if b"\n" not in received and b"\r" not in received:
            return
        self._after_cr = received.endswith(b"\r")
        lines = b"".join(self._line).splitlines(keepends=True)
        self._line = [] if lines[-1].endswith((b"\n", b"\r")) else [lines.pop()]
        for line in lines:
            yield from self._process_line(line.rstrip(b"\r\n"))

    def _process_line(self, line: bytes) -> Iterator[Chunk]:
        """A line without its end; an empty one ends the event."""
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        if line:
            return
        data, self._data = b"\n".join(self._data), []
        self._size = sum(map(len, self._line))
        if data and data != DONE:
            yield _parse_object(data)

    def _check_size(self, size: int) -> None:
        self._size += size
        if self._size > MAX_EVENT_BYTES:
            raise ForewordError(f"the server's stream holds an event of more than {MAX_EVENT_BYTES} bytes")


def iter_chunks(response: httpx.Response) -> Iterator[Chunk]:
    """The JSON objects of a stream. Raises httpx.HTTPError, and ForewordError for what is none."""
    reader = EventReader()
    for received in response.iter_bytes():
        yield from reader.feed(received)


async def iter_chunks_async(response: httpx.Response) -> AsyncIterator[Chunk]:
    """See `chunks`."""
    reader = EventReader()
    async for received in response.aiter_bytes():
        for chunk in reader.feed(received):
            yield chunk


def choices_of(chunk: Chunk) -> Sequence[Mapping[str, Any]]:
    """Raises ForewordError for an error that the server tells, and for choices that are none."""
    if "error" in chunk:
        error = chunk["error"]
        told = error.get("message") if isinstance(error, dict) else error
        raise ForewordError(
            str(told or f"the server's stream holds an error without a message: {error!r:.{MAX_SHOWN_CHARS}}")
        )
    choices = chunk.get("choices") or ()
    if not isinstance(choices, list | tuple) or not all(isinstance(choice, dict) for choice in choices):
        raise ForewordError(
            f"the server's stream holds choices that are none: {choices!r:.{MAX_SHOWN_CHARS}}"
        )
    return choices


def text_of(choice: Mapping[str, Any]) -> str:
    """What a choice of a chat or of a completion adds; often nothing."""
    delta = choice.get("delta")
    text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
    return text if isinstance(text, str) else ""


def token_ids_of(choice: Mapping[str, Any]) -> Sequence[int]:
    """The ids that a server of ours tells on request."""
    ids = choice.get("token_ids") or ()
    if not isinstance(ids, list | tuple) or not all(isinstance(token_id, int) for token_id in ids):
        raise ForewordError(f"the server's stream holds token ids that are none: {ids!r:.{MAX_SHOWN_CHARS}}")
    return ids


def _parse_object(data: bytes) -> Chunk:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise ForewordError(
            f"the server's stream holds what is no JSON: {data[:MAX_SHOWN_CHARS]!r}"
        ) from None
    if not isinstance(value, dict):
        raise ForewordError(f"the server's stream holds what is no JSON object: {data[:MAX_SHOWN_CHARS]!r}")
    return value
