"""The only seam between the engine and those who use it. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from foreword.config.resolve import EngineInfo
from foreword.core.health import Readiness
from foreword.core.outputs import Event, StepStats
from foreword.core.request import Request

__all__ = ["EngineClient"]


class EngineClient(Protocol):
    """An engine as an asyncio program sees it.

    info     None until start() returned
    stats    of the newest step; while the engine says nothing, the requests that are open as its client knows them
    alive    requests are taken: true from the first start on, also while a dead engine is replaced, which streams see as a
             pause; once it was True, False means that the engine is gone for good and every open stream has got a
             Failed(EngineDead)
    on_step  called in the event loop with the stats of every step
    on_restart  called in the event loop each time a dead or hung engine is about to be replaced, with the reason as far as it is
             known at once
    """

    info: EngineInfo | None
    alive: bool
    on_step: Callable[[StepStats], None] | None
    on_restart: Callable[[str], None] | None

    @property
    def stats(self) -> StepStats: ...

    @property
    def readiness(self) -> Readiness:
        """Whether a step could run now."""

    async def start(self) -> EngineInfo:
        """Start the engine; return once it can take requests. Raises ConfigError or CheckpointError."""

    def submit(self, request: Request) -> AsyncIterator[Event]:
        """Events of one request, in order; the last is a Failed or has a finish_reason.

        Raises EngineDead at once when the engine is gone. Closing the iterator early aborts the request.
        """

    def finish(self, request_id: str, num_tokens: int) -> None:
        """The caller cut the answer after `num_tokens` output tokens (a stop string): free it now."""

    def abort(self, request_id: str) -> None:
        """Nobody wants the answer any more: free it now. Its stream just ends."""

    async def close(self) -> None:
        """End the engine and wait until it is gone."""
