"""Vectors out of the generating engine, a few requests at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from foreword.core.events import Embedded, Failed
from foreword.core.request import Request
from foreword.engine.client import EngineClient
from foreword.errors import RequestFailed
from foreword.resolve import Resolved

__all__ = ["EngineVectors"]

STEPS_AHEAD = 2


class EngineVectors:
    """Feeds one caller's prompts to the engine: enough to keep it busy, and no more.

    queue_timeout_s  that each may wait for its first step; 0 for no limit

    Whoever comes next waits for what the engine has by then, be it a batch of thousands that it came behind.
    """

    def __init__(self, client: EngineClient, resolved: Resolved, queue_timeout_s: float) -> None:
        self._client = client
        self._queue_timeout_s = queue_timeout_s
        self._max_tokens = STEPS_AHEAD * resolved.max_num_batched_tokens
        self._max_requests = max(resolved.max_num_seqs // 2, 1)
        self._open: dict[asyncio.Task[bytes], int] = {}

    async def of(self, requests: Sequence[Request]) -> list[bytes]:
        """One for each, in order. Raises the first error; then, or cancelled, nothing is left with the engine."""
        tasks: list[asyncio.Task[bytes]] = []
        try:
            for request in requests:
                await self._room(len(request.prompt_ids))
                tasks.append(asyncio.create_task(self._one(request)))
                self._open[tasks[-1]] = len(request.prompt_ids)
            while self._open:
                await self._some()
            return [task.result() for task in tasks]
        finally:
            for task in self._open:
                task.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)

    async def _room(self, num_tokens: int) -> None:
        while self._open and (len(self._open) >= self._max_requests or sum(self._open.values()) + num_tokens > self._max_tokens):
            await self._some()

    async def _some(self) -> None:
        """Wait until one is done. Raises its error."""
        done, _ = await asyncio.wait(self._open, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            del self._open[task]
        for task in done:
            task.result()

    async def _one(self, request: Request) -> bytes:
        if self._queue_timeout_s:  # from now: until here it waited for others of its own
            request = replace(request, start_by_s=time.monotonic() + self._queue_timeout_s)
        async for event in self._client.submit(request):
            if isinstance(event, Failed):
                raise event.error
            assert isinstance(event, Embedded)
            return event.vector
        raise RequestFailed("the engine ended the request without a vector")
