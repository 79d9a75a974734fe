"""Reading the pictures of requests, away from everybody else and within the memory that there is for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from foreword.core.pictures import Picture
from foreword.errors import Overloaded
from foreword.media.limits import NUM_WORKERS, QUEUE_S
from foreword.media.pictures import Pictures
from foreword.media.source import Source
from foreword.serve.picture_memory import Hold, PictureMemory
from foreword.serve.turns import Turns

__all__ = ["Looking"]

T = TypeVar("T")

AT_ONCE = 4  # pictures that are fetched or decoded: slow hosts hold up each other, and no text
RETRY_AFTER_S = 5.0


class Looking:
    """Of all requests to one model. Used from the event loop.

    max_waiting  requests whose pictures may wait to be read
    on_refusal   is told why: one of the catalog's REJECTIONS
    """

    def __init__(self, pictures: Pictures, memory: PictureMemory, max_waiting: int, on_refusal: Callable[[str], None]) -> None:
        self.memory = memory
        self._pictures = pictures
        self._max_waiting = max_waiting
        self._on_refusal = on_refusal
        self._open = 0
        self._turns = Turns(AT_ONCE)
        self._decoders = asyncio.Semaphore(NUM_WORKERS)  # waited for here: in a thread nobody would notice who leaves
        self._threads = ThreadPoolExecutor(AT_ONCE, "pictures")

    async def look(self, sources: Sequence[Source], account: str, hold: Hold) -> list[Picture]:
        """The pictures in their order, one after the other, so that others have their turns between them.

        account  whose turns they take
        hold     takes what they take; the caller releases it, whatever happens
        Raises InvalidRequest, which names the picture; PayloadTooLarge, Overloaded.
        """
        if self._open >= self._max_waiting:
            raise self._refused(f"the pictures of {self._open} requests are to be read before")
        self._open += 1
        found: list[Picture] = []
        left_s = QUEUE_S
        try:
            for source in sources:
                began_s = time.monotonic()
                async with self._turns.turn(account, left_s):
                    left_s -= time.monotonic() - began_s
                    found.append(await self._read(source, hold))
        except TimeoutError:
            raise self._refused(f"the pictures of other requests were to be read before for {QUEUE_S:g} s") from None
        finally:
            self._open -= 1
        return found

    async def _read(self, source: Source, hold: Hold) -> Picture:
        data = await self._away(lambda: self._pictures.fetch(source))
        async with self._decoders:
            reserved = hold.reserve(await self._away(lambda: self._pictures.measure(data, source.where)))
            picture = await self._away(lambda: self._pictures.prepare(data, source.where))
        hold.settle(reserved, picture.num_bytes)
        return picture

    async def _away(self, work: Callable[[], T]) -> T:
        """In a thread. Whoever leaves meanwhile leaves what is begun to its end, and nothing else."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _refused(self, why: str) -> Overloaded:
        self._on_refusal("image_queue")
        return Overloaded(f"{why}; try again in {RETRY_AFTER_S:g} s", None, RETRY_AFTER_S)

    def close(self) -> None:
        """End what reads; whoever waits for it is told."""
        self._pictures.close()
        self._threads.shutdown()
