"""Invalid or slow HTTP: it is refused or cut off, without a 5xx or a hang."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import select
import socket
import struct
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import h11
import pytest
from starlette.types import Message, Receive, Scope, Send

from foreword.cli.uvicorn_server import run_uvicorn
from foreword.config.options import Config
from foreword.errors import ShuttingDown
from foreword.server.http import bounded_connections as connections
from foreword.server.http import middleware
from foreword.server.http.errors import error_response
from tests.server.conftest import RunningServer, run_server
from tests.support.fakes import FakeEngineClient, FakeOutput
from tests.support.waiting import WAIT_S, wait_until, wait_until_async

CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()


@pytest.fixture(scope="module")
def strict_server() -> Iterator[RunningServer]:
    """A server with a client timeout of one second."""
    with run_server(
        Config(client_timeout=1, max_connections=40, max_body_mb=1), FakeEngineClient(FakeOutput("ok"))
    ) as server:
        yield server


@pytest.fixture(autouse=True)
def no_tracebacks(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No input of a client causes a traceback."""
    with caplog.at_level(logging.WARNING):
        yield
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


def read_until_close(raw: socket.socket) -> bytes:
    """All bytes until the server closes."""
    found = b""
    try:
        while part := raw.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


def status_of(answer: bytes) -> int:
    assert answer.startswith(b"HTTP/1.1 "), answer
    return int(answer.split()[1])


def full_request(body: bytes = BODY) -> bytes:
    return HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.full
@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        (b"nonsense\r\n\r\n", {400}),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200, {400}),  # TLS
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 404}),
        (b"GET / HTTP/1.1\r\n\r\n", {400}),  # no Host
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", {400}),
        (b"GET /nowhere HTTP/9.9\r\nHost: x\r\n\r\n", {400, 404}),
        (b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", {400}),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA : b\r\n\r\n", {400}),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: \x00\r\n\r\n", {400}),
        (b"GET /" + b"x" * 300_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", {400, 404}),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 100_000, {400}),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 1_000_000, {400}),
        (b"BREW / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", {404, 405}),
        (b"GET http://x/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", {404}),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", {404, 405}),
        (b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", {404, 405}),
        (b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: upgrade, close\r\nUpgrade: websocket\r\n\r\n", {200}),
        (b"GET /%ff%00%2e%2e/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", {404}),
        (HEAD + b"Content-Length: -1\r\n\r\n", {400}),
        (HEAD + b"Content-Length: 1e3\r\n\r\n", {400}),
        (HEAD + b"Content-Length: 99999999999999999999\r\n\r\n", {400, 413}),
        (HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", {400}),
        (HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef", {400}),
        (HEAD + b"Content-Length: 100000\r\n\r\n" + BODY, {408}),  # shorter than declared
        (HEAD + b"Connection: close\r\nContent-Length: 3\r\n\r\n" + BODY, {400}),  # longer than declared
        (HEAD + b"Transfer-Encoding: gzip\r\n\r\n", {400, 501}),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n", {400}),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nabc\r\n0\r\n\r\n", {400}),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\nabc", {400, 408}),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcdefgh\r\n0\r\n\r\n", {400}),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n{\r\n" * 3, {408}),
        (
            HEAD
            + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"
            % (len(BODY), BODY),
            {400},
        ),
        (HEAD + b"Content-Length: %d\r\ntransfer-encoding: Chunked\r\n\r\n" % len(BODY) + BODY, {400}),
    ],
)
def test_invalid_requests_are_refused(strict_server: RunningServer, sent: bytes, statuses: set[int]) -> None:
    with strict_server.connect() as raw:
        try:
            raw.sendall(sent)
            answer = read_until_close(raw)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""  # cut off while the client was sending
    assert not answer or status_of(answer) in statuses, answer[:300]
    assert answer or len(sent) > 100_000
    assert strict_server.chat().choices[0].message.content == "ok"


def test_refusal_has_the_error_envelope(strict_server: RunningServer) -> None:
    with strict_server.connect() as raw:
        raw.sendall(b"nonsense\r\n\r\n")
        head, _, body = read_until_close(raw).partition(b"\r\n\r\n")
    assert b"Connection: close" in head and json.loads(body)["error"]["type"] == "invalid_request_error"


def test_two_length_headers_are_refused(strict_server: RunningServer) -> None:
    with strict_server.connect() as raw:
        raw.sendall(
            HEAD
            + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
            + b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
        )
        answer = read_until_close(raw)
    assert answer.count(b"\r\n\r\n") == 1 and b"Connection: close" in answer


@pytest.mark.parametrize("headers", [[], [(b"Content-Length", b"6")]])
def test_parts_of_a_body_are_framed_as_h11_frames_them(headers: list[tuple[bytes, bytes]]) -> None:
    sent = []
    for server in (h11.Connection(h11.SERVER), connections._StrictH11(h11.SERVER)):
        server.receive_data(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        while server.their_state is not h11.DONE:
            server.next_event()
        parts = [h11.Data(data=part) for part in (b"ab", b"", b"cdef")]
        events = [h11.Response(status_code=200, headers=headers), *parts, h11.EndOfMessage()]
        sent.append([server.send(event) for event in events])
    assert sent[0] == sent[1]


def test_garbage_after_a_request_is_harmless(strict_server: RunningServer) -> None:
    with strict_server.connect() as raw:
        raw.sendall(full_request().replace(b"Connection: close\r\n", b"") + b"\x00garbage\r\n\r\n" * 10)
        answer = read_until_close(raw)
    assert [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", answer)] == [200, 400]


def test_pipelined_requests_are_answered_in_order(strict_server: RunningServer) -> None:
    with strict_server.connect() as raw:
        raw.sendall(full_request().replace(b"Connection: close\r\n", b"") * 20 + full_request())
        assert read_until_close(raw).count(b"HTTP/1.1 200") == 21


def test_garbage_while_a_body_is_refused(strict_server: RunningServer) -> None:
    """The answer has started, so no second one follows."""
    with strict_server.connect() as raw:
        raw.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"186a0\r\n" + b"x" * 100_000 + b"\r\n")
        for _ in range(12):
            raw.sendall(b"186a0\r\n" + b"x" * 100_000 + b"\r\n")
        try:
            raw.recv(1, socket.MSG_PEEK)  # the answer starts
            raw.sendall(b"nonsense\r\n")
        except (BrokenPipeError, ConnectionResetError):
            return
        assert status_of(read_until_close(raw)) == 413


def test_tiny_chunks_are_refused(strict_server: RunningServer) -> None:
    chunked = HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    few = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY)
    for chunks, status in ((few, 200), (b"1\r\n \r\n" * 2000 + few, 400)):
        with strict_server.connect() as raw:
            raw.sendall(chunked + chunks + b"0\r\n\r\n")
            answer = read_until_close(raw)
        assert not answer or status_of(answer) == status  # reset: it was cut off while the client was sending
    large = b"400\r\n" + b" " * 1024 + b"\r\n"
    with strict_server.connect() as raw:
        raw.sendall(chunked + large * 40 + few + b"0\r\n\r\n")
        assert status_of(read_until_close(raw)) == 200


def test_answer_before_the_body_closes_the_connection() -> None:
    """The rest of the body is dropped unparsed; an answer after the body leaves the connection open."""
    with run_server(Config(api_key="secret", max_body_mb=1), FakeEngineClient(FakeOutput("ok"))) as server:
        with server.connect() as raw:
            raw.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
            answer = read_until_close(raw)  # the client has not ended its body
            assert status_of(answer) == 401 and answer.lower().count(b"connection: close") == 1
            raw.sendall(b"1\r\nx\r\n" * 10_000 + b"no chunk")
        with server.connect() as raw:
            for _ in range(2):
                raw.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
                answer = b""
                while not answer.endswith(b"}}"):
                    answer += raw.recv(65536)
                assert status_of(answer) == 401 and b"connection: close" not in answer.lower()


def test_connection_is_read_in_small_parts(
    strict_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between them the event loop serves other connections."""
    receive, sizes = connections.TimeoutH11Protocol.data_received, []

    def record(self: connections.TimeoutH11Protocol, data: bytes) -> None:
        sizes.append(len(data))
        receive(self, data)

    monkeypatch.setattr(connections.TimeoutH11Protocol, "data_received", record)
    with strict_server.connect() as raw:
        raw.sendall(full_request(BODY + b" " * 900_000))
        assert status_of(read_until_close(raw)) == 200
    assert sum(sizes) > 900_000 and max(sizes) <= connections.MAX_READ_BYTES


@dataclass
class ParserWork:
    """What the HTTP parsers of a server were given, and what they made of it."""

    num_reads: int = 0
    num_received: int = 0  # bytes that came from connections
    num_parsed: int = 0  # bytes of them that reached a parser
    num_events: int = 0


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> ParserWork:
    work, parser, protocol = ParserWork(), connections._StrictH11, connections.TimeoutH11Protocol
    receive, parse, next_event = protocol.data_received, parser.receive_data, parser.next_event

    def count_received(self: connections.TimeoutH11Protocol, data: bytes) -> None:
        work.num_reads += 1
        work.num_received += len(data)
        receive(self, data)

    def count_parsed(self: h11.Connection, data: bytes) -> None:
        work.num_parsed += len(data)
        parse(self, data)

    def count_event(self: connections._StrictH11) -> Any:
        work.num_events += 1
        return next_event(self)

    monkeypatch.setattr(protocol, "data_received", count_received)
    monkeypatch.setattr(parser, "receive_data", count_parsed)
    monkeypatch.setattr(parser, "next_event", count_event)
    return work


TINY_CHUNKS = b"1\r\nx\r\n" * 200_000


@pytest.mark.parametrize(
    ("head", "status", "max_events"),
    [
        # A refused request: the first part of its body may be parsed with its head.
        (b"GET /live HTTP/1.1\r\nHost: x\r\n", 200, 2 * connections.MAX_SMALL_CHUNKS),
        (
            b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n",
            413,
            2 * connections.MAX_SMALL_CHUNKS,
        ),
        (HEAD, 400, 2 * connections.MAX_SMALL_CHUNKS),
    ],
    ids=["answered before its body", "too large", "tiny chunks"],
)
def test_work_on_a_refused_body_is_bounded(
    strict_server: RunningServer, work: ParserWork, head: bytes, status: int, max_events: int
) -> None:
    """Without end, and in chunks of a byte: it is dropped unparsed, or cut off."""
    if b"Content-Length" not in head:
        head += b"Transfer-Encoding: chunked\r\n"
    with strict_server.connect() as raw:
        raw.sendall(head + b"\r\n1\r\nx\r\n")
        if status != 400:
            assert status_of(raw.recv(65536)) == status
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            raw.sendall(TINY_CHUNKS)
        if status == 400:
            read_until_close(raw)
        else:  # all of it came
            wait_until(lambda: work.num_received > len(TINY_CHUNKS))
    assert work.num_parsed <= 2 * connections.MAX_READ_BYTES and work.num_events <= max_events


def test_work_on_an_accepted_body_follows_its_bytes(strict_server: RunningServer, work: ParserWork) -> None:
    """Each read of at most 16 KB is two events: its data, and the wait for more."""
    sent = full_request(BODY + b" " * 900_000)
    with strict_server.connect() as raw:
        raw.sendall(sent)
        assert status_of(read_until_close(raw)) == 200
    assert work.num_parsed == len(sent) and work.num_events <= 2 * work.num_reads + 4


async def test_body_in_tiny_parts_takes_no_more_memory_than_its_bytes() -> None:
    parts = iter([b"ab"] * 200_000)

    async def receive() -> Message:
        part = next(parts, b"")
        return {"type": "http.request", "body": part, "more_body": part != b""}

    tracemalloc.start()
    try:
        body = middleware._Body(receive)
        sizes = [size async for size in body.read()]
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert body.complete and body.size == sum(sizes) == 400_000
    assert taken - sys.getsizeof(sizes) < 1.5 * body.size
    assert (await body.replay())["body"] == b"ab" * 200_000


async def test_other_connections_are_served_between_two_reads() -> None:
    """A client that never stops sending gets one read of 16 KB in a turn of the event loop."""
    turns: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass

    def record(self: connections.TimeoutH11Protocol, data: bytes) -> None:
        turns.append("read")
        received(self, data)

    def turn() -> None:
        turns.append("turn")
        loop.call_soon(turn)

    received = connections.TimeoutH11Protocol.data_received
    loop = asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", 0))
    async with run_uvicorn(connections.uvicorn_config(app, Config()), listener):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(connections.TimeoutH11Protocol, "data_received", record)
            _, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(HEAD + b"Content-Length: 2000000\r\n\r\n" + b"x" * 2_000_000)
            loop.call_soon(turn)
            await wait_until_async(lambda: turns.count("read") > 100)
            writer.close()
    reads = "".join("r" if one == "read" else "." for one in turns)
    assert "rr" not in reads


# Slow clients


def send_slowly(raw: socket.socket, data: bytes, pause_s: float) -> bytes:
    """Send byte by byte until the server closes; returns its answer."""
    raw.settimeout(pause_s)
    found = b""
    for place in range(len(data)):
        try:
            raw.sendall(data[place : place + 1])
            part = raw.recv(65536)
        except TimeoutError:
            continue
        except (BrokenPipeError, ConnectionResetError):
            return found
        if not part:
            return found
        found += part
    raise AssertionError("it was never cut off")


def test_slow_head_times_out(strict_server: RunningServer) -> None:
    with strict_server.connect() as raw:
        assert status_of(send_slowly(raw, b"GET /live HTTP/1.1\r\n" + b"A: b\r\n" * 100, 0.05)) == 408


@pytest.mark.full
def test_slow_body_times_out(strict_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "BODY_TIMEOUT_FACTOR", 2)
    with strict_server.connect() as raw:
        raw.sendall(HEAD + b"Content-Length: 100000\r\n\r\n")
        assert status_of(send_slowly(raw, b"x" * 100_000, 0.3)) == 408


@pytest.mark.full
@pytest.mark.parametrize(
    "sent", [b"", b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["silent from the start", "after an answer"]
)
def test_silent_connection_is_closed(strict_server: RunningServer, sent: bytes) -> None:
    with strict_server.connect() as raw:
        raw.sendall(sent)
        answer = read_until_close(raw)
    assert status_of(answer) == 200 if sent else answer == b""


@pytest.mark.full
@pytest.mark.parametrize("stream", [True, False])
def test_slow_answer_does_not_time_out(strict_server: RunningServer, stream: bool) -> None:
    strict_server.set_output(FakeOutput("slow", delay_s=0.5))
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": stream}
    answer = strict_server.http.post(CHAT, json=body)
    assert answer.status_code == 200 and ("[DONE]" if stream else "slow") in answer.text
    strict_server.set_output(FakeOutput("ok"))


def test_half_closed_socket_is_a_disconnect(strict_server: RunningServer) -> None:
    strict_server.set_output(FakeOutput("ok", delay_s=0.05))
    with strict_server.connect() as raw:
        raw.sendall(full_request())
        raw.shutdown(socket.SHUT_WR)
        read_until_close(raw)
    strict_server.wait_until_idle()
    strict_server.set_output(FakeOutput("ok"))


def test_reset_connections_are_cleaned_up(strict_server: RunningServer) -> None:
    for cut in range(1, len(full_request()), 17):
        with strict_server.connect() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raw.sendall(full_request()[:cut])
    strict_server.wait_until_idle()
    assert strict_server.chat().choices[0].message.content == "ok"


def test_connections_are_bounded(strict_server: RunningServer) -> None:
    sockets = [strict_server.connect() for _ in range(60)]
    try:
        last = sockets[-1]
        assert status_of(read_until_close(last)) == 429
        assert sum(map(is_open, sockets)) <= 40
    finally:
        for raw in sockets:
            raw.close()
    wait_until(lambda: strict_server.http.get("/live").status_code == 200)


def is_open(raw: socket.socket) -> bool:
    """Whether the server has sent nothing, not even a refusal."""
    raw.setblocking(False)
    try:
        raw.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except ConnectionResetError:
        pass
    return False


def test_all_bodies_together_are_bounded(
    strict_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "MAX_BODIES_IN_MEMORY", 1)
    with strict_server.connect() as first, strict_server.connect() as second:
        for raw in (first, second):
            raw.sendall(HEAD + b"Content-Length: 900000\r\n\r\n" + b" " * 600_000)
        (refused,), _, _ = select.select((first, second), (), (), WAIT_S)
        assert status_of(refused.recv(15)) == 429
        accepted = second if refused is first else first
        accepted.sendall(b" " * 300_000)
        assert status_of(accepted.recv(15)) == 400
    assert strict_server.chat().choices[0].message.content == "ok"


def test_request_of_a_new_connection_is_answered_at_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection was accepted before the server stopped to listen, its request comes after that."""
    monkeypatch.setattr(connections, "NEW_CONNECTION_GRACE_S", WAIT_S)
    monkeypatch.setattr(connections, "SHUTDOWN_GRACE_S", WAIT_S)

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await error_response(ShuttingDown("no new requests"))(scope, receive, send)

    async def ask() -> bytes:
        listener = socket.create_server(("127.0.0.1", 0))
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(
                run_uvicorn(connections.uvicorn_config(refuse, Config()), listener)
            )
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            ending = asyncio.create_task(stack.aclose())
            while listener.fileno() >= 0:  # until the server stops to listen
                await asyncio.sleep(0)
            writer.write(full_request())
            answer = await reader.read()
            writer.close()
            await ending
        return answer

    assert status_of(asyncio.run(ask())) == 503
