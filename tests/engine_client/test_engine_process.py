"""Messages between the client and an engine process: framing, order, and the end."""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from foreword.core.images import PromptImage
from foreword.core.outputs import ErrorEvent, Event, StepReport, StepStats, TokenEvent
from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.core.structured_output import StructuredOutput, Vocabulary
from foreword.engine_client import engine_process as connection
from foreword.engine_client.engine_process import EngineProcess, ProcessSession, SendFailed
from foreword.engine_client.heartbeat import HeartbeatPage
from foreword.engine_client.messages import AddImage, DropImage, RemoveRequest
from foreword.errors import EngineDead, RequestFailed
from tests.support.waiting import WAIT_S

MESSAGES = ["", b"x" * 100_000, {"a": [1, 2]}, b"y" * (connection.READ_BYTES + 1), "end"]
VOCABULARY = Vocabulary((), (), ())


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


class FakeProcess:
    """Records messages instead of sending them; the test says which arrival numbers are in the batch."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.killed = ""
        self.heartbeat = self
        self.arrivals: tuple[int, ...] = ()

    def send(self, message: Any, make_first: Callable[[], Any] | None = None) -> None:
        self.sent += [message] if make_first is None else [make_first(), message]

    def kill(self, reason: str) -> None:
        self.killed = reason

    def busy_requests(self) -> tuple[int, ...]:
        return self.arrivals


def make_session() -> tuple[ProcessSession, FakeProcess]:
    process = FakeProcess()
    return ProcessSession(process, lambda: VOCABULARY), process  # type: ignore[arg-type]


def digest(number: int) -> bytes:
    return bytes([number]) * 16


def make_request(name: str, images: Sequence[int] = (), **params: Any) -> Request:
    shown = tuple(
        PromptImage(digest(number), 1, (1, 1, 1), (1, 1), (1, 3, 1, 1), b"abc", index)
        for index, number in enumerate(images)
    )
    return Request(name, (1,) * (len(images) or 3), SamplingParams(**params), 0, images=shown)


def report(*events: Event) -> StepReport:
    return StepReport(events, StepStats())


def test_ended_requests_get_no_events() -> None:
    session, process = make_session()
    events: list[Event] = []
    for name in "abc":
        session.submit(make_request(name), events.append)
    session.remove("a", 5)
    session.remove("b", None)
    session.remove("gone", 7)
    assert process.sent[3:] == [RemoveRequest("a", 5), RemoveRequest("b", None)]
    last = TokenEvent("c", 0, (1,), finish_reason="length")
    late = TokenEvent("a", 5, (1,))
    session.on_report(report(late, last, last))
    assert events == [last] and not len(session)
    session.remove("c", None)
    assert len(process.sent) == 5, "it ended by itself"


def test_arrival_numbers_count_all_requests() -> None:
    session, process = make_session()
    for name in "abc":
        session.submit(make_request(name), lambda event: None)
    session.remove("a", None)
    process.arrivals = (0, 2)
    assert session.running_ids() == {"c"}


def test_vocabulary_precedes_the_first_grammar() -> None:
    session, process = make_session()
    grammar = StructuredOutput.regex("a+")
    session.submit(make_request("text"), lambda event: None)
    session.submit(make_request("image", [1], structured=grammar), lambda event: None)
    session.submit(make_request("grammar", structured=grammar), lambda event: None)
    kinds = [type(message) for message in process.sent]
    assert kinds == [Request, AddImage, Vocabulary, Request, Request]


def test_message_that_cannot_be_sent_fails_its_request_and_ends_the_engine() -> None:
    session, process = make_session()
    events: list[Event] = []
    for name in "ab":
        session.submit(make_request(name), events.append)
    session.on_send_failed(SendFailed(process.sent[0], TypeError("a lambda")))
    (failed,) = events
    assert isinstance(failed, ErrorEvent) and isinstance(failed.error, RequestFailed)
    assert failed.request_id == "a" and "TypeError" in failed.error.message and "TypeError" in process.killed
    assert len(session) == 1


async def test_end_of_the_process_ends_requests_and_calls() -> None:
    """A listener may end other requests, which get no event then."""
    session, _ = make_session()
    events: list[Event] = []

    def end_other(event: Event) -> None:
        events.append(event)
        session.remove("b", None)

    for name, on_event in (("a", end_other), ("b", events.append), ("c", events.append)):
        session.submit(make_request(name), on_event)
    call = asyncio.create_task(session.calls.call(lambda number: None))
    await asyncio.sleep(0)
    error = EngineDead("gone")
    session.close(error)
    session.close(error)
    assert events == [ErrorEvent("a", error), ErrorEvent("c", error)]
    with pytest.raises(RequestFailed, match="try again"):
        await call


def test_pixels_are_sent_once_for_all_choices() -> None:
    session, process = make_session()
    for name in "abcd":
        session.submit(make_request(name, [1, 2, 1]), lambda event: None)
    assert process.sent[:2] == [AddImage(digest(1), b"abc"), AddImage(digest(2), b"abc")]
    assert len(process.sent) == 6 and all(i.pixels is None for r in process.sent[2:] for i in r.images)
    for name in "abc":
        session.remove(name, None)
    assert not any(isinstance(message, DropImage) for message in process.sent)
    session.on_report(report(ErrorEvent("d", RequestFailed("no"))))
    assert {message.digest for message in process.sent[-2:]} == {digest(1), digest(2)}


@given(st.lists(st.tuples(st.integers(0, 5), st.sets(st.integers(0, 3))), max_size=40))
def test_engine_has_the_images_of_open_requests(moves: list[tuple[int, set[int]]]) -> None:
    """Requests come and end in any order."""
    session, process = make_session()
    open_requests, held, num_read = dict[int, Request](), set[bytes](), 0
    for number, images in [*moves, *((number, set[int]()) for number in range(6))]:
        if number in open_requests:
            session.remove(open_requests.pop(number).id, None)
        elif images:
            request = open_requests[number] = make_request(str(number), sorted(images))
            session.submit(request, lambda event: None)
        for message in process.sent[num_read:]:
            if isinstance(message, AddImage):
                assert message.digest not in held, "sent twice"
                held.add(message.digest)
            elif isinstance(message, DropImage):
                held.remove(message.digest)
        num_read = len(process.sent)
        assert held == {image.digest for request in open_requests.values() for image in request.images}
    assert not held
