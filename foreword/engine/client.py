"""The only seam between the engine and those who use it (contract; the implementation follows)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from foreword.config import EngineInfo
from foreword.core.events import Event, StepStats
from foreword.core.request import Request


class EngineClient(Protocol):
    """An engine as an asyncio program sees it.

    info   None until start() returned
    stats  of the newest step
    alive  False once the engine is gone; then every open stream has got a Failed(EngineDead)
    """

    info: EngineInfo | None
    stats: StepStats
    alive: bool

    async def start(self) -> EngineInfo:
        """Start the engine; return once it can take requests. Raises ConfigError or CheckpointError."""

    def submit(self, request: Request) -> AsyncIterator[Event]:
        """Events of one request, in order; the last is a Failed or has a finish_reason.

        Raises EngineDead at once when the engine is gone. Leaving the loop early aborts the request.
        """

    def finish(self, request_id: str, num_tokens: int) -> None:
        """The caller cut the answer after `num_tokens` output tokens (a stop string): free it now."""

    def abort(self, request_id: str) -> None:
        """Nobody wants the answer any more: free it now. Its stream just ends."""

    async def close(self) -> None:
        """End the engine and wait until it is gone."""
