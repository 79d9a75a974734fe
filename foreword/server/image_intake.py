"""Reading the pictures of requests, away from everybody else and within the memory that there is for them.

How many bytes the pictures of open requests may take.

Turns at something of which there is little, shared among accounts.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from foreword.core.images import PromptImage
from foreword.errors import Overloaded, PayloadTooLarge
from foreword.multimodal.fetch import ImageSource
from foreword.multimodal.images import ImageLoader
from foreword.multimodal.limits import NUM_WORKERS, QUEUE_TIMEOUT_S
from foreword.server.admission import DrainRateEstimator

__all__ = ["FairSemaphore", "ImageIntake", "ImageMemory", "ImageReservation"]

MIB = 1 << 20


class ImageMemory:
    """Counts the pixels of requests that are open, and of pictures that are being read. Used from one thread.

    held        bytes
    on_refusal  is told why: one of the catalog's REJECTIONS
    """

    __slots__ = ("_clock", "_drain_rate", "_limit_bytes", "_on_refusal", "held_bytes")

    def __init__(
        self, limit_bytes: int, on_refusal: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit_bytes = limit_bytes
        self._on_refusal = on_refusal
        self._clock = clock
        self._drain_rate = DrainRateEstimator(clock())
        self.held_bytes = 0

    def start_reservation(self) -> ImageReservation:
        """Nothing so far, of one request; the caller releases it, whatever happens."""
        return ImageReservation(self)

    def room(self, own_bytes: int) -> int:
        """Bytes that a request which holds `own` could have more if it were alone."""
        return self._limit_bytes - own_bytes

    def _allocate(self, num_bytes: int, own_bytes: int) -> None:
        if own_bytes + num_bytes > self._limit_bytes:
            raise PayloadTooLarge(
                f"the pictures of this request take {_format_mib(own_bytes + num_bytes)} once they are decoded; this server has "
                f"{_format_mib(self._limit_bytes)} for those of all requests (--image-memory)",
                "messages",
            )
        if self.held_bytes + num_bytes > self._limit_bytes:
            self._advance()
            wait_s = self._drain_rate.retry_after_s(num_bytes, self._clock())
            self._on_refusal("image_memory")
            raise Overloaded(
                f"the pictures of open requests take {_format_mib(self.held_bytes)} of at most {_format_mib(self._limit_bytes)}; "
                f"try again in {math.ceil(wait_s)} s",
                None,
                wait_s,
            )
        self._advance()
        self.held_bytes += num_bytes

    def _release(self, num_bytes: int) -> None:
        self._advance()
        self._drain_rate.record_freed(num_bytes)
        self.held_bytes -= num_bytes
        assert self.held_bytes >= 0, "memory was given back twice"

    def _advance(self) -> None:
        self._drain_rate.advance(self._clock(), self.held_bytes > 0)


class ImageReservation:
    """What the pictures of one request take, until it is released."""

    __slots__ = ("_memory", "num_bytes")

    def __init__(self, memory: ImageMemory) -> None:
        self._memory = memory
        self.num_bytes = 0

    def reserve(self, max_bytes: int) -> int:
        """For a picture that is about to be read, whose size is not known: as much as it can take. Returns how much that is.

        Raises Overloaded if others hold too much, PayloadTooLarge if this request does alone.
        """
        room = self._memory.room(self.num_bytes)
        reserved = min(max_bytes, max(room, 1))
        self._allocate(reserved)
        return reserved

    def commit(self, reserved: int, num_bytes: int) -> None:
        """It was read, and takes so much. Raises as reserve()."""
        if num_bytes > reserved:
            self._allocate(num_bytes - reserved)
        else:
            self._memory._release(reserved - num_bytes)
            self.num_bytes -= reserved - num_bytes

    def _allocate(self, num_bytes: int) -> None:
        self._memory._allocate(num_bytes, self.num_bytes)
        self.num_bytes += num_bytes

    def release(self) -> None:
        """Give all of it back; doing so twice is allowed."""
        self._memory._release(self.num_bytes)
        self.num_bytes = 0


def _format_mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f} MiB"


class FairSemaphore:
    """Whoever waits is served in the order of coming within an account; accounts take turns. Used from one event loop.

    free  turns that nobody has
    """

    __slots__ = ("_waiting", "num_free")

    def __init__(self, num_permits: int) -> None:
        self.num_free = num_permits
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the account that is next comes first

    @property
    def num_waiting(self) -> int:
        return sum(len(queue) for queue in self._waiting.values())

    @asynccontextmanager
    async def acquire(self, fairness_key: str, timeout_s: float) -> AsyncIterator[None]:
        """One turn, given back behind it. Raises TimeoutError where none came in time."""
        async with asyncio.timeout(timeout_s):
            await self._acquire(fairness_key)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, fairness_key: str) -> None:
        if self.num_free and not self._waiting:
            self.num_free -= 1
            return
        given = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(fairness_key, deque()).append(given)
        try:
            await given
        except asyncio.CancelledError:
            if given.cancelled():
                self._cancel_wait(fairness_key, given)
            else:  # it came at the very moment
                self._release()
            raise

    def _cancel_wait(self, fairness_key: str, waiter: asyncio.Future[None]) -> None:
        queue = self._waiting.get(fairness_key)
        if queue is not None and waiter in queue:
            queue.remove(waiter)
            if not queue:
                del self._waiting[fairness_key]

    def _release(self) -> None:
        while self._waiting:
            if not (given := self._next_waiter()).done():  # else whoever waited is about to leave
                given.set_result(None)
                return
        self.num_free += 1

    def _next_waiter(self) -> asyncio.Future[None]:
        """Of the account whose turn it is, which is the last from now on."""
        account = next(iter(self._waiting))
        queue = self._waiting.pop(account)
        given = queue.popleft()
        if queue:
            self._waiting[account] = queue
        return given


T = TypeVar("T")

MAX_CONCURRENT_IMAGES = 4  # pictures that are fetched or decoded: slow hosts hold up each other, and no text
RETRY_AFTER_S = 5.0


class ImageIntake:
    """Of all requests to one model. Used from the event loop.

    max_waiting  requests whose pictures may wait to be read
    on_refusal   is told why: one of the catalog's REJECTIONS
    """

    def __init__(
        self, loader: ImageLoader, memory: ImageMemory, max_waiting: int, on_refusal: Callable[[str], None]
    ) -> None:
        self.memory = memory
        self._loader = loader
        self._max_waiting = max_waiting
        self._on_refusal = on_refusal
        self._num_open = 0
        self._permits = FairSemaphore(MAX_CONCURRENT_IMAGES)
        self._decode_semaphore = asyncio.Semaphore(
            NUM_WORKERS
        )  # waited for here: in a thread nobody would notice who leaves
        self._executor = ThreadPoolExecutor(MAX_CONCURRENT_IMAGES, "pictures")

    async def load(
        self, sources: Sequence[ImageSource], fairness_key: str, reservation: ImageReservation
    ) -> list[PromptImage]:
        """The pictures in their order, one after the other, so that others have their turns between them.

        account  whose turns they take
        hold     takes what they take; the caller releases it, whatever happens
        Raises InvalidRequest, which names the picture; PayloadTooLarge, Overloaded.
        """
        if self._num_open >= self._max_waiting:
            raise self._reject(f"the pictures of {self._num_open} requests are to be read before")
        self._num_open += 1
        found: list[PromptImage] = []
        left_s = QUEUE_TIMEOUT_S
        try:
            for source in sources:
                began_s = time.monotonic()
                async with self._permits.acquire(fairness_key, left_s):
                    left_s -= time.monotonic() - began_s
                    found.append(await self._load_one(source, reservation))
        except TimeoutError:
            raise self._reject(
                f"the pictures of other requests were to be read before for {QUEUE_TIMEOUT_S:g} s"
            ) from None
        finally:
            self._num_open -= 1
        return found

    async def _load_one(self, source: ImageSource, reservation: ImageReservation) -> PromptImage:
        data = await self._in_thread(lambda: self._loader.fetch(source))
        async with self._decode_semaphore:
            reserved = reservation.reserve(
                await self._in_thread(lambda: self._loader.pixel_bytes(data, source.where))
            )
            picture = await self._in_thread(lambda: self._loader.preprocess(data, source.where))
        reservation.commit(reserved, picture.num_bytes)
        return picture

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """In a thread. Whoever leaves meanwhile leaves what is begun to its end, and nothing else."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _reject(self, reason: str) -> Overloaded:
        self._on_refusal("image_queue")
        return Overloaded(f"{reason}; try again in {RETRY_AFTER_S:g} s", None, RETRY_AFTER_S)

    def close(self) -> None:
        """End what reads; whoever waits for it is told."""
        self._loader.close()
        self._executor.shutdown()
