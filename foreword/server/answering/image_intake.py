"""Images of open requests: fair, bounded reading in threads, within a memory budget."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from foreword.core.images import PromptImage
from foreword.errors import Overloaded, PayloadTooLarge
from foreword.multimodal.image_loader import NUM_WORKERS, QUEUE_TIMEOUT_S, ImageLoader
from foreword.multimodal.image_source import ImageSource
from foreword.server.admission import DrainRateEstimator
from foreword.server.intake import FairSemaphore

T = TypeVar("T")
MIB = 1 << 20
MAX_CONCURRENT_IMAGES = 4  # images fetched or decoded at once; slow hosts delay other images, never text
RETRY_AFTER_S = 5.0


class ImageMemory:
    """Bounds the pixels of open requests, in bytes. Used from one thread."""

    def __init__(
        self,
        limit_bytes: int,
        on_refusal: Callable[[str], None],  # called with one of the catalog's REJECTIONS
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_bytes = limit_bytes
        self._on_refusal = on_refusal
        self._clock = clock
        self._drain_rate = DrainRateEstimator(limit_bytes, clock())
        self.held_bytes = 0

    def start_reservation(self) -> ImageReservation:
        """An empty reservation for one request; the caller must release it."""
        return ImageReservation(self)

    def _reserve(self, num_bytes: int, own_bytes: int) -> None:
        if own_bytes + num_bytes > self._limit_bytes:
            raise PayloadTooLarge(
                f"the decoded images of this request take {_format_mib(own_bytes + num_bytes)}; "
                f"all requests together may take {_format_mib(self._limit_bytes)} (--image-memory)",
                "messages",
            )
        self._advance()
        if self.held_bytes + num_bytes > self._limit_bytes:
            wait_s = self._drain_rate.retry_after_s(num_bytes, self._clock())
            self._on_refusal("image_memory")
            raise Overloaded(
                f"the images of open requests take {_format_mib(self.held_bytes)} "
                f"of at most {_format_mib(self._limit_bytes)}; try again in {math.ceil(wait_s)} s",
                None,
                wait_s,
            )
        self.held_bytes += num_bytes

    def _release(self, num_bytes: int) -> None:
        self._advance()
        self._drain_rate.record_freed(num_bytes)
        self.held_bytes -= num_bytes
        assert self.held_bytes >= 0, "image memory was released twice"

    def _advance(self) -> None:
        self._drain_rate.advance(self._clock(), self.held_bytes > 0)


class ImageReservation:
    """Image memory of one request, until release()."""

    __slots__ = ("_memory", "num_bytes")

    def __init__(self, memory: ImageMemory) -> None:
        self._memory = memory
        self.num_bytes = 0

    def reserve(self, max_bytes: int) -> int:
        """Reserve the upper bound of an image that is not decoded yet; returns the reserved bytes.

        Raises Overloaded if other requests hold too much, PayloadTooLarge if this request alone does.
        """
        free_bytes = self._memory._limit_bytes - self.num_bytes  # if this request were alone
        reserved = min(max_bytes, max(free_bytes, 1))
        self._allocate(reserved)
        return reserved

    def commit(self, reserved: int, num_bytes: int) -> None:
        """Replace an image's reservation by its real size. Raises as reserve()."""
        if num_bytes > reserved:
            self._allocate(num_bytes - reserved)
        else:
            self._memory._release(reserved - num_bytes)
            self.num_bytes -= reserved - num_bytes

    def _allocate(self, num_bytes: int) -> None:
        self._memory._reserve(num_bytes, self.num_bytes)
        self.num_bytes += num_bytes

    def release(self) -> None:
        """Free all of it; may be called twice."""
        self._memory._release(self.num_bytes)
        self.num_bytes = 0


def _format_mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f} MiB"


class ImageIntake:
    """Fetches, decodes and preprocesses the images of all requests. Used from the event loop."""

    def __init__(
        self,
        loader: ImageLoader,
        memory: ImageMemory,
        max_waiting: int,  # requests whose images may wait
        on_refusal: Callable[[str], None],  # called with one of the catalog's REJECTIONS
    ) -> None:
        self.memory = memory
        self._loader = loader
        self._max_waiting = max_waiting
        self._on_refusal = on_refusal
        self._num_open = 0
        self._permits = FairSemaphore(MAX_CONCURRENT_IMAGES)
        # Waited for here, not in a thread, so that a disconnect ends the wait.
        self._decode_semaphore = asyncio.Semaphore(NUM_WORKERS)
        self._executor = ThreadPoolExecutor(MAX_CONCURRENT_IMAGES, "images")

    async def load(
        self, sources: Sequence[ImageSource], fairness_key: str, reservation: ImageReservation
    ) -> list[PromptImage]:
        """The images in order, one at a time, so that other keys' images come between them.

        Raises InvalidRequest, which names the image; PayloadTooLarge, Overloaded.
        """
        if self._num_open >= self._max_waiting:
            raise self._reject(f"the images of {self._num_open} requests wait to be read")
        self._num_open += 1
        images: list[PromptImage] = []
        left_s = QUEUE_TIMEOUT_S
        try:
            for source in sources:
                started_s = time.monotonic()
                async with self._permits.hold(fairness_key, left_s):
                    left_s -= time.monotonic() - started_s
                    images.append(await self._load_one(source, reservation))
        except TimeoutError:
            raise self._reject(f"images waited {QUEUE_TIMEOUT_S:g} s for those of other requests") from None
        finally:
            self._num_open -= 1
        return images

    async def _load_one(self, source: ImageSource, reservation: ImageReservation) -> PromptImage:
        data = await self._in_thread(lambda: self._loader.fetch(source))
        async with self._decode_semaphore:
            max_bytes = await self._in_thread(lambda: self._loader.pixel_bytes(data, source.where))
            reserved = reservation.reserve(max_bytes)
            image = await self._in_thread(lambda: self._loader.preprocess(data, source.where))
        reservation.commit(reserved, image.num_bytes)
        return image

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run in a thread, which a cancel does not stop."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _reject(self, reason: str) -> Overloaded:
        self._on_refusal("image_queue")
        return Overloaded(f"{reason}; try again in {RETRY_AFTER_S:g} s", None, RETRY_AFTER_S)

    def close(self) -> None:
        """Stop the readers; waiting requests get an error."""
        self._loader.close()
        self._executor.shutdown()
