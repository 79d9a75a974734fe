"""Readers that stop reading: the engine is freed, the connection closed, and no more is kept for them than a bound."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from foreword.config.options import Config
from foreword.core.outputs import Event, TokenEvent
from foreword.core.request import Request
from tests.server.conftest import RunningServer, run_server
from tests.support.fakes import FakeEngineClient, FakeOutput, engine_info

CONTEXT = 1_000_000


class Endless(FakeEngineClient):
    """Gives a token as often as the loop turns, until it is told to stop."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ended: set[str] = set()

    def end(self, request_id: str) -> None:
        self.ended.add(request_id)

    async def _events(self, request: Request) -> AsyncIterator[Event]:
        for index in range(CONTEXT):
            await asyncio.sleep(0)
            if request.id not in self.live:
                return
            if request.id in self.ended:
                self.live.discard(request.id)
                yield TokenEvent(request.id, index, (97,), finish_reason="length")
                return
            yield TokenEvent(request.id, index, (97,), scheduled_s=time.monotonic())


@contextmanager
def endless(client_timeout: float) -> Iterator[RunningServer]:
    config = Config(
        client_timeout=client_timeout, on_runaway="off", max_model_len=CONTEXT, default_max_tokens=0
    )
    with run_server(config, Endless(FakeOutput(), engine_info(CONTEXT, config))) as server:
        yield server


def stalled(server: RunningServer) -> socket.socket:
    """A connection that has asked for a stream, and reads nothing of it."""
    host, port = server.url.removeprefix("http://").split(":")
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect((host, int(port)))
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    raw.sendall(head.encode() + body)
    return raw


def wait_until(condition: object, limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_reader_that_stops_is_cut_off() -> None:
    with endless(client_timeout=1) as server, stalled(server) as first, stalled(server) as second:
        wait_until(lambda: len(server.client.live) == 2)
        server.wait_until_idle(60)
        assert len(server.client.aborted) == 2
        for raw in (first, second):
            assert not rest_of(raw).endswith(b"0\r\n\r\n"), "an end that was never sent"


def test_a_reader_that_is_slow_is_not_cut_off() -> None:
    """It takes something within each time, but far less than would let the server write again."""
    with endless(client_timeout=1) as server, stalled(server) as raw:
        wait_until(lambda: server.client.submitted)
        for _ in range(40):
            time.sleep(0.1)
            assert raw.recv(2048)
        assert server.client.live and not server.client.aborted
        server.wait_until_idle(60)  # it takes nothing any more


def test_what_waits_for_a_slow_reader_is_kept_and_joined() -> None:
    """However long the answer: it takes no more memory than one that is not streamed."""
    with endless(client_timeout=600) as server, stalled(server) as raw:
        wait_until(lambda: server.client.submitted)
        request = server.client.submitted[0]
        (generation,) = server.app.state.server.generating.values()
        wait_until(lambda: generation.answers[0].num_tokens > 30_000)
        assert len(generation._backlog) < 30_000 / 32
        server.client.end(request.id)
        said = rest_of(raw)
        assert said.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and b"error" not in said
        texts = re.findall(rb'"content":"(a+)"', said)
        assert sum(map(len, texts)) == generation.answers[0].num_tokens
        assert len(texts) < generation.answers[0].num_tokens / 2
        server.wait_until_idle(60)


def rest_of(raw: socket.socket) -> bytes:
    raw.settimeout(20)
    said = b""
    try:
        while not said.endswith(b"0\r\n\r\n") and (part := raw.recv(1 << 20)):
            said += part
    except ConnectionResetError:
        pass
    return said
