"""Vectors out of the generating engine, a few requests at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from foreword.core.events import EmbeddingEvent, ErrorEvent
from foreword.core.request import Request
from foreword.engine.client import EngineClient
from foreword.errors import RequestFailed
from foreword.resolve import ResolvedConfig

__all__ = ["EngineEmbedder"]

PREFETCH_STEPS = 2


class EngineEmbedder:
    """Feeds one caller's prompts to the engine: enough to keep it busy, and no more.

    queue_timeout_s  that each may wait for its first step; 0 for no limit

    Whoever comes next waits for what the engine has by then, be it a batch of thousands that it came behind.
    """

    def __init__(self, client: EngineClient, resolved: ResolvedConfig, queue_timeout_s: float) -> None:
        self._client = client
        self._queue_timeout_s = queue_timeout_s
        self._max_tokens = PREFETCH_STEPS * resolved.max_num_batched_tokens
        self._max_requests = max(resolved.max_num_seqs // 2, 1)
        self._inflight: dict[asyncio.Task[bytes], int] = {}

    async def embed(self, requests: Sequence[Request]) -> list[bytes]:
        """One for each, in order. Raises the first error; then, or cancelled, nothing is left with the engine."""
        tasks: list[asyncio.Task[bytes]] = []
        try:
            for request in requests:
                await self._wait_room(len(request.prompt_ids))
                tasks.append(asyncio.create_task(self._embed_one(request)))
                self._inflight[tasks[-1]] = len(request.prompt_ids)
            while self._inflight:
                await self._wait_any()
            return [task.result() for task in tasks]
        finally:
            for task in self._inflight:
                task.cancel()
            await asyncio.gather(*self._inflight, return_exceptions=True)

    async def _wait_room(self, num_tokens: int) -> None:
        while self._inflight and (len(self._inflight) >= self._max_requests or sum(self._inflight.values()) + num_tokens > self._max_tokens):
            await self._wait_any()

    async def _wait_any(self) -> None:
        """Wait until one is done. Raises its error."""
        done, _ = await asyncio.wait(self._inflight, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            del self._inflight[task]
        for task in done:
            task.result()

    async def _embed_one(self, request: Request) -> bytes:
        if self._queue_timeout_s:  # from now: until here it waited for others of its own
            request = replace(request, queue_deadline_s=time.monotonic() + self._queue_timeout_s)
        async for event in self._client.submit(request):
            if isinstance(event, ErrorEvent):
                raise event.error
            assert isinstance(event, EmbeddingEvent)
            return event.vector
        raise RequestFailed("the engine ended the request without a vector")
