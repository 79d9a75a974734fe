"""The interface of an engine to asyncio programs. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from foreword.config.lora import AdapterInfo
from foreword.config.resolve import EngineInfo
from foreword.core.outputs import Event, StepStats
from foreword.core.readiness import Readiness
from foreword.core.request import Request

__all__ = ["EngineClient"]


class EngineClient(Protocol):
    """An engine, through its restarts."""

    info: EngineInfo | None  # None before start() returns
    # Requests are accepted: True from the first start on, also during a restart, when streams pause. Once
    # False again, the engine is gone for good, and every open stream got an ErrorEvent with EngineDead.
    alive: bool
    on_step: Callable[[StepStats], None] | None  # called in the event loop after every step
    on_restart: Callable[[str], None] | None  # called in the event loop before a restart, with the reason

    @property
    def stats(self) -> StepStats:
        """Stats of the newest step; without a responsive engine, the client's own request counts."""

    @property
    def readiness(self) -> Readiness: ...

    async def start(self) -> EngineInfo:
        """Start the engine; return once it accepts requests. Raises ConfigError or CheckpointError."""

    def submit(self, request: Request) -> AsyncIterator[Event]:
        """Events of one request, in order; the last is an ErrorEvent or has a finish_reason.

        Raises EngineDead if the engine is gone. Closing the iterator early aborts the request.
        """

    def listen(self, request: Request, on_event: Callable[[Event | None], None]) -> None:
        """submit(), with a call for each event instead of an iterator: no task has to wake up for a token.

        on_event  called in the event loop; None: finish() or abort() ended the request
        """

    def finish(self, request_id: str, num_tokens: int) -> None:
        """End a request whose answer was cut after `num_tokens` output tokens (a stop string)."""

    def abort(self, request_id: str) -> None:
        """End a request without an answer; its stream ends without a further event."""

    def set_threads(self, num_threads: int) -> None:
        """Let the engine compute with that many threads, at most those of its start. Answers do not change.

        It holds for engines that replace this one. Without effect on other machines.
        """

    async def load_adapter(self, path: str) -> AdapterInfo:
        """Load a LoRA adapter, also into engines that replace this one. Waits during a restart.

        Raises CheckpointError, AdapterConflict, Unsupported, RequestFailed, EngineDead.
        """

    async def wait_unused(self, digest: str) -> None:
        """Wait until no open request uses this adapter."""

    async def unload_adapter(self, digest: str) -> None:
        """Free the adapter's slot. Raises AdapterConflict while a request uses it, or as load_adapter()."""

    async def close(self) -> None:
        """Stop the engine and wait for its exit."""
