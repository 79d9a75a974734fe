"""Reading pictures: a few at a time, away from the loop, in fair turns, and nothing goes on for who left."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from typing import Any

import pytest

from foreword.core.images import PromptImage
from foreword.errors import InvalidRequest, Overloaded
from foreword.multimodal.fetch import ImageSource
from foreword.multimodal.limits import NUM_WORKERS
from foreword.server import image_intake as module
from foreword.server.image_intake import MAX_CONCURRENT_IMAGES, ImageIntake, ImageMemory, ImageReservation

MEASURED, SIZE = 12, 3  # bytes of a picture: as its head says, and as it is


class Slow:
    """Decodes when it is told to; fails on what is called bad.

    begun  names of what was fetched, in order
    """

    def __init__(self) -> None:
        self.go = threading.Event()
        self.lock = threading.Lock()
        self.reading = self.most = 0
        self.begun: list[bytes] = []

    def fetch(self, source: ImageSource) -> bytes:
        assert source.data is not None
        with self.lock:
            self.begun.append(source.data)
        return source.data

    def pixel_bytes(self, data: bytes, where: str) -> int:
        return MEASURED

    def preprocess(self, data: bytes, where: str) -> PromptImage:
        with self.lock:
            self.reading += 1
            self.most = max(self.most, self.reading)
        assert self.go.wait(10)
        with self.lock:
            self.reading -= 1
        if data == b"bad":
            raise InvalidRequest(f"{where} is bad", where)
        return PromptImage(bytes(16), 1, (1, 1, 1), (1, 1), (1, 3, 1, 1), bytes(3))

    def close(self) -> None:
        """Holds nothing."""


class Reader:
    """One that reads slowly, and what became of it."""

    def __init__(self, max_waiting: int = 99) -> None:
        self.slow = Slow()
        self.reasons: Counter[str] = Counter()
        pictures: Any = self.slow
        self.memory = ImageMemory(1000, lambda _: None)
        self.looking = ImageIntake(
            pictures, self.memory, max_waiting, lambda reason: self.reasons.update([reason])
        )

    async def look(self, *data: bytes, account: str = "") -> tuple[list[PromptImage], ImageReservation]:
        """What is read, and its hold; released where nothing is."""
        hold = self.memory.start_reservation()
        try:
            sources = [ImageSource(f"[{index}]", data=item) for index, item in enumerate(data)]
            return await self.looking.load(sources, account, hold), hold
        except BaseException:
            hold.release()
            raise

    def start(
        self, *data: bytes, account: str = ""
    ) -> asyncio.Task[tuple[list[PromptImage], ImageReservation]]:
        return asyncio.create_task(self.look(*data, account=account))

    def close(self) -> None:
        self.slow.go.set()
        self.looking.close()


async def until(told: Any) -> None:
    deadline = time.monotonic() + 5
    while not told():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


async def test_a_few_at_a_time_and_the_loop_goes_on() -> None:
    reader = Reader()
    tasks = [reader.start(b"a", b"b") for _ in range(2 * MAX_CONCURRENT_IMAGES)]
    await until(
        lambda: reader.slow.reading == NUM_WORKERS and len(reader.slow.begun) == MAX_CONCURRENT_IMAGES
    )
    assert reader.memory.held_bytes == NUM_WORKERS * MEASURED, (
        "as their heads say, and whoever waits holds nothing"
    )
    reader.slow.go.set()
    found = [await task for task in tasks]
    assert reader.slow.most <= NUM_WORKERS and all(len(pictures) == 2 for pictures, _ in found)
    assert reader.memory.held_bytes == 2 * MAX_CONCURRENT_IMAGES * 2 * SIZE
    for _, hold in found:
        hold.release()
    assert reader.memory.held_bytes == 0 and not reader.reasons
    reader.close()


async def test_what_fails_holds_nothing() -> None:
    reader = Reader()
    reader.slow.go.set()
    with pytest.raises(InvalidRequest, match="is bad"):
        await reader.look(b"good", b"bad")
    assert reader.memory.held_bytes == 0
    reader.close()


async def test_who_leaves_has_nothing_more_read() -> None:
    reader = Reader()
    tasks = [reader.start(*[b"%d" % index] * 3) for index in range(3 * MAX_CONCURRENT_IMAGES)]
    await until(lambda: len(reader.slow.begun) == MAX_CONCURRENT_IMAGES)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert reader.memory.held_bytes == 0
    reader.slow.go.set()
    (await reader.look(b"next"))[1].release()
    assert reader.slow.begun[MAX_CONCURRENT_IMAGES:] == [b"next"], (
        "what was begun ends, and nothing else begins"
    )
    reader.close()


async def test_accounts_take_turns_picture_by_picture() -> None:
    reader = Reader()
    busy = [reader.start(*[b"busy"] * 8, account="busy") for _ in range(3 * MAX_CONCURRENT_IMAGES)]
    await until(lambda: len(reader.slow.begun) == MAX_CONCURRENT_IMAGES)
    other = reader.start(b"other", account="other")
    await asyncio.sleep(0)
    reader.slow.go.set()
    (await other)[1].release()
    assert reader.slow.begun.index(b"other") <= MAX_CONCURRENT_IMAGES + 1, (
        "the next turn but one, behind nobody's other pictures"
    )
    for task in busy:
        (await task)[1].release()
    reader.close()


async def test_those_that_wait_are_bounded() -> None:
    reader = Reader(max_waiting=2)
    tasks = [reader.start(b"a") for _ in range(2)]
    await until(lambda: reader.slow.reading == 2)
    with pytest.raises(Overloaded, match="the pictures of 2 requests are to be read before") as caught:
        await reader.look(b"a")
    assert caught.value.retry_after_s and reader.reasons == {"image_queue": 1}
    reader.slow.go.set()
    for task in tasks:
        (await task)[1].release()
    (await reader.look(b"a"))[1].release()
    reader.close()


async def test_waiting_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all, however many pictures there are: a turn that comes late leaves less time for the next."""
    monkeypatch.setattr(module, "QUEUE_TIMEOUT_S", 0.2)
    reader = Reader()
    tasks = [reader.start(b"a") for _ in range(MAX_CONCURRENT_IMAGES)]
    await until(lambda: len(reader.slow.begun) == MAX_CONCURRENT_IMAGES)
    with pytest.raises(Overloaded, match=r"to be read before for 0\.2 s") as caught:
        await reader.look(b"late")
    assert caught.value.retry_after_s and reader.reasons == {"image_queue": 1}
    reader.slow.go.set()
    for task in tasks:
        (await task)[1].release()
    assert b"late" not in reader.slow.begun and reader.memory.held_bytes == 0
    reader.close()
