"""The interface of an engine to asyncio programs. Nothing here imports torch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Any, Protocol

from foreword.config.lora import AdapterInfo
from foreword.core.outputs import BlockUpdate, Event, StepStats, TokenEvent
from foreword.core.readiness import Readiness, ReplicaState
from foreword.core.request import Request
from foreword.planning.resolve import EngineInfo

logger = logging.getLogger(__name__)


class EngineClient(Protocol):
    """An engine, through its restarts."""

    info: EngineInfo | None  # None before start() returns
    # Requests are accepted: True from the first start on, also during a restart, when streams pause. Once
    # False again, the engine is gone for good, and every open stream got an ErrorEvent with EngineDead.
    alive: bool
    on_step: Callable[[StepStats], None] | None  # called in the event loop after every step
    # Called in the event loop before a restart, with the reason; None: a planned one
    on_restart: Callable[[str | None], None] | None
    on_ready: Callable[[], None] | None  # called in the event loop when it accepts requests after a restart
    on_blocks: Callable[[BlockUpdate], None] | None  # called before the events of the same step
    # Called in the event loop at a crash, with the ids of the requests in the batch. If it is set, a crash
    # ends the open requests with EngineDead, and the caller resumes them. Engines elsewhere heal themselves.
    on_crash: Callable[[Collection[str]], None] | None

    @property
    def stats(self) -> StepStats:
        """Stats of the newest step; without a responsive engine, the client's own request counts."""

    @property
    def readiness(self) -> Readiness: ...

    async def start(self, like: EngineClient | None = None) -> EngineInfo:
        """Start the engine; return once it accepts requests. Raises ConfigError or CheckpointError.

        like  started engine of the same model, whose choices a local engine takes over; None: it chooses
        """

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

    def reload(self) -> AsyncIterator[str]:
        """Replace the engine by a new one; open streams go on. Yields lines about the progress.

        Raises EngineDead if it does not come back.
        """

    def request_blocks(self) -> None:
        """Ask for a snapshot of the prefix cache in the next update."""

    def replica_states(self) -> Sequence[ReplicaState]:
        """The engines of the model, if it has several."""

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


def is_last(event: Event) -> bool:
    """Whether a request has no further event."""
    return not isinstance(event, TokenEvent) or event.finish_reason is not None


def iterate_events(client: EngineClient, request: Request) -> AsyncIterator[Event]:
    """EngineClient.submit() by means of listen()."""
    queue: asyncio.Queue[Event | None] = asyncio.Queue()
    is_open = True

    def on_event(event: Event | None) -> None:
        nonlocal is_open
        is_open = event is not None and not is_last(event)
        queue.put_nowait(event)

    async def events() -> AsyncIterator[Event]:
        try:
            while (event := await queue.get()) is not None:
                yield event
                if is_last(event):
                    return
        finally:
            if is_open:
                client.abort(request.id)

    client.listen(request, on_event)
    return events()


class SafeCalls:
    """Calls callbacks. An error of theirs loses no event and ends no connection; the first is logged."""

    def __init__(self) -> None:
        self._is_error_logged = False

    def __call__(self, callback: Callable[..., None], *args: Any) -> None:
        try:
            callback(*args)
        except Exception:
            if not self._is_error_logged:
                logger.exception("client: a callback failed; later failures are not logged")
            self._is_error_logged = True
