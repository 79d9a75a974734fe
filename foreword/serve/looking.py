"""Reading the pictures of requests, away from everybody else and within the memory that there is for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from foreword.core.pictures import PromptImage
from foreword.errors import Overloaded
from foreword.media.limits import NUM_WORKERS, QUEUE_TIMEOUT_S
from foreword.media.pictures import ImageLoader
from foreword.media.source import ImageSource
from foreword.serve.picture_memory import ImageReservation, ImageMemory
from foreword.serve.turns import FairSemaphore

__all__ = ["ImageIntake"]

T = TypeVar("T")

MAX_CONCURRENT_IMAGES = 4  # pictures that are fetched or decoded: slow hosts hold up each other, and no text
RETRY_AFTER_S = 5.0


class ImageIntake:
    """Of all requests to one model. Used from the event loop.

    max_waiting  requests whose pictures may wait to be read
    on_refusal   is told why: one of the catalog's REJECTIONS
    """

    def __init__(self, loader: ImageLoader, memory: ImageMemory, max_waiting: int, on_refusal: Callable[[str], None]) -> None:
        self.memory = memory
        self._loader = loader
        self._max_waiting = max_waiting
        self._on_refusal = on_refusal
        self._num_open = 0
        self._permits = FairSemaphore(MAX_CONCURRENT_IMAGES)
        self._decode_semaphore = asyncio.Semaphore(NUM_WORKERS)  # waited for here: in a thread nobody would notice who leaves
        self._executor = ThreadPoolExecutor(MAX_CONCURRENT_IMAGES, "pictures")

    async def load(self, sources: Sequence[ImageSource], fairness_key: str, reservation: ImageReservation) -> list[PromptImage]:
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
            raise self._reject(f"the pictures of other requests were to be read before for {QUEUE_TIMEOUT_S:g} s") from None
        finally:
            self._num_open -= 1
        return found

    async def _load_one(self, source: ImageSource, reservation: ImageReservation) -> PromptImage:
        data = await self._in_thread(lambda: self._loader.fetch(source))
        async with self._decode_semaphore:
            reserved = reservation.reserve(await self._in_thread(lambda: self._loader.pixel_bytes(data, source.where)))
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
