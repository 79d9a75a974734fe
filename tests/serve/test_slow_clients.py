"""Readers that stop reading: the engine is freed, the connection closed, and no more is kept for them than a bound."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest

from foreword.config import Config
from foreword.core.events import Event, Tokens
from foreword.core.request import Request
from foreword.serve import generation
from tests.fakes import FakeClient, Script, engine_info
from tests.serve.conftest import Running, running

CONTEXT = 1_000_000


class Endless(FakeClient):
    """Gives a token as often as the loop turns, until it is told to stop."""

    async def _events(self, request: Request) -> AsyncIterator[Event]:
        for index in range(CONTEXT):
            await asyncio.sleep(0)
            if request.id not in self.live:
                return
            yield Tokens(request.id, index, (97,), scheduled_s=time.monotonic())


@contextmanager
def endless(client_timeout: float) -> Iterator[Running]:
    config = Config(client_timeout=client_timeout, on_runaway="off", max_model_len=CONTEXT, default_max_tokens=0)
    with running(config, Endless(Script(), engine_info(CONTEXT, config))) as server:
        yield server


def stalled(server: Running) -> socket.socket:
    """A connection that has asked for a stream, and reads nothing of it."""
    host, port = server.url.removeprefix("http://").split(":")
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect((host, int(port)))
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    raw.sendall(head.encode() + body)
    return raw


def wait_until(condition: object, limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_reader_that_stops_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MAX_BEHIND", 1 << 30)
    with endless(client_timeout=1) as server, stalled(server) as first, stalled(server) as second:
        wait_until(lambda: len(server.client.live) == 2)
        server.wait_until_idle(60)
        assert len(server.client.aborted) == 2
        for raw in (first, second):
            assert not rest_of(raw).endswith(b"0\r\n\r\n"), "an end that was never sent"


def test_no_more_waits_for_a_reader_than_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before the time is over, where the engine is fast."""
    monkeypatch.setattr(generation, "MAX_BEHIND", 100)
    with endless(client_timeout=600) as server, stalled(server) as raw:
        wait_until(lambda: server.client.submitted)
        wait_until(lambda: server.client.aborted)
        said = rest_of(raw)
        assert b"the client does not take its answer" in said and b"deadline_exceeded" in said
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
