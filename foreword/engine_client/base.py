"""The interfaces of engines to asyncio programs. Nothing here imports torch."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from foreword.config.lora import AdapterInfo
from foreword.core.outputs import BlockUpdate, Event, StepStats, TokenEvent
from foreword.core.readiness import Readiness, ReplicaState
from foreword.core.request import Request
from foreword.errors import ForewordError
from foreword.planning.resolve import EngineInfo


class EngineClient(Protocol):
    """The engines of one model as one, through their restarts: a server's interface."""

    # Requests are accepted: True from the first start on, also during a restart, when streams pause. Once
    # False again, the engines are gone for good, and every open stream got an ErrorEvent with EngineDead.
    alive: bool
    on_step: Callable[[StepStats], None] | None  # called in the event loop after every step
    # Called in the event loop before a restart, with the reason; None: a planned one
    on_restart: Callable[[str | None], None] | None
    on_blocks: Callable[[BlockUpdate], None] | None  # called before the events of the same step

    @property
    def info(self) -> EngineInfo | None:
        """None before start() returns."""

    @property
    def stats(self) -> StepStats:
        """Stats of the newest step; without a responsive engine, the client's own request counts."""

    @property
    def readiness(self) -> Readiness: ...

    async def start(self) -> EngineInfo:
        """Start the engines; return once one accepts requests. Raises ConfigError or CheckpointError."""

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
        """Let each engine compute with that many threads, at most those of its start. Answers do not change.

        It holds for engines that replace them. Without effect on other machines.
        """

    def reload(self) -> AsyncIterator[str]:
        """Replace the engines by new ones; open streams go on. Yields lines about the progress.

        Raises EngineDead if one does not come back.
        """

    def request_blocks(self) -> None:
        """Ask for a snapshot of the prefix cache in the next update, if there is one engine."""

    def replica_states(self) -> Sequence[ReplicaState]:
        """The engines of the model, if it has several."""

    async def load_adapter(self, path: str) -> AdapterInfo:
        """Load a LoRA adapter, also into engines that replace these. Waits during a restart.

        Raises CheckpointError, AdapterConflict, Unsupported, RequestFailed, EngineDead.
        """

    async def wait_unused(self, digest: str) -> None:
        """Wait until no open request uses this adapter."""

    async def unload_adapter(self, digest: str) -> None:
        """Free the adapter's slot. Raises AdapterConflict while a request uses it, or as load_adapter()."""

    async def close(self) -> None:
        """Stop the engines and wait for their exit."""


def _ignore(*_: object) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class EngineCallbacks:
    """Calls of a ReplicaClient to its router, in the event loop."""

    on_step: Callable[[StepStats], object] = _ignore  # called after every step, before its events
    on_blocks: Callable[[BlockUpdate], object] = _ignore
    on_restart: Callable[[str | None], object] = _ignore  # see EngineClient
    # A local engine crashed, with these requests in its batch; its open requests get EngineDead next. Returns
    # whether one of its requests gained a token or ended since its last crash.
    on_crash: Callable[[Collection[str]], bool] = _ignore
    on_ready: Callable[[], object] = _ignore  # it accepts requests again
    on_dead: Callable[[], object] = _ignore  # it is gone for good
    outlook: str = "move to other replicas"  # what its requests do after a crash, for the log


class ReplicaClient(Protocol):
    """One engine, through its restarts: the router's interface.

    A client resumes no request. If its engine ends, its open requests get an ErrorEvent with EngineDead.
    """

    info: EngineInfo | None  # None before start() returns
    alive: bool  # as EngineClient's

    @property
    def pid(self) -> int | None:
        """The engine's process; None: it does not run, or runs on another machine."""

    @property
    def stats(self) -> StepStats:
        """Stats of the newest step."""

    @property
    def readiness(self) -> Readiness: ...

    async def start(self, callbacks: EngineCallbacks, reuse: ReplicaClient | None = None) -> EngineInfo:
        """Start the engine; return once it accepts requests. Raises ConfigError or CheckpointError.

        A local one may be started again once it is gone.
        reuse  started engine of the same model, whose choices a local engine takes over; None: it chooses
        """

    def listen(self, request: Request, on_event: Callable[[Event], None]) -> None:
        """Send a request, whose id this engine never had. Raises EngineDead if it is not ready."""

    def remove(self, request_id: str, num_tokens: int | None = None) -> None:
        """End a request, which gets no further event; see RemoveRequest. Unknown ids are ignored."""

    def running_ids(self) -> Collection[str]:
        """Open requests in the batch, or whose queue deadlines another server enforces."""

    def set_threads(self, num_threads: int) -> None: ...

    def reload(self) -> AsyncIterator[str]: ...

    def request_blocks(self) -> None: ...

    async def load_adapter(self, path: str) -> AdapterInfo: ...

    async def unload_adapter(self, digest: str) -> None: ...

    def skip_drain(self) -> None:
        """Make close() kill a local engine instead of waiting for its step, also if close() runs already."""

    async def close(self) -> None: ...


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


class PendingCalls:
    """Calls of an engine that wait for its reply."""

    def __init__(self) -> None:
        self._counter = itertools.count(1)
        self._replies: dict[int, asyncio.Future[AdapterInfo | None]] = {}

    async def call(self, send: Callable[[int], None]) -> AdapterInfo | None:
        """The reply to a message with a number. Raises its error, or that of fail_all()."""
        number = next(self._counter)
        reply: asyncio.Future[AdapterInfo | None] = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        try:
            send(number)
            return await reply
        finally:
            del self._replies[number]

    def resolve(self, number: int, result: AdapterInfo | ForewordError | None) -> None:
        reply = self._replies.get(number)
        if reply is None or reply.done():
            return
        if isinstance(result, ForewordError):
            reply.set_exception(result)
        else:
            reply.set_result(result)

    def fail_all(self, error: ForewordError) -> None:
        for number in self._replies:
            self.resolve(number, error)
