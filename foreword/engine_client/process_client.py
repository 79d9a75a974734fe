"""The engine in a process of its own, restarted after crashes and hangs. Nothing here imports torch."""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any, Final

from foreword.config.lora import AdapterInfo
from foreword.config.options import Config
from foreword.core.outputs import Event, StepReport, StepStats
from foreword.core.params import SamplingParams, Speculation
from foreword.core.readiness import OnLoadProgress, Readiness
from foreword.core.request import Request
from foreword.core.structured_output import Vocabulary
from foreword.engine_client.base import EngineCallbacks, ReplicaClient
from foreword.engine_client.crash_policy import RestartPolicy
from foreword.engine_client.engine_process import EngineProcess, KVMemory, ProcessSession, SendFailed
from foreword.engine_client.forkserver import ForkServer
from foreword.engine_client.heartbeat import EngineHealth, HangDetector, cpu_seconds
from foreword.engine_client.messages import (
    AdapterReply,
    EngineReady,
    EngineStartFailed,
    Init,
    LoadAdapter,
    LoadProgress,
    SendBlocks,
    SetThreads,
    UnloadAdapter,
)
from foreword.errors import AdapterConflict, ConfigError, EngineDead, ForewordError, RequestFailed
from foreword.planning.resolve import EngineInfo, ResolvedConfig
from foreword.speculation.draft_length.cost_model import MeasuredCosts
from foreword.utils.logging import log_model

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S: Final = 0.25
GIB: Final = 1 << 30
# Others are faults of the engine's own code, which may have written anywhere.
EXIT_CODES_FROM_OUTSIDE: Final = (0, -signal.SIGKILL)
RESTART_DELAY_S: Final = 0.5  # follows a failed start: a missing resource may be back


class ProcessClient:
    """See ReplicaClient: starts an engine process, watches it, and replaces it when it ends."""

    def __init__(
        self,
        config: Config,
        never_sampled_ids: tuple[int, ...],
        vocabulary: Callable[[], Vocabulary],
        fork_server: ForkServer,
        on_progress: OnLoadProgress | None = None,
    ) -> None:
        """vocabulary  called in a thread, with the first grammar of each engine
        on_progress  called while the first engine loads
        """
        self.info: EngineInfo | None = None
        self.alive = False
        self._config = config
        self._never_sampled_ids = never_sampled_ids
        self._vocabulary = vocabulary
        self._fork_server = fork_server
        self._on_progress = on_progress
        self._callbacks: EngineCallbacks  # set by start()
        self._session: ProcessSession | None = None  # the newest process'
        self._serving = False  # that process accepts requests
        self._ready: asyncio.Future[EngineReady] | None = None
        self._resolved: ResolvedConfig | None = None  # choices of this engine, or of one like it
        self._timings: MeasuredCosts | None = None
        self._restart_policy = RestartPolicy()
        self._health = EngineHealth()
        self._load_progress: LoadProgress | None = None
        self._restarts = 0
        self._reloaded: EngineProcess | None = None  # killed by reload()
        self._is_drain_skipped = False
        self._adapters: dict[str, AdapterInfo] = {}  # by digest; engines that replace this one load them too
        self._kv_memory = KVMemory() if config.kv_cache_shared_memory else None
        self._num_threads: int | None = None  # argument of set_threads()
        self._state_changed = asyncio.Event()  # the engine serves again, or is gone
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def pid(self) -> int | None:
        return None if self._session is None else self._session.process.pid

    @property
    def stats(self) -> StepStats:
        return StepStats() if self._session is None else self._session.stats

    @property
    def readiness(self) -> Readiness:
        if self.info is None:
            return Readiness("loading", "the engine is still loading", self._load_fraction())
        if not self.alive:
            return Readiness("dead", "the engine is gone", restarts=self._restarts)
        if not self._serving:
            return Readiness("restarting", "the engine restarts", self._load_fraction(), self._restarts)
        if not self._health.ready:
            return Readiness("unresponsive", self._health.detail, restarts=self._restarts)
        return Readiness("ok", restarts=self._restarts)

    async def start(self, callbacks: EngineCallbacks, reuse: ReplicaClient | None = None) -> EngineInfo:
        self._callbacks = callbacks
        if self._session is not None:  # it gave its engines up, and is started again
            await self._session.process.close(self._fork_server, force=True)
            self._restart_policy = RestartPolicy()
        if isinstance(reuse, ProcessClient):
            self._resolved, self._timings = reuse._resolved, reuse._timings
            self._adapters = dict(reuse._adapters)
        ready = await self._launch()
        self.info, self._resolved, self._timings = ready.info, ready.info.resolved, ready.timings
        self._adapters = {adapter.digest: adapter for adapter in ready.info.adapters}
        self.alive = True
        self._begin_serving()
        self._tasks.append(asyncio.create_task(self._supervise()))
        return self.info

    async def close(self) -> None:
        self.alive = False
        self._state_changed.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._ready is not None:
            self._ready.cancel()
        if self._session is not None:
            self._session.calls.fail_all(EngineDead("the engine was shut down"))
            force = self._is_drain_skipped or not self._health.ready
            await self._session.process.close(self._fork_server, force)
            self._session.close(EngineDead("the engine was shut down"))
        if self._kv_memory is not None:
            self._kv_memory.close()

    def skip_drain(self) -> None:
        self._is_drain_skipped = True
        if not self.alive and self._session is not None:
            self._session.process.skip_wait()

    # Requests and calls

    def listen(self, request: Request, on_event: Callable[[Event], None]) -> None:
        if not self._serving:
            raise EngineDead("the engine is not running")
        assert self._session is not None
        self._session.submit(request, on_event)

    def remove(self, request_id: str, num_tokens: int | None = None) -> None:
        if self._session is not None:
            self._session.remove(request_id, num_tokens)

    def running_ids(self) -> Collection[str]:
        return () if self._session is None else self._session.running_ids()

    def set_threads(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._send(SetThreads(num_threads))

    def request_blocks(self) -> None:
        self._send(SendBlocks())

    def _send(self, message: Any) -> None:
        if self._session is not None and self._serving:
            self._session.process.send(message)

    async def load_adapter(self, path: str) -> AdapterInfo:
        info = await self._call_engine(lambda call: LoadAdapter(call, path))
        assert info is not None
        self._adapters[info.digest] = info
        return info

    async def unload_adapter(self, digest: str) -> None:
        info = self._adapters.pop(digest, None)  # an engine that replaces this one lacks it
        try:
            await self._call_engine(lambda call: UnloadAdapter(call, digest))
        except AdapterConflict:
            if info is not None:
                self._adapters[digest] = info
            raise
        except RequestFailed:  # the engine ended
            pass

    async def _call_engine(
        self, make_message: Callable[[int], LoadAdapter | UnloadAdapter]
    ) -> AdapterInfo | None:
        """The reply to a message about adapters."""
        session = await self._wait_serving()
        return await session.calls.call(lambda call: session.process.send(make_message(call)))

    async def reload(self) -> AsyncIterator[str]:
        session, started_s = await self._wait_serving(), time.monotonic()
        yield f"replacing the engine under {len(session)} open requests"
        self._reloaded = session.process
        session.process.kill("it is reloaded")
        await self._wait_serving(session)
        yield f"ready after {time.monotonic() - started_s:.1f} s"

    async def _wait_serving(self, replaced: ProcessSession | None = None) -> ProcessSession:
        """Wait until an engine accepts requests, another one than `replaced`. Raises EngineDead."""
        while self.alive:
            if self._session is not None and self._serving and self._session is not replaced:
                return self._session
            self._state_changed.clear()
            await self._state_changed.wait()
        raise EngineDead("the engine is not running")

    def _on_message(
        self,
        process: EngineProcess,
        message: StepReport | AdapterReply | LoadProgress | EngineReady | EngineStartFailed | SendFailed,
    ) -> None:
        session = self._session
        if session is None or process is not session.process:
            return  # replaced
        if isinstance(message, StepReport):
            session.stats = message.stats
            self._callbacks.on_step(message.stats)
            if message.blocks is not None:
                self._callbacks.on_blocks(message.blocks)
            session.on_report(message)
        elif isinstance(message, AdapterReply):
            session.calls.resolve(message.call, message.result)
        elif isinstance(message, LoadProgress):
            self._load_progress = message
            if self._on_progress is not None and self.info is None:
                self._on_progress(message.stage, message.done, message.total)
        elif self._ready is not None and not self._ready.done():
            if isinstance(message, EngineReady):
                self._ready.set_result(message)
            else:  # the engine's, or the vocabulary's that it waits for
                self._ready.set_exception(message.error)
        elif isinstance(message, SendFailed):
            session.on_send_failed(message)

    # Start

    async def _launch(self) -> EngineReady:
        """Start a process and wait until it has loaded. Raises ConfigError or CheckpointError."""
        self._ready = asyncio.get_running_loop().create_future()
        self._load_progress, self._health = None, EngineHealth()
        ended, memory = self._session, self._kv_memory
        if (
            memory is not None
            and ended is not None
            and ended.process.exit_code not in EXIT_CODES_FROM_OUTSIDE
        ):
            logger.warning("client: the KV cache in memory may be damaged: it is dropped")
            memory.clear()
        process = await EngineProcess.launch(self._fork_server, self._on_message, memory)
        self._session = ProcessSession(process, self._vocabulary)
        process.send(replace(self._init_message(), log_model=log_model.get()))
        if self._config.drafts_text:
            self._session.send_vocabulary()
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(asyncio.create_task(self._watch(process)))
        await _wait_for(self._ready, process)
        if not self._ready.done():
            reason = await process.reap(self._fork_server)
            progress = self._load_progress_text()
            raise ConfigError(f"the engine process ended while it was loading{progress}: {reason}")
        process.ready_s = time.monotonic()
        return self._ready.result()

    def _init_message(self) -> Init:
        if self._resolved is None:
            return Init(self._config, self._never_sampled_ids)
        trace = self._config.trace if self._restarts else None  # keep the trace of the crashed engine
        config = self._config if trace is None else replace(self._config, trace=f"{trace}.{self._restarts}")
        adapters = tuple(self._adapters.values())
        return Init(config, self._never_sampled_ids, self._resolved, self._timings, adapters)

    def _load_fraction(self) -> float | None:
        loaded = self._load_progress
        return loaded.done / loaded.total if loaded is not None and loaded.total else None

    def _load_progress_text(self) -> str:
        if (loaded := self._load_progress) is None:
            return ""
        if loaded.stage != "weights":
            return f", with {loaded.done} of {loaded.total} {loaded.stage} ready"
        return f", with {loaded.done / GIB:.2f} of {loaded.total / GIB:.2f} GiB of weights read"

    def _begin_serving(self) -> None:
        self._serving = True
        self._state_changed.set()
        if self._num_threads is not None:
            self.set_threads(self._num_threads)

    async def _watch(self, process: EngineProcess) -> None:
        """Check the health of a process every WATCH_INTERVAL_S, until it ends."""
        detector = HangDetector(self._config.hang_timeout, partial(self._cpu_seconds, process.pid))
        while not process.exited.is_set():
            before, self._health = self._health, detector.check(time.monotonic(), process.heartbeat.read())
            if self._health.hung:
                process.kill(self._health.detail)
            elif before.ready and not self._health.ready:
                logger.warning("client: engine unresponsive: %s", self._health.detail)
            await asyncio.sleep(WATCH_INTERVAL_S)

    def _cpu_seconds(self, pid: int) -> float | None:
        """None on a GPU, where the host may wait without CPU time."""
        return cpu_seconds(pid) if self.info is not None and self.info.resolved.device == "cpu" else None

    # Restart

    async def _supervise(self) -> None:
        """Replace the engine whenever it exits, until the restart policy gives up."""
        assert self._session is not None
        try:
            while True:
                await self._session.process.exited.wait()
                if not await self._replace(self._session):
                    break
        except Exception:
            logger.exception("client: restart failed")
        self.alive = self._serving = False
        self._state_changed.set()
        self._session.close(EngineDead("the engine died and could not be restarted"))
        self._callbacks.on_dead()

    async def _replace(self, ended: ProcessSession) -> bool:
        """Start a new engine; False to give up."""
        noticed_s, process = time.monotonic(), ended.process
        is_planned = process is self._reloaded
        had_requests = self._serving and bool(process.heartbeat.busy_requests())
        self._serving = False
        self._restarts += 1
        plugin = self._drop_plugin(ended)
        ended.stats = StepStats()
        self._callbacks.on_restart(None if is_planned else process.exit_reason or "it hung up")
        num_open = len(ended)
        if self._callbacks.on_crash(() if is_planned else ended.running_ids()):
            self._restart_policy.record_progress()
        ended.close(EngineDead("the engine died"))
        reason = await process.reap(self._fork_server)
        level, outlook = logging.INFO if is_planned else logging.ERROR, self._callbacks.outlook
        logger.log(level, "client: engine died: %s; %d open requests %s", reason, num_open, outlook)
        if plugin is not None:
            text = (
                "client: it was in the code of drafter %s: the next engine runs without it, so that requests"
            )
            logger.error(f"{text} with this method get no drafts until the server is started again", plugin)
        if not is_planned and not self._may_restart(process, had_requests):
            return False
        session = await self._relaunch()
        if session is None:
            return False
        if self._restart_policy.needs_probe and not await self._answers_probe(session):
            return True  # it ended, and is replaced next
        logger.warning("client: engine restarted after %.1f s", time.monotonic() - noticed_s)
        self._begin_serving()
        self._callbacks.on_ready()
        return True

    def _drop_plugin(self, ended: ProcessSession) -> str | None:
        """Run without the drafter in whose code the engine ended, and count its error; returns its name."""
        number = ended.process.heartbeat.plugin
        if not number:
            return None
        plugin, stats = self._config.drafter_plugins()[number - 1], ended.stats
        self._config = self._config.without_plugin(plugin)
        # The dead engine could not report the error.
        errors = Counter(stats.drafter_errors) + Counter((plugin.name,))
        last = replace(stats, step=stats.step + 1, stage_seconds={}, drafter_errors=errors)
        self._callbacks.on_step(last)
        return plugin.name

    def _may_restart(self, process: EngineProcess, had_requests: bool) -> bool:
        healthy_s = process.heartbeat.read().healthy_until_s - process.ready_s
        if self._restart_policy.on_crash(healthy_s, had_requests):
            return True
        num_restarts = self._restarts - 1
        text = "client: engine keeps crashing without requests, giving up after %d restarts"
        logger.error(text, num_restarts)
        return False

    async def _relaunch(self) -> ProcessSession | None:
        """Try a few starts; None if all fail, or the new engine would sample other tokens."""
        assert self.info is not None and self._session is not None
        while True:
            try:
                ready = await self._launch()
            except ForewordError as error:
                logger.error("client: engine restart failed: %s", error)
                await self._session.process.close(self._fork_server, force=True)
                if not self._restart_policy.on_start_failed():
                    return None
                await asyncio.sleep(RESTART_DELAY_S)
                continue
            self._restart_policy.on_started()
            if ready.info.fingerprint != self.info.fingerprint:
                logger.error("client: model or machine changed: tokens would differ, giving up")
                return None
            self.info = replace(self.info, kv_files=ready.info.kv_files, adapters=ready.info.adapters)
            return self._session

    async def _answers_probe(self, session: ProcessSession) -> bool:
        """Whether the engine lives to answer a request for one token, which no working engine fails."""
        token_id = next(token_id for token_id in itertools.count() if token_id not in self._never_sampled_ids)
        params = SamplingParams(
            max_tokens=1, temperature=0.0, ignore_eos=True, speculation=Speculation("off")
        )
        name, now_s = f"self-test-{self._restarts}", time.monotonic()
        answered: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        session.submit(Request(name, (token_id,), params, seed=0, arrival_s=now_s), answered.set_result)
        await _wait_for(answered, session.process)
        return answered.done()


async def _wait_for(future: asyncio.Future[Any], process: EngineProcess) -> None:
    """Wait for the result, or for the end of the process."""
    exited = asyncio.create_task(process.exited.wait())
    await asyncio.wait((future, exited), return_when=asyncio.FIRST_COMPLETED)
    exited.cancel()
