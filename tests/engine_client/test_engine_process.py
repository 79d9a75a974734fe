"""Messages between the client and an engine process: framing, order, and the end."""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import pytest_asyncio

from foreword.engine_client import engine_process as connection
from foreword.engine_client.engine_process import EngineProcess
from foreword.engine_client.heartbeat import HeartbeatPage
from tests.support.waiting import WAIT_S

MESSAGES = ["", b"x" * 100_000, {"a": [1, 2]}, b"y" * (connection.READ_BYTES + 1), "end"]


class Link:
    """A process' client side, with this test as the engine."""

    def __init__(self) -> None:
        ours, self.engine = socket.socketpair()
        self.received: list[Any] = []
        self.heartbeat = HeartbeatPage.create()
        self.process = EngineProcess(
            0, ours, self.heartbeat, lambda _, message: self.received.append(message)
        )

    async def wait_received(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.received) < count:
                await asyncio.sleep(0.001)


@pytest_asyncio.fixture
async def link() -> AsyncIterator[Link]:
    link = Link()
    yield link
    link.engine.close()
    async with asyncio.timeout(WAIT_S):
        await link.process.exited.wait()
    link.process._outbox.put(None)
    await asyncio.to_thread(link.process._writer.join)
    link.process._socket.close()
    link.heartbeat.close()


async def test_messages_arrive_in_order_before_the_end(link: Link) -> None:
    with Connection(link.engine.detach()) as engine:
        await asyncio.to_thread(lambda: [engine.send(message) for message in MESSAGES])
    async with asyncio.timeout(WAIT_S):
        await link.process.exited.wait()
    assert link.received == MESSAGES


async def test_message_may_arrive_in_any_pieces(link: Link) -> None:
    data = pickle.dumps("text")
    frame = connection.LENGTH.pack(len(data)) + data
    long_head = connection.LENGTH.pack(connection.LONG_MESSAGE) + connection.LONG_LENGTH.pack(len(data))
    for byte in frame + long_head + data + frame[:-1]:
        link.engine.send(bytes((byte,)))
        await asyncio.sleep(0)
    await link.wait_received(2)
    assert link.received == ["text", "text"]


@pytest.mark.parametrize("max_short_bytes", [connection.MAX_SHORT_BYTES, 1000])
async def test_engine_reads_what_is_sent(
    link: Link, max_short_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_SHORT_BYTES", max_short_bytes)
    for message in MESSAGES:
        link.process.send(message)
    engine = Connection(link.engine.fileno())
    try:
        assert await asyncio.to_thread(lambda: [engine.recv() for _ in MESSAGES]) == MESSAGES
    finally:
        engine._handle = None  # type: ignore[attr-defined]  # the socket owns the descriptor


async def test_unreadable_message_is_the_end(link: Link, caplog: pytest.LogCaptureFixture) -> None:
    link.engine.send(connection.LENGTH.pack(3) + b"???")
    async with asyncio.timeout(WAIT_S):
        await link.process.exited.wait()
    assert not link.received and "cannot be unpickled" in caplog.text
