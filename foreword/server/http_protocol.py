"""Connections whose clients cannot make the server wait: for their requests, or until they take their answers."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import math
import socket
import sys
import termios
from dataclasses import dataclass
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from foreword.config.options import Config
from foreword.errors import DeadlineExceeded, ForewordError, InvalidRequest, Overloaded
from foreword.server.errors import error_body, error_headers
from foreword.server.json_response import json_bytes

__all__ = ["ConnectionLimits", "TimeoutH11Protocol", "uvicorn_config"]

MAX_HEADER_BYTES = 32 * 1024  # of a request line and its headers
SEND_BUFFER_BYTES = 256 * 1024  # of the kernel: what it takes for a client that reads nothing is not noticed
BODY_TIMEOUT_FACTOR = 10  # a body that trickles may take so many times the time of one that stands still
SHUTDOWN_GRACE_S = 1  # after the end of all answers, for connections to close
UNSENT_IOCTL = (
    termios.TIOCOUTQ if sys.platform == "linux" else 0
)  # asks a socket how many bytes its peer has not taken
STATUS_PHRASES = {400: "Bad Request", 408: "Request Timeout", 429: "Too Many Requests"}


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one client, and all of them, may take.

    client_timeout_s  to send a request's head; between two parts of its body; to take a part of an answer
    """

    max_connections: int
    client_timeout_s: float


def uvicorn_config(app: ASGIApp, config: Config) -> uvicorn.Config:
    """uvicorn with bounded connections, and without log lines of its own."""
    bounds = ConnectionLimits(config.max_connections, config.client_timeout)
    return uvicorn.Config(
        app,
        http=functools.partial(TimeoutH11Protocol, limits=bounds),  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=math.ceil(config.client_timeout),
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )


class TimeoutH11Protocol(H11Protocol):
    """One client. What breaks the protocol or a bound ends the connection, and with it the request that it waits for."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _StrictH11(h11.SERVER, MAX_HEADER_BYTES)
        self.access_log = False  # whatever is configured: a path may hold a key
        self._limits = limits
        self._awaited_part = ""  # what the client is about to send: "head", "body" or nothing
        self._deadline_s = math.inf  # when it must have gone on, by the loop's clock
        self._total_deadline_s = math.inf  # when it must have sent all of it
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            return self._close_with_error(
                Overloaded(f"{self._limits.max_connections} connections are open, which is all that may be")
            )
        _enable_keepalive(transport.get_extra_info("socket"), self._limits.client_timeout_s)
        self._arm("head")
        self._check_timeout()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._arm(self._awaiting())

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._arm(self._awaiting())

    def pause_writing(self) -> None:
        """The client takes nothing any more, and the kernel no more for it."""
        super().pause_writing()
        self._watch_write()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is told so, and cut off."""
        self._close_with_error(
            InvalidRequest(
                "this is no HTTP/1.1 request that the server understands, or its headers are too long"
            )
        )

    def _should_upgrade(self) -> bool:
        """Never: what asks for another protocol is answered in this one."""
        return False

    def _awaiting(self) -> str:
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            return "body"
        begun = self.cycle is None or bool(self.conn.trailing_data[0])
        return "head" if state is h11.IDLE and begun else ""

    def _arm(self, part: str) -> None:
        """Set the time by which the client must have gone on. A head has no parts: it must be whole by then."""
        now, wait_s = self.loop.time(), self._limits.client_timeout_s
        if not part:
            self._deadline_s = self._total_deadline_s = math.inf
        elif part != self._awaited_part:
            self._total_deadline_s = now + wait_s * (BODY_TIMEOUT_FACTOR if part == "body" else 1)
        if part and (part != self._awaited_part or part == "body"):
            self._deadline_s = min(now + wait_s, self._total_deadline_s)
        self._awaited_part = part

    def _check_timeout(self) -> None:
        """Now and then: one timer a connection is enough, since it need not be exact."""
        now, wait_s = self.loop.time(), self._limits.client_timeout_s
        if self.flow.read_paused and self._awaited_part == "body":
            self._deadline_s = now + wait_s  # it is the server that does not read
        if now >= self._deadline_s:
            return self._close_with_error(
                DeadlineExceeded(f"the request was not sent within {wait_s:g} s")
                if self._has_partial_request()
                else None
            )
        self._timer = self.loop.call_at(min(self._deadline_s, now + wait_s), self._check_timeout)

    def _has_partial_request(self) -> bool:
        return self._awaited_part == "body" or bool(self.conn.trailing_data[0])

    def _watch_write(self) -> None:
        """As long as it takes a little in each time it is slow, and not gone."""
        self._write_timer = self.loop.call_later(
            self._limits.client_timeout_s, self._check_write, self._unsent_bytes()
        )

    def _check_write(self, unsent_before: int) -> None:
        if self._unsent_bytes() < unsent_before:
            self._watch_write()
        else:
            self.transport.abort()

    def _unsent_bytes(self) -> int:
        """Bytes of answers that the client has not taken, as far as the system tells. None are added while it stalls."""
        waiting: int = self.transport.get_write_buffer_size()
        return waiting + _kernel_unsent_bytes(self.transport.get_extra_info("socket"))

    def _close_with_error(self, error: ForewordError | None) -> None:
        """Say why, unless an answer has begun, and close; whoever works on a request finds its client gone."""
        if self.transport.is_closing():
            return
        begun = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if error is not None and not begun:
            self.transport.write(_error_response_bytes(error))
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


class _StrictH11(h11.Connection):
    """Refuses a body whose length is told in two ways: a proxy in front may believe the other, and miss a request in it."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request) and {b"content-length", b"transfer-encoding"} <= {
            name for name, _ in event.headers
        }:
            raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
        return event


def _error_response_bytes(error: ForewordError) -> bytes:
    """A whole response, for where no request was read."""
    body = json_bytes(error_body(error))
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **error_headers(error),
    }
    lines = [
        f"HTTP/1.1 {error.status} {STATUS_PHRASES[error.status]}",
        *(f"{name}: {value}" for name, value in headers.items()),
        "",
        "",
    ]
    return "\r\n".join(lines).encode() + body


def _kernel_unsent_bytes(client: socket.socket) -> int:
    """Bytes that were handed to the system, and that its peer has not confirmed; 0 where the system does not tell."""
    if not UNSENT_IOCTL:
        return 0
    return int.from_bytes(fcntl.ioctl(client.fileno(), UNSENT_IOCTL, bytes(4)), sys.byteorder)


def _enable_keepalive(client: socket.socket, timeout_s: float) -> None:
    """Notice a client that vanished without a word while its answer is computed; buffer little for one that is slow."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(int(timeout_s), 1))
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(int(timeout_s / 4), 1))
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
