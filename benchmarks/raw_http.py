"""A minimal HTTP client for load generators: its cost must not hide that of the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any


class ConnectionBroken(Exception):
    """The server closed the connection or sent no valid response."""


class RawResponse:
    """A response with an unread body; header names are lower-case."""

    def __init__(self, reader: asyncio.StreamReader, status: int, headers: Mapping[str, str]) -> None:
        self._reader = reader
        self.status = status
        self.headers = headers

    async def iter_body(self) -> AsyncIterator[bytes]:
        """The body in pieces, to its end."""
        if "chunked" not in self.headers.get("transfer-encoding", ""):
            yield await self._reader.readexactly(int(self.headers.get("content-length", "0")))
            return
        while size := int(await self._reader.readline(), 16):
            yield (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readline()

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.iter_body()])


class RawConnection:
    """One kept-alive connection, reopened after the server or a cancellation ended it.

    Raises ConnectionBroken, and OSError where no server listens.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._open: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> RawResponse:
        """Send a request and read the head of its response; the body before must have been read."""
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        try:
            reader, writer = await self._connected()
            writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            return RawResponse(reader, *_parsed(await reader.readuntil(b"\r\n\r\n")))
        except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
            raise ConnectionBroken(f"{type(error).__name__}: {error}") from None

    def close(self) -> None:
        """Close without reading the rest."""
        if self._open is not None:
            self._open[1].transport.abort()
            self._open = None

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._open is None or self._open[0].at_eof():
            self.close()
            self._open = await asyncio.open_connection(self._host, self._port)
        return self._open


def _parsed(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    return int(first.split(" ")[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}
