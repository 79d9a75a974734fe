"""Threads that work for API keys in turn, so that no key's work delays another's."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from foreword.errors import Overloaded
from foreword.utils.threads import run_in_own_thread

T = TypeVar("T")
RETRY_AFTER_S = 5.0


class FairSemaphore:
    """A semaphore that serves keys round-robin, and in order within a key. Used from one event loop.

    One permit is kept from a key that holds all others: another key's first work begins at once.
    """

    __slots__ = ("_held", "_max_per_key", "_waiting", "num_free")

    def __init__(self, num_permits: int) -> None:
        self.num_free = num_permits
        self._max_per_key = max(num_permits - 1, 1)
        self._held: Counter[str] = Counter()  # permits by key
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by key; the first key is served next

    @property
    def num_waiting(self) -> int:
        return sum(len(queue) for queue in self._waiting.values())

    @asynccontextmanager
    async def hold(self, fairness_key: str, timeout_s: float) -> AsyncIterator[None]:
        """Hold one permit. Raises TimeoutError if none is free in time."""
        await self.acquire(fairness_key, timeout_s)
        try:
            yield
        finally:
            self.release(fairness_key)

    async def acquire(self, fairness_key: str, timeout_s: float) -> None:
        """Take a permit, until release(). Raises TimeoutError if none is free in time."""
        if fairness_key not in self._waiting and self._may_take(fairness_key):
            return self._take(fairness_key)
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(fairness_key, deque()).append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except (TimeoutError, asyncio.CancelledError):
            if waiter.cancelled():
                self._cancel_wait(fairness_key, waiter)
            else:  # the permit came just before the cancel
                self.release(fairness_key)
            raise

    def release(self, fairness_key: str) -> None:
        """Give a permit back; the next key that may have it takes it."""
        self.num_free += 1
        self._held[fairness_key] -= 1
        if not self._held[fairness_key]:
            del self._held[fairness_key]
        while (key := next(filter(self._may_take, self._waiting), None)) is not None:
            queue = self._waiting.pop(key)
            waiter = queue.popleft()
            if queue:
                self._waiting[key] = queue  # at the end of the line
            if not waiter.done():  # a done waiter was cancelled
                self._take(key)
                waiter.set_result(None)

    def _may_take(self, fairness_key: str) -> bool:
        return self.num_free > 0 and self._held[fairness_key] < self._max_per_key

    def _take(self, fairness_key: str) -> None:
        self.num_free -= 1
        self._held[fairness_key] += 1

    def _cancel_wait(self, fairness_key: str, waiter: asyncio.Future[None]) -> None:
        queue = self._waiting.get(fairness_key)
        if queue is not None and waiter in queue:
            queue.remove(waiter)
            if not queue:
                del self._waiting[fairness_key]


class FairThreads:
    """A bounded number of threads for one kind of work, which keys share fairly. Used from one event loop."""

    def __init__(
        self, name: str, num_threads: int, queue_timeout_s: float, on_refusal: Callable[[str], None]
    ) -> None:
        """
        name             of the work, in errors: "chat templates"
        queue_timeout_s  longest wait for a thread
        on_refusal       called with "intake_queue" for work that has waited as long
        """
        self._name = name
        self._queue_timeout_s = queue_timeout_s
        self._on_refusal = on_refusal
        self._permits = FairSemaphore(num_threads)

    async def run(self, fairness_key: str, work: Callable[[], T]) -> T:
        """The result of `work`, which a cancel does not stop: its thread is free when it ends.

        Raises Overloaded if no thread is free in time.
        """
        try:
            await self._permits.acquire(fairness_key, self._queue_timeout_s)
        except TimeoutError:
            self._on_refusal("intake_queue")
            raise Overloaded(
                f"the request waited {self._queue_timeout_s:g} s for the {self._name} of other requests; "
                f"try again in {RETRY_AFTER_S:g} s",
                None,
                RETRY_AFTER_S,
            ) from None
        task = asyncio.ensure_future(run_in_own_thread(work))

        def on_done(task: asyncio.Task[T]) -> None:
            self._permits.release(fairness_key)
            if not task.cancelled():
                task.exception()  # read also if nobody waits any more

        task.add_done_callback(on_done)
        return await asyncio.shield(task)
