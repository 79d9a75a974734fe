"""Turns at something of which there is little, shared among accounts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["FairSemaphore"]


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
