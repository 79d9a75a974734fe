"""The only seam between the engine and those who use it. Nothing here imports torch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Protocol

from foreword.config import Config
from foreword.core.events import Event, Failed, StepReport, StepStats, Tokens
from foreword.core.readiness import Readiness
from foreword.core.request import Request
from foreword.core.vocabulary import Vocabulary
from foreword.engine.messages import Loading, Ready, Refused, Remove, Start
from foreword.errors import ConfigError, EngineDead
from foreword.resolve import EngineInfo

__all__ = ["EngineClient", "ProcessClient"]

CLOSE_TIMEOUT_S = 10.0
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}  # torch's threads that spin take the cores from those they wait for


class EngineClient(Protocol):
    """An engine as an asyncio program sees it.

    info     None until start() returned
    stats    of the newest step
    alive    requests are taken: true from the first start on, also while a dead engine is replaced, which streams see as a
             pause; once it was True, False means that the engine is gone for good and every open stream has got a
             Failed(EngineDead)
    on_step  called in the event loop with the stats of every step
    on_restart  called in the event loop with the reason each time a dead or hung engine is about to be replaced
    """

    info: EngineInfo | None
    stats: StepStats
    alive: bool
    on_step: Callable[[StepStats], None] | None
    on_restart: Callable[[str], None] | None

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


class ProcessClient:
    """Runs the engine in a process of its own and talks to it over a socket pair.

    One thread reads, and hands a whole step's events to the event loop at once; another writes.
    `dead` is set when the engine is gone without having been closed. The vocabulary is asked for, in the thread that
    writes, with the first grammar.
    """

    def __init__(
        self,
        config: Config,
        unused_ids: tuple[int, ...],
        vocabulary: Callable[[], Vocabulary],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.info: EngineInfo | None = None
        self.stats = StepStats()
        self.alive = False
        self.on_step: Callable[[StepStats], None] | None = None
        self.on_restart: Callable[[str], None] | None = None
        self.dead = asyncio.Event()
        self._start = Start(config, unused_ids)
        self._vocabulary: Callable[[], Vocabulary] | None = vocabulary
        self._on_progress = on_progress
        self._queues: dict[str, asyncio.Queue[Event | None]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closing = False

    @property
    def readiness(self) -> Readiness:
        if self.alive:
            return Readiness("ok")
        return (
            Readiness("loading", "the engine is still loading") if self.info is None else Readiness("dead", "the engine is gone")
        )

    async def start(self) -> EngineInfo:
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "foreword.engine.process", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, process_group=0, env={**ENVIRONMENT, **os.environ}
        )
        theirs.close()
        self._connection = Connection(os.dup(ours.fileno()))
        ours.close()
        self._send(self._start)
        for run in (self._read, self._write):
            thread = threading.Thread(target=run, args=(loop, self._connection), name=f"engine-{run.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)
        self.info = await self._ready
        return self.info

    def submit(self, request: Request) -> AsyncIterator[Event]:
        if not self.alive:
            raise EngineDead("the engine is not running")
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        self._queues[request.id] = queue
        if request.params.structured is not None and self._vocabulary is not None:
            self._send(self._vocabulary)
            self._vocabulary = None
        self._send(request)
        return self._events(request.id, queue)

    def finish(self, request_id: str, num_tokens: int) -> None:
        self._remove(Remove(request_id, num_tokens))

    def abort(self, request_id: str) -> None:
        self._remove(Remove(request_id))

    def _remove(self, message: Remove) -> None:
        queue = self._queues.pop(message.request_id, None)
        if queue is not None:
            queue.put_nowait(None)
            if self.alive:
                self._send(message)

    async def close(self) -> None:
        self._closing = True
        self.alive = False
        if self._process is None or self._connection is None:
            return
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as ours:
            ours.shutdown(socket.SHUT_RDWR)
        try:
            await asyncio.to_thread(self._process.wait, CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        self._send(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        self._connection.close()

    async def _events(self, request_id: str, queue: asyncio.Queue[Event | None]) -> AsyncIterator[Event]:
        try:
            while (event := await queue.get()) is not None:
                if not isinstance(event, Tokens) or event.finish_reason is not None:
                    self._queues.pop(request_id, None)
                yield event
                if request_id not in self._queues:
                    return
        finally:
            if self._queues.get(request_id) is queue:
                self.abort(request_id)

    def _send(self, message: Any) -> None:
        self._outbox.put(message)

    # Threads

    def _write(self, loop: asyncio.AbstractEventLoop, connection: Connection) -> None:
        """Writing may block while the engine works: never in the event loop."""
        with contextlib.suppress(OSError):  # a dead engine is noticed by the reader
            while (message := self._outbox.get()) is not None:
                connection.send(message() if callable(message) else message)

    def _read(self, loop: asyncio.AbstractEventLoop, connection: Connection) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            with contextlib.suppress(EOFError, OSError):
                while True:
                    loop.call_soon_threadsafe(self._received, connection.recv())
            loop.call_soon_threadsafe(self._lost)

    # In the event loop

    def _received(self, message: StepReport | Loading | Ready | Refused) -> None:
        if isinstance(message, StepReport):
            self._report(message)
        elif isinstance(message, Loading):
            if self._on_progress is not None:
                self._on_progress(message.done, message.total)
        elif self._ready is not None and not self._ready.done():
            self._settle(self._ready, message)

    def _settle(self, ready: asyncio.Future[EngineInfo], message: Ready | Refused) -> None:
        if isinstance(message, Ready):
            self.alive = not self._closing
            ready.set_result(message.info)
        else:
            ready.set_exception(message.error)

    def _report(self, report: StepReport) -> None:
        self.stats = report.stats
        if self.on_step is not None:
            self.on_step(report.stats)
        for event in report.events:
            queue = self._queues.get(event.request_id)
            if queue is not None:
                queue.put_nowait(event)

    def _lost(self) -> None:
        """The engine hung up: fail everything that is open."""
        self.alive = False
        self._send(None)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(ConfigError("the engine process ended while it was loading; its last words are above"))
        queues, self._queues = self._queues, {}
        for request_id, queue in queues.items():
            queue.put_nowait(Failed(request_id, EngineDead("the engine died while it was working on this request")))
        if not self._closing:
            self.dead.set()
