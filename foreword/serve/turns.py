"""Turns at something of which there is little, shared among accounts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["Turns"]


class Turns:
    """Whoever waits is served in the order of coming within an account; accounts take turns. Used from one event loop.

    free  turns that nobody has
    """

    __slots__ = ("_waiting", "free")

    def __init__(self, count: int) -> None:
        self.free = count
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the account that is next comes first

    @property
    def num_waiting(self) -> int:
        return sum(len(queue) for queue in self._waiting.values())

    @asynccontextmanager
    async def turn(self, account: str, timeout_s: float) -> AsyncIterator[None]:
        """One turn, given back behind it. Raises TimeoutError where none came in time."""
        async with asyncio.timeout(timeout_s):
            await self._take(account)
        try:
            yield
        finally:
            self._give_back()

    async def _take(self, account: str) -> None:
        if self.free and not self._waiting:
            self.free -= 1
            return
        given = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(account, deque()).append(given)
        try:
            await given
        except asyncio.CancelledError:
            if given.cancelled():
                self._leave(account, given)
            else:  # it came at the very moment
                self._give_back()
            raise

    def _leave(self, account: str, given: asyncio.Future[None]) -> None:
        queue = self._waiting.get(account)
        if queue is not None and given in queue:
            queue.remove(given)
            if not queue:
                del self._waiting[account]

    def _give_back(self) -> None:
        while self._waiting:
            if not (given := self._next()).done():  # else whoever waited is about to leave
                given.set_result(None)
                return
        self.free += 1

    def _next(self) -> asyncio.Future[None]:
        """Of the account whose turn it is, which is the last from now on."""
        account = next(iter(self._waiting))
        queue = self._waiting.pop(account)
        given = queue.popleft()
        if queue:
            self._waiting[account] = queue
        return given
