"""Slow readers: a stalled client frees engine and connection, and buffered deltas are bounded."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from foreword.config.options import Config
from foreword.core.outputs import Event, TokenEvent
from foreword.core.request import Request
from tests.server.conftest import RunningServer, json_post, run_server
from tests.support.fakes import FakeEngineClient, FakeOutput, engine_info
from tests.support.waiting import WAIT_S, wait_until

CONTEXT = 1_000_000


class EndlessEngineClient(FakeEngineClient):
    """Gives a token per turn of the event loop, until end()."""

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
def endless_server(client_timeout: float) -> Iterator[RunningServer]:
    config = Config(
        client_timeout=client_timeout, on_runaway="off", max_model_len=CONTEXT, default_max_tokens=0
    )
    with run_server(config, EndlessEngineClient(FakeOutput(), engine_info(CONTEXT, config))) as server:
        yield server


def stalled_connection(server: RunningServer) -> socket.socket:
    """A connection that requests a stream and does not read."""
    host, port = server.url.removeprefix("http://").split(":")
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect((host, int(port)))
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
    raw.sendall(json_post("/v1/chat/completions", body))
    return raw


def test_stalled_reader_is_cut_off() -> None:
    with (
        endless_server(client_timeout=1) as server,
        stalled_connection(server) as first,
        stalled_connection(server) as second,
    ):
        wait_until(lambda: len(server.client.live) == 2)
        server.wait_until_idle()
        assert len(server.client.aborted) == 2
        for raw in (first, second):
            assert not read_rest(raw).endswith(b"0\r\n\r\n"), "the stream must not look complete"


def test_slow_reader_is_not_cut_off() -> None:
    """It reads in every timeout, but less than lets the server write again."""
    with endless_server(client_timeout=1) as server, stalled_connection(server) as raw:
        wait_until(lambda: server.client.submitted)
        for _ in range(40):
            time.sleep(0.1)
            assert raw.recv(2048)
        assert server.client.live and not server.client.aborted
        server.wait_until_idle()  # it reads no more


def test_deltas_of_a_slow_reader_are_merged() -> None:
    """A long stream needs no more memory than a whole answer."""
    with endless_server(client_timeout=600) as server, stalled_connection(server) as raw:
        wait_until(lambda: server.client.submitted)
        request = server.client.submitted[0]
        (generation,) = server.app.state.models.generations.values()
        wait_until(lambda: generation.outputs[0].num_tokens > 30_000)
        assert len(generation._delta_queue) < 30_000 / 32
        server.client.end(request.id)
        received = read_rest(raw)
        assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and b"error" not in received
        texts = re.findall(rb'"content":"(a+)"', received)
        assert sum(map(len, texts)) == generation.outputs[0].num_tokens
        assert len(texts) < generation.outputs[0].num_tokens / 2
        server.wait_until_idle()


def read_rest(raw: socket.socket) -> bytes:
    raw.settimeout(WAIT_S)
    received = b""
    try:
        while not received.endswith(b"0\r\n\r\n") and (part := raw.recv(1 << 20)):
            received += part
    except ConnectionResetError:
        pass
    return received
