"""Reading images: bounded in memory, fair between keys, off the event loop, and cancelled on disconnect."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.core.images import PromptImage
from foreword.errors import InvalidRequest, Overloaded, PayloadTooLarge
from foreword.multimodal.image_loader import NUM_WORKERS
from foreword.multimodal.image_source import ImageSource
from foreword.server.answering import image_intake as module
from foreword.server.answering.image_intake import (
    MAX_CONCURRENT_IMAGES,
    ImageIntake,
    ImageMemory,
    ImageReservation,
)
from tests.support.waiting import WAIT_S, wait_until_async

ONE_KEY = MAX_CONCURRENT_IMAGES - 1  # images of one key at once
MEASURED, SIZE = 12, 3  # bytes of an image: by its header, and decoded


class SlowLoader:
    """A loader that decodes once `go` is set, and fails on images named "bad"."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.lock = threading.Lock()
        self.reading = self.most = 0
        self.fetched: list[bytes] = []

    def fetch(self, source: ImageSource) -> bytes:
        assert source.data is not None
        with self.lock:
            self.fetched.append(source.data)
        return source.data

    def pixel_bytes(self, data: bytes, where: str) -> int:
        return MEASURED

    def preprocess(self, data: bytes, where: str) -> PromptImage:
        with self.lock:
            self.reading += 1
            self.most = max(self.most, self.reading)
        assert self.go.wait(WAIT_S)
        with self.lock:
            self.reading -= 1
        if data == b"bad":
            raise InvalidRequest(f"{where} is bad", where)
        return PromptImage(bytes(16), 1, (1, 1, 1), (1, 1), (1, 3, 1, 1), bytes(3))

    def close(self) -> None:
        """Holds nothing."""


class IntakeHarness:
    """An intake with a slow loader."""

    def __init__(self, max_waiting: int = 99) -> None:
        self.loader = SlowLoader()
        self.reasons: Counter[str] = Counter()
        images: Any = self.loader
        self.memory = ImageMemory(1000, lambda _: None)
        self.intake = ImageIntake(
            images, self.memory, max_waiting, lambda reason: self.reasons.update([reason])
        )

    async def load(self, *data: bytes, account: str = "") -> tuple[list[PromptImage], ImageReservation]:
        """The loaded images and their reservation, which is released after an error."""
        reservation = self.memory.start_reservation()
        try:
            sources = [ImageSource(f"[{index}]", data=item) for index, item in enumerate(data)]
            return await self.intake.load(sources, account, reservation), reservation
        except BaseException:
            reservation.release()
            raise

    def start(
        self, *data: bytes, account: str = ""
    ) -> asyncio.Task[tuple[list[PromptImage], ImageReservation]]:
        return asyncio.create_task(self.load(*data, account=account))

    def close(self) -> None:
        self.loader.go.set()
        self.intake.close()


async def test_few_images_at_once_and_the_loop_runs() -> None:
    reader = IntakeHarness()
    tasks = [reader.start(b"a", b"b", account="xy"[i % 2]) for i in range(2 * MAX_CONCURRENT_IMAGES)]
    await wait_until_async(
        lambda: reader.loader.reading == NUM_WORKERS and len(reader.loader.fetched) == MAX_CONCURRENT_IMAGES
    )
    assert reader.memory.held_bytes == NUM_WORKERS * MEASURED, (
        "reserved by header size; waiting images reserve nothing"
    )
    reader.loader.go.set()
    found = [await task for task in tasks]
    assert reader.loader.most <= NUM_WORKERS and all(len(images) == 2 for images, _ in found)
    assert reader.memory.held_bytes == 2 * MAX_CONCURRENT_IMAGES * 2 * SIZE
    for _, reservation in found:
        reservation.release()
    assert reader.memory.held_bytes == 0 and not reader.reasons
    reader.close()


async def test_failed_image_holds_no_memory() -> None:
    reader = IntakeHarness()
    reader.loader.go.set()
    with pytest.raises(InvalidRequest, match="is bad"):
        await reader.load(b"good", b"bad")
    assert reader.memory.held_bytes == 0
    reader.close()


async def test_disconnect_stops_the_reading() -> None:
    reader = IntakeHarness()
    tasks = [reader.start(*[b"%d" % index] * 3) for index in range(3 * MAX_CONCURRENT_IMAGES)]
    await wait_until_async(lambda: len(reader.loader.fetched) == ONE_KEY)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert reader.memory.held_bytes == 0
    reader.loader.go.set()
    (await reader.load(b"next"))[1].release()
    assert reader.loader.fetched[ONE_KEY:] == [b"next"], "started reads finish, and no other starts"
    reader.close()


async def test_keys_alternate_image_by_image() -> None:
    reader = IntakeHarness()
    busy = [reader.start(*[b"busy"] * 8, account="busy") for _ in range(3 * MAX_CONCURRENT_IMAGES)]
    await wait_until_async(lambda: len(reader.loader.fetched) == ONE_KEY)
    other = reader.start(b"other", account="other")
    await asyncio.sleep(0)
    reader.loader.go.set()
    (await other)[1].release()
    assert reader.loader.fetched.index(b"other") == ONE_KEY, "after one image of the other key"
    for task in busy:
        (await task)[1].release()
    reader.close()


async def test_waiting_requests_are_bounded() -> None:
    reader = IntakeHarness(max_waiting=2)
    tasks = [reader.start(b"a") for _ in range(2)]
    await wait_until_async(lambda: reader.loader.reading == 2)
    with pytest.raises(Overloaded, match="the images of 2 requests wait to be read") as caught:
        await reader.load(b"a")
    assert caught.value.retry_after_s and reader.reasons == {"image_queue": 1}
    reader.loader.go.set()
    for task in tasks:
        (await task)[1].release()
    (await reader.load(b"a"))[1].release()
    reader.close()


async def test_waiting_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is for all images of a request together."""
    monkeypatch.setattr(module, "QUEUE_TIMEOUT_S", 0.2)
    reader = IntakeHarness()
    tasks = [reader.start(b"a", account=str(i)) for i in range(MAX_CONCURRENT_IMAGES)]
    await wait_until_async(lambda: len(reader.loader.fetched) == MAX_CONCURRENT_IMAGES)
    with pytest.raises(Overloaded, match=r"waited 0\.2 s for those of other requests") as caught:
        await reader.load(b"late")
    assert caught.value.retry_after_s and reader.reasons == {"image_queue": 1}
    reader.loader.go.set()
    for task in tasks:
        (await task)[1].release()
    assert b"late" not in reader.loader.fetched and reader.memory.held_bytes == 0
    reader.close()


def memory(limit: int = 100) -> tuple[ImageMemory, Counter[str]]:
    reasons: Counter[str] = Counter()
    return ImageMemory(limit, lambda reason: reasons.update([reason]), lambda: 50.0), reasons


def test_upper_bound_is_reserved_until_decoded() -> None:
    pool, reasons = memory()
    first, second = pool.start_reservation(), pool.start_reservation()
    reserved = first.reserve(60)
    assert pool.held_bytes == reserved == 60
    with pytest.raises(Overloaded, match=r"of at most 0\.0 MiB; try again in 1 s"):
        second.reserve(60)
    assert reasons == {"image_memory": 1}
    first.commit(reserved, 10)
    assert pool.held_bytes == 10
    second.commit(second.reserve(60), 60)
    assert pool.held_bytes == 70
    first.release()
    first.release()
    assert pool.held_bytes == 60
    second.release()
    assert pool.held_bytes == 0


def test_one_request_may_use_all_memory_and_no_more() -> None:
    pool, reasons = memory()
    reservation = pool.start_reservation()
    reservation.commit(reservation.reserve(500), 90)
    reservation.commit(reservation.reserve(500), 10)
    with pytest.raises(PayloadTooLarge, match="--image-memory"):
        reservation.reserve(500)
    reservation.release()
    assert pool.held_bytes == 0 and not reasons, "a too large request is not counted as overload"
    reservation = pool.start_reservation()
    with pytest.raises(PayloadTooLarge):
        reservation.commit(reservation.reserve(500), 101)
    reservation.release()
    assert pool.held_bytes == 0


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 120), st.integers(1, 120), st.booleans()), max_size=60
    )
)
def test_held_bytes_match_the_reservations(steps: list[tuple[int, int, int, bool]]) -> None:
    pool, _ = memory()
    reservations = [pool.start_reservation() for _ in range(5)]
    for index, largest, size, leave in steps:
        try:
            reservations[index].commit(reservations[index].reserve(largest), size)
        except (Overloaded, PayloadTooLarge):
            reservations[index].release()
        if leave:
            reservations[index].release()
        assert pool.held_bytes == sum(reservation.num_bytes for reservation in reservations) <= 100
    for reservation in reservations:
        reservation.release()
    assert pool.held_bytes == 0
