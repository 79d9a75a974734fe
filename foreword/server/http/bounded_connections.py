"""uvicorn with bounded connections: a slow client cannot hold a connection or an engine slot for ever."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import math
import socket
import sys
import termios
from typing import Any, cast

import h11
import uvicorn
from h11._writers import ChunkedWriter
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from foreword.config.options import Config
from foreword.errors import DeadlineExceeded, ForewordError, InvalidRequest, Overloaded
from foreword.server.http.errors import error_body, error_headers
from foreword.server.http.request_log import RequestLog
from foreword.server.http.responses import json_bytes

MAX_HEADER_BYTES = 32 * 1024  # request line and headers
SEND_BUFFER_BYTES = 256 * 1024  # kernel buffer per connection, which a client that does not read fills
MAX_READ_BYTES = 16 * 1024  # taken from a connection at once, so that parsing them holds up nobody
MAX_SMALL_CHUNKS, MIN_CHUNK_BYTES = 512, 64  # chunks of a body; beyond that number, their least mean size
REFUSED_BODY_TIMEOUT_S = 10.0  # time to notice an answer that came before the body was read
BODY_TIMEOUT_FACTOR = 10  # limit on a whole body, in client timeouts
SHUTDOWN_GRACE_S = 1  # time for connections to close after the last answer
NEW_CONNECTION_GRACE_S = 0.2  # time at shutdown for the first request of a connection, which is refused
UNSENT_IOCTL = termios.TIOCOUTQ if sys.platform == "linux" else 0  # bytes that the peer has not acknowledged
STATUS_PHRASES = {400: "Bad Request", 408: "Request Timeout", 429: "Too Many Requests"}


def uvicorn_config(app: ASGIApp, config: Config, request_log: RequestLog | None = None) -> uvicorn.Config:
    """uvicorn with bounded connections and without its own log lines."""
    return uvicorn.Config(
        app,
        http=functools.partial(TimeoutH11Protocol, options=config, request_log=request_log),  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=math.ceil(config.client_timeout),
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )


class TimeoutH11Protocol(H11Protocol):
    """One connection. A protocol error or an exceeded limit closes it and cancels its request.

    uvicorn bounds neither the time of a request's head and body nor the number of connections before accept.
    """

    def __init__(
        self, *args: Any, options: Config, request_log: RequestLog | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._strict_conn = self.conn = _StrictH11(h11.SERVER, MAX_HEADER_BYTES)
        self.access_log = False  # never: a path may hold a key
        self._max_connections = options.max_connections
        # Limit on a request's head, on pauses within a body, and on pauses of a reader
        self._client_timeout_s = options.client_timeout
        self._request_log = request_log  # told about connections that are closed with an error
        self._awaited_part = ""  # sent next by the client: "head", "body" or ""
        self._deadline_s = math.inf  # loop time, for the next part
        self._total_deadline_s = math.inf  # loop time, for the whole head or body
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._discards = False  # the answer is sent, the rest of the body is dropped unparsed

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = MAX_READ_BYTES  # type: ignore[attr-defined]  # bytes of one recv()
        if len(self.connections) > self._max_connections:
            return self._close_with_error(
                Overloaded(f"{self._max_connections} connections are open, which is the limit")
            )
        _set_socket_options(transport.get_extra_info("socket"), self._client_timeout_s)
        self._arm("head")
        self._check_timeout()

    def shutdown(self) -> None:
        """Close as the server ends; a new connection a moment later, since its request may be on the way."""
        is_new = self.cycle is None
        if is_new:
            self.loop.call_later(NEW_CONNECTION_GRACE_S, self._shut_down_if_open)
        else:
            super().shutdown()

    def _shut_down_if_open(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._discards:
            super().data_received(data)
            self._arm(self._next_part())

    def on_response_complete(self) -> None:
        if self._strict_conn.answers_early and not self.transport.is_closing():
            return self._discard_body()
        super().on_response_complete()
        self._arm(self._next_part())

    def _discard_body(self) -> None:
        """Close after an answer that came before the body; closing on unread data would lose the answer."""
        self.server_state.total_requests += 1
        self._discards = True
        self._arm("")
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(REFUSED_BODY_TIMEOUT_S, self.transport.close)

    def pause_writing(self) -> None:
        """The send buffer is full: close the connection if the client reads nothing for a timeout."""
        super().pause_writing()
        self._watch_write()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _watch_write(self) -> None:
        timeout_s = self._client_timeout_s
        self._write_timer = self.loop.call_later(timeout_s, self._check_write, self._unsent_bytes())

    def _check_write(self, unsent_before: int) -> None:
        if self._unsent_bytes() < unsent_before:
            self._watch_write()
        else:
            self.transport.abort()

    def _unsent_bytes(self) -> int:
        """Bytes that the client has not acknowledged.

        The kernel's queue counts: a slow reader must empty a third of it before the transport writes again.
        TCP_USER_TIMEOUT does not work: it resets slow readers with a window below one of our segments.
        """
        unsent: int = self.transport.get_write_buffer_size()
        if UNSENT_IOCTL:
            file = self.transport.get_extra_info("socket").fileno()
            unsent += int.from_bytes(fcntl.ioctl(file, UNSENT_IOCTL, bytes(4)), sys.byteorder)
        return unsent

    def send_400_response(self, msg: str) -> None:
        self._close_with_error(
            InvalidRequest(
                "this is not a valid HTTP/1.1 request, its headers are too long, "
                f"or it has more than {MAX_SMALL_CHUNKS} chunks of less than {MIN_CHUNK_BYTES} bytes"
            )
        )

    def _should_upgrade(self) -> bool:
        """Never: an upgrade request is answered in HTTP/1.1."""
        return False

    def _next_part(self) -> str:
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            return "body"
        idle = self.cycle is None or bool(self.conn.trailing_data[0])
        return "head" if state is h11.IDLE and idle else ""

    def _arm(self, part: str) -> None:
        """Set the deadlines of the next part; only a body's deadline moves with each piece received."""
        now, timeout_s = self.loop.time(), self._client_timeout_s
        if not part:
            self._deadline_s = self._total_deadline_s = math.inf
        elif part != self._awaited_part:
            self._total_deadline_s = now + timeout_s * (BODY_TIMEOUT_FACTOR if part == "body" else 1)
        if part and (part != self._awaited_part or part == "body"):
            self._deadline_s = min(now + timeout_s, self._total_deadline_s)
        self._awaited_part = part

    def _check_timeout(self) -> None:
        """Runs about once per client timeout: one timer a connection, which need not be exact."""
        now, timeout_s = self.loop.time(), self._client_timeout_s
        if self.flow.read_paused and self._awaited_part == "body":
            self._deadline_s = now + timeout_s  # the server, not the client, has paused
        if now >= self._deadline_s:
            has_partial_request = self._awaited_part == "body" or bool(self.conn.trailing_data[0])
            error = DeadlineExceeded(f"the request was not sent within {timeout_s:g} s")
            return self._close_with_error(error if has_partial_request else None)
        self._timer = self.loop.call_at(min(self._deadline_s, now + timeout_s), self._check_timeout)

    def _close_with_error(self, error: ForewordError | None) -> None:
        """Send the error unless a response has started, close, and disconnect the running request."""
        if self.transport.is_closing():
            return
        started = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if error is not None and not started:
            self.transport.write(_error_response_bytes(error, self._open_scope()))
            self._log_error(error)
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _log_error(self, error: ForewordError) -> None:
        """Log it with the open request, whose response it is, or else as that of the connection."""
        if (scope := self._open_scope()) is not None:
            scope["state"]["connection_error"] = error
        elif self._request_log is not None:
            self._request_log.on_connection_refused(error)

    def _open_scope(self) -> Scope | None:
        """The scope of the request that is not answered yet; None without one."""
        is_open = self.cycle is not None and not self.cycle.response_complete
        return cast(Scope, self.cycle.scope) if is_open else None


class _StrictH11(h11.Connection):
    """Refuses a body with both length headers: a proxy in front may read the other (request smuggling).

    Refuses tiny chunks too, each of which costs as much as a large one.
    """

    answers_early = False  # an answer has started before its body was read: it is the connection's last one
    _num_chunks = _num_body_bytes = 0

    def send(self, event: Any) -> Any:
        """As h11. A part of a chunked body changes no state, and a stream has one for each token."""
        if isinstance(event, h11.Data) and event.data and isinstance(self._writer, ChunkedWriter):
            return b"%x\r\n%b\r\n" % (len(event.data), event.data)
        output = super().send(event)
        if isinstance(event, h11.Response) and self.their_state is h11.SEND_BODY:
            # h11 does not know: it would have the connection closed on unread data.
            self.answers_early = self.our_state is not h11.MUST_CLOSE
            if b"\r\nconnection: close" not in output.lower():
                output = output[:-2] + b"Connection: close\r\n\r\n"
        return output

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if {b"content-length", b"transfer-encoding"} <= names:
                raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
            self._num_chunks = self._num_body_bytes = 0
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_body_bytes += len(event.data)
            if self._num_chunks > max(MAX_SMALL_CHUNKS, self._num_body_bytes // MIN_CHUNK_BYTES):
                raise h11.RemoteProtocolError("tiny chunks")
        return event


def _error_response_bytes(error: ForewordError, scope: Scope | None) -> bytes:
    """A whole response to the request of this scope, or to a connection on which no request was parsed."""
    body = json_bytes(error_body(error, scope))
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **error_headers(error),
    }
    head = f"HTTP/1.1 {error.status} {STATUS_PHRASES[error.status]}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"{head}\r\n".encode() + body


def _set_socket_options(client: socket.socket, timeout_s: float) -> None:
    """Notice a client that vanished while its answer is computed; buffer little for a slow reader."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    if client.family == socket.AF_UNIX:  # the kernel knows when the other end is closed
        return
    client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(int(timeout_s), 1))
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(int(timeout_s / 4), 1))
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
