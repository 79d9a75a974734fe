"""The engine in a process of its own, through its deaths. Nothing here imports torch."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from foreword.config import Config
from foreword.core.events import Event, Failed, StepReport, StepStats, Tokens
from foreword.core.params import SamplingParams, Speculation
from foreword.core.readiness import Readiness
from foreword.core.request import Request
from foreword.core.vocabulary import Vocabulary
from foreword.drafting.control.costs import Timings
from foreword.engine.child import Child, Unsaid
from foreword.engine.live import LiveRequests
from foreword.engine.messages import Loading, Ready, Refused, Remove, Start
from foreword.engine.seam import EngineClient
from foreword.engine.spawning import Spawner
from foreword.engine.suspects import Patience
from foreword.engine.watch import Finding, Watch, cpu_seconds
from foreword.errors import ConfigError, EngineDead, ForewordError, RequestFailed
from foreword.resolve import EngineInfo

__all__ = ["EngineClient", "ProcessClient"]

logger = logging.getLogger(__name__)

ENTRY: Final = "foreword.engine.process"
LOOK_S: Final = 0.25
GIB: Final = 1 << 30
RETRY_S: Final = 0.5  # after a start that failed: what it lacked may be there again


class ProcessClient:
    """Runs the engine in a process of its own, and replaces it under the requests that are open when it dies or hangs.

    `dead` is set when the engine is gone for good without having been closed. The vocabulary is asked for, in the thread that
    writes, with the first grammar that an engine gets.

    entry  module whose main(fd) the process runs
    """

    def __init__(
        self,
        config: Config,
        unused_ids: tuple[int, ...],
        vocabulary: Callable[[], Vocabulary],
        on_progress: Callable[[int, int], None] | None = None,
        entry: str = ENTRY,
    ) -> None:
        self.info: EngineInfo | None = None
        self.alive = False
        self.on_step: Callable[[StepStats], None] | None = None
        self.on_restart: Callable[[str], None] | None = None
        self.dead = asyncio.Event()
        self._config = config
        self._unused_ids = unused_ids
        self._vocabulary = vocabulary
        self._on_progress = on_progress
        self._spawner = Spawner(entry)
        self._child: Child | None = None
        self._serving = False  # the child takes requests
        self._ready: asyncio.Future[Ready] | None = None
        self._live = LiveRequests()
        self._stats = StepStats()
        self._queues: dict[str, asyncio.Queue[Event | None]] = {}
        self._timings: Timings | None = None
        self._patience = Patience()
        self._finding = Finding()
        self._loaded: Loading | None = None
        self._restarts = 0
        self._hurried = False
        self._tasks: list[asyncio.Task[None]] = []
        self._complained = False

    @property
    def pid(self) -> int | None:
        """Of the engine process that lives now."""
        return self._child.pid if self._child is not None else None

    @property
    def stats(self) -> StepStats:
        return self._stats if self._answers else self._live.stats(time.monotonic(), self._stats, self._serving)

    @property
    def _answers(self) -> bool:
        return self._serving and self._finding.ready

    @property
    def readiness(self) -> Readiness:
        if self.info is None:
            return Readiness("loading", "the engine is still loading", self._progress())
        if not self.alive:
            return Readiness("dead", "the engine is gone", restarts=self._restarts)
        if not self._serving:
            return Readiness("restarting", "the engine is being replaced", self._progress(), self._restarts)
        if not self._finding.ready:
            return Readiness("unresponsive", self._finding.detail, restarts=self._restarts)
        return Readiness("ok", restarts=self._restarts)

    async def start(self) -> EngineInfo:
        self._tasks.append(asyncio.create_task(self._watch()))
        ready = await self._launch()
        self.info, self._timings = ready.info, ready.timings
        self.alive = self._serving = True
        self._tasks.append(asyncio.create_task(self._supervise()))
        return self.info

    def submit(self, request: Request) -> AsyncIterator[Event]:
        if not self.alive:
            raise EngineDead("the engine is not running")
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        self._queues[request.id] = queue
        self._live.add(request)
        self._send_due()
        return self._events(request.id, queue)

    def finish(self, request_id: str, num_tokens: int) -> None:
        self._remove(Remove(request_id, num_tokens))

    def abort(self, request_id: str) -> None:
        self._remove(Remove(request_id))

    def _remove(self, message: Remove) -> None:
        queue = self._queues.pop(message.request_id, None)
        if queue is None:
            return
        queue.put_nowait(None)
        if message.request_id in self._live:
            self._live.remove(message.request_id)
            self._send(message)
            self._send_due()

    async def close(self) -> None:
        self.alive = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._ready is not None:
            self._ready.cancel()
        if self._child is not None:
            await self._child.close(self._spawner, at_once=self._hurried or not self._finding.ready)
        await self._spawner.close()
        self._fail_all("the engine was shut down")

    def hurry(self) -> None:
        """close() is not to wait for the engine, now or when it is called."""
        self._hurried = True
        if not self.alive and self._child is not None:
            self._child.hurry()

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

    # What the engine is told

    def _send(self, message: Any) -> None:
        if self._child is not None and self._serving:
            self._child.send(message)

    def _send_due(self) -> None:
        """Send it the requests that it may have and has not."""
        if self._child is None or not self._serving:
            return
        gallery = self._live.gallery
        for forget in gallery.forgotten():
            self._child.send(forget)
        for request in self._live.due():
            first = None
            if request.params.structured is not None and not self._child.knows_vocabulary:
                self._child.knows_vocabulary = True
                first = self._vocabulary
            for message in gallery.messages(request):
                self._child.send(message, first)
                first = None

    # What it says

    def _received(self, child: Child, message: StepReport | Loading | Ready | Refused | Unsaid) -> None:
        if child is not self._child:
            return  # it was replaced
        if isinstance(message, StepReport):
            self._report(message)
        elif isinstance(message, Loading):
            self._loading(message)
        elif isinstance(message, Unsaid):
            self._unsaid(child, message)
        elif self._ready is not None and not self._ready.done():
            if isinstance(message, Ready):
                self._ready.set_result(message)
            else:
                self._ready.set_exception(message.error)

    def _loading(self, message: Loading) -> None:
        self._loaded = message
        if self._on_progress is not None and self.info is None:
            self._on_progress(message.done, message.total)

    def _unsaid(self, child: Child, unsaid: Unsaid) -> None:
        """A bug of ours: whoever it was for ends, and the others go on with an engine that counts as we do."""
        name = type(unsaid.error).__name__
        if isinstance(unsaid.message, Request) and unsaid.message.id in self._live:
            self._live.remove(unsaid.message.id)
            self._deliver(Failed(unsaid.message.id, RequestFailed(f"the request could not be handed to the engine ({name})")))
        child.kill(f"a message to it could not be said ({name})")

    def _report(self, report: StepReport) -> None:
        self._stats = report.stats
        if self.on_step is not None:
            self._call(partial(self.on_step, report.stats))
        for event in report.events:
            new = self._live.take(event)
            if new is not None:
                self._patience.delivered()
                self._deliver(new)
            if isinstance(new, Failed) and not isinstance(event, Failed):
                self._send(Remove(new.request_id))
        self._send_due()

    def _deliver(self, event: Event) -> None:
        queue = self._queues.get(event.request_id)
        if queue is not None:
            queue.put_nowait(event)

    def _call(self, callback: Callable[[], None]) -> None:
        """Whoever listens may fail; it is told once, and no event is lost."""
        try:
            callback()
        except Exception:
            if not self._complained:
                logger.exception("a callback of the engine failed; further failures are not told")
            self._complained = True

    # Life and death

    async def _launch(self) -> Ready:
        """Start a process and wait until it takes requests. Raises ConfigError or CheckpointError if it never will."""
        self._ready = asyncio.get_running_loop().create_future()
        self._loaded = None
        self._child = child = await Child.launch(self._spawner, self._received)
        child.send(self._start_message())
        ended = asyncio.create_task(child.ended.wait())
        await asyncio.wait((self._ready, ended), return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not self._ready.done():
            why = await child.bury(self._spawner)
            raise ConfigError(f"the engine process ended while it was loading{self._so_far()}: {why}")
        child.ready_s = time.monotonic()
        return self._ready.result()

    def _progress(self) -> float | None:
        loaded = self._loaded
        return loaded.done / loaded.total if loaded is not None and loaded.total else None

    def _so_far(self) -> str:
        loaded = self._loaded
        return "" if loaded is None else f", with {loaded.done / GIB:.2f} of {loaded.total / GIB:.2f} GiB of weights read"

    def _start_message(self) -> Start:
        if self.info is None:
            return Start(self._config, self._unused_ids)
        trace = self._config.trace  # what the last engine wrote is wanted more than ever
        config = self._config if trace is None else replace(self._config, trace=f"{trace}.{self._restarts}")
        return Start(config, self._unused_ids, self.info.resolved, self._timings)

    async def _supervise(self) -> None:
        """Replace the engine whenever it ends, until that makes no sense any more."""
        try:
            while self._child is not None:
                await self._child.ended.wait()
                if not await self._replace(self._child):
                    break
        except Exception:
            logger.exception("the engine could not be replaced")
        self.alive = False
        self._fail_all("the engine died and could not be replaced")
        self.dead.set()

    async def _replace(self, child: Child) -> bool:
        """The engine ended: start another, and let those that are open go on with it. False if that makes no sense."""
        noticed_s = time.monotonic()
        self._serving = False
        self._restarts += 1
        self._stats, self._finding = StepStats(), Finding()
        if self.on_restart is not None:
            self._call(partial(self.on_restart, child.why or "it hung up"))
        why = await child.bury(self._spawner)
        logger.error("the engine died: %s; %d open requests wait for its replacement", why, len(self._live))
        if not self._worth_another(child) or not await self._launch_again():
            return False
        logger.warning("the engine is back after %.1f s", time.monotonic() - noticed_s)
        self._serving = True
        self._send_due()
        return True

    def _worth_another(self, child: Child) -> bool:
        """Settle what the death of this one means."""
        aftermath = self._live.died(child.board.working_for())
        for failed in aftermath.failed:
            self._deliver(failed)
            logger.error("request %s: %s", failed.request_id, failed.error)
        if not self._patience.died(child.board.glance().well_until_s - child.ready_s, aftermath.blamed):
            logger.error("it has died too often, and nobody had anything of it")
            return False
        if self._patience.in_doubt:
            self._live.prove(self._harmless())
        return True

    def _harmless(self) -> Request:
        """What no engine that works dies of."""
        token_id = next(token_id for token_id in itertools.count() if token_id not in self._unused_ids)
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, speculation=Speculation("off"))
        return Request(f"self-test-{self._restarts}", (token_id,), params, seed=0, arrival_s=time.monotonic())

    async def _launch_again(self) -> bool:
        """Try a few times. False if it does not start, or is another engine than before."""
        assert self.info is not None
        while True:
            try:
                ready = await self._launch()
            except ForewordError as error:
                logger.error("the engine could not be started again: %s", error)
                if not self._patience.failed_to_start():
                    return False
                await asyncio.sleep(RETRY_S)
                continue
            self._patience.started()
            if ready.info.fingerprint != self.info.fingerprint:
                logger.error("model or machine changed: a replacement would not go on with the same tokens")
                return False
            return True

    def _fail_all(self, message: str) -> None:
        for failed in self._live.fail(EngineDead(message)):
            self._deliver(failed)

    # Watching

    async def _watch(self) -> None:
        """Look at the engine a few times a second; one that hangs is killed, and so replaced."""
        child: Child | None = None
        while True:
            if child is not self._child and self._child is not None:
                child = self._child
                watch = Watch(self._config.hang_timeout, partial(self._cpu_seconds, child.pid))
            if child is not None:
                self._look(child, watch)
            self._end_late()
            await asyncio.sleep(LOOK_S)

    def _look(self, child: Child, watch: Watch) -> None:
        before, self._finding = self._finding, watch.look(time.monotonic(), child.board.glance())
        if self._finding.hung:
            child.kill(self._finding.detail)
        elif before.ready and not self._finding.ready:
            logger.warning("the engine does not answer: %s", self._finding.detail)

    def _end_late(self) -> None:
        """An engine that answers ends its requests in time itself, as a rule before they are looked at here."""
        if self._child is None:
            return
        at_work = () if self._answers else self._child.board.working_for()
        late = self._live.end_late(time.monotonic(), self._answers, at_work)
        for failed in late:
            self._deliver(failed)
            self._send(Remove(failed.request_id))
        if late:
            self._send_due()

    def _cpu_seconds(self, pid: int) -> float | None:
        """On a GPU the host waits in a step, and uses no time."""
        return cpu_seconds(pid) if self.info is not None and self.info.resolved.device == "cpu" else None
