"""The engine in a process of its own, restarted after crashes and hangs. Nothing here imports torch."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from foreword.config.lora import AdapterInfo
from foreword.config.options import Config
from foreword.core.outputs import BlockUpdate, ErrorEvent, Event, StepReport, StepStats
from foreword.core.params import SamplingParams, Speculation
from foreword.core.readiness import OnLoadProgress, Readiness, ReplicaState
from foreword.core.request import Request
from foreword.core.structured_output import Vocabulary
from foreword.engine_client.base import EngineClient, SafeCalls, is_last, iterate_events
from foreword.engine_client.connection import EngineProcess, SendFailed
from foreword.engine_client.forkserver import ForkServer
from foreword.engine_client.heartbeat import EngineHealth, HangDetector, cpu_seconds
from foreword.engine_client.messages import (
    AdapterReply,
    EngineReady,
    EngineStartFailed,
    Init,
    LoadAdapter,
    LoadProgress,
    RemoveRequest,
    SendBlocks,
    SetThreads,
    UnloadAdapter,
)
from foreword.engine_client.resume import InflightRequests, RestartPolicy
from foreword.errors import AdapterConflict, ConfigError, EngineDead, ForewordError, RequestFailed
from foreword.planning.resolve import EngineInfo, ResolvedConfig
from foreword.speculation.draft_length.cost_model import MeasuredCosts
from foreword.utils.logging import log_model

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S: Final = 0.25
GIB: Final = 1 << 30
RESTART_DELAY_S: Final = 0.5  # after a failed start: a missing resource may be back


class ProcessClient:
    """See EngineClient. Open requests continue in the new engine after a restart."""

    def __init__(
        self,
        config: Config,
        never_sampled_ids: tuple[int, ...],
        vocabulary: Callable[[], Vocabulary],
        on_progress: OnLoadProgress | None = None,
        fork_server: ForkServer | None = None,
        owns_fork_server: bool = True,
    ) -> None:
        """vocabulary  called in a thread, with the first grammar of each engine
        fork_server    starts the engines; close() closes it if this client owns it
        """
        self.info: EngineInfo | None = None
        self.alive = False
        self.on_step: Callable[[StepStats], None] | None = None
        self.on_restart: Callable[[str | None], None] | None = None
        self.on_ready: Callable[[], None] | None = None
        self.on_blocks: Callable[[BlockUpdate], None] | None = None
        self.on_crash: Callable[[Collection[str]], None] | None = None
        self.dead = asyncio.Event()  # the engine is gone for good, without close()
        self._config = config
        self._never_sampled_ids = never_sampled_ids
        self._vocabulary = vocabulary
        self._on_progress = on_progress
        self._fork_server = fork_server or ForkServer()
        self._owns_fork_server = owns_fork_server
        self._process: EngineProcess | None = None
        self._serving = False  # the process accepts requests
        self._ready: asyncio.Future[EngineReady] | None = None
        self._inflight = InflightRequests()
        self._stats = StepStats()
        self._listeners: dict[str, Callable[[Event | None], None]] = {}  # of open requests
        self._resolved: ResolvedConfig | None = None  # of this engine, or of one like it
        self._timings: MeasuredCosts | None = None
        self._restart_policy = RestartPolicy()
        self._health = EngineHealth()
        self._load_progress: LoadProgress | None = None
        self._restarts = 0
        self._reloaded: EngineProcess | None = None  # killed by reload()
        self._is_drain_skipped = False
        self._adapters: dict[str, AdapterInfo] = {}  # by digest, of the engine and of those that replace it
        self._adapter_calls: dict[int, asyncio.Future[AdapterInfo | None]] = {}
        self._num_adapter_calls = 0
        self._num_threads: int | None = None  # of set_threads()
        self._usage_changed = asyncio.Event()  # a request ended, or the engine serves again
        self._tasks: list[asyncio.Task[None]] = []
        self._safe_callback = SafeCalls()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids by replica: this is the only one."""
        return {} if self._process is None else {"": self._process.pid}

    @property
    def stats(self) -> StepStats:
        if self._is_responsive:
            return self._stats
        return self._inflight.stats(time.monotonic(), self._stats, self._serving)

    @property
    def _is_responsive(self) -> bool:
        return self._serving and self._health.ready

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

    async def start(self, like: EngineClient | None = None) -> EngineInfo:
        if isinstance(like, ProcessClient):
            self._resolved, self._timings = like._resolved, like._timings
            self._adapters = dict(like._adapters)
        self._tasks.append(asyncio.create_task(self._watch()))
        ready = await self._launch()
        self.info, self._resolved, self._timings = ready.info, ready.info.resolved, ready.timings
        self._adapters = {adapter.digest: adapter for adapter in ready.info.adapters}
        self.alive = self._serving = True
        if self._num_threads is not None:
            self.set_threads(self._num_threads)
        self._tasks.append(asyncio.create_task(self._supervise()))
        return self.info

    def submit(self, request: Request) -> AsyncIterator[Event]:
        return iterate_events(self, request)

    def listen(self, request: Request, on_event: Callable[[Event | None], None]) -> None:
        if not self.alive:
            raise EngineDead("the engine is not running")
        self._listeners[request.id] = on_event
        self._inflight.add(request)
        self._send_pending()

    def finish(self, request_id: str, num_tokens: int) -> None:
        self._remove(RemoveRequest(request_id, num_tokens))

    def abort(self, request_id: str) -> None:
        self._remove(RemoveRequest(request_id))

    def _remove(self, message: RemoveRequest) -> None:
        on_event = self._listeners.pop(message.request_id, None)
        if on_event is None:
            return
        on_event(None)
        if message.request_id in self._inflight:
            self._inflight.remove(message.request_id)
            self._send(message)
            self._send_pending()

    def set_threads(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._send(SetThreads(num_threads))

    def request_blocks(self) -> None:
        self._send(SendBlocks())

    def replica_states(self) -> Sequence[ReplicaState]:
        return ()

    async def reload(self) -> AsyncIterator[str]:
        await self._wait_serving()
        process, started_s = self._process, time.monotonic()
        assert process is not None
        yield f"replacing the engine under {len(self._inflight)} open requests"
        self._reloaded = process
        process.kill("it is reloaded")
        while self.alive and self._process is process:
            self._usage_changed.clear()
            await self._usage_changed.wait()
        await self._wait_serving()
        yield f"ready after {time.monotonic() - started_s:.1f} s"

    async def _wait_serving(self) -> None:
        """Wait until the engine accepts requests. Raises EngineDead."""
        while self.alive and not self._serving:
            self._usage_changed.clear()
            await self._usage_changed.wait()
        if not self.alive:
            raise EngineDead("the engine is not running")

    async def load_adapter(self, path: str) -> AdapterInfo:
        info = await self._call_engine(lambda call: LoadAdapter(call, path))
        assert info is not None
        self._adapters[info.digest] = info
        return info

    async def wait_unused(self, digest: str) -> None:
        while self.alive and self._inflight.uses_adapter(digest):
            self._usage_changed.clear()
            await self._usage_changed.wait()

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
        """Send a message about adapters, and wait for the reply."""
        await self._wait_serving()
        reply: asyncio.Future[AdapterInfo | None] = asyncio.get_running_loop().create_future()
        call = self._num_adapter_calls = self._num_adapter_calls + 1
        self._adapter_calls[call] = reply
        self._send(make_message(call))
        try:
            return await reply
        finally:
            self._adapter_calls.pop(call, None)

    async def close(self) -> None:
        self.alive = False
        self._usage_changed.set()
        self._fail_adapter_calls()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._ready is not None:
            self._ready.cancel()
        if self._process is not None:
            force = self._is_drain_skipped or not self._health.ready
            await self._process.close(self._fork_server, force)
        if self._owns_fork_server:
            await self._fork_server.close()
        self._fail_all("the engine was shut down")

    def skip_drain(self) -> None:
        """Make close() kill the engine instead of waiting for its step, also if close() runs already."""
        self._is_drain_skipped = True
        if not self.alive and self._process is not None:
            self._process.skip_wait()

    # Messages to the engine

    def _send(self, message: Any) -> None:
        if self._process is not None and self._serving:
            self._process.send(message)

    def _send_pending(self) -> None:
        """Send the requests that the engine may have now."""
        self._usage_changed.set()
        if self._process is None or not self._serving:
            return
        image_refs = self._inflight.image_refs
        for drop in image_refs.pop_released():
            self._process.send(drop)
        for request in self._inflight.pop_pending():
            make_first = None
            if request.params.structured is not None and not self._process.has_vocabulary:
                self._process.has_vocabulary = True
                make_first = self._vocabulary
            for message in image_refs.to_messages(request):
                self._process.send(message, make_first)
                make_first = None

    # Messages from the engine

    def _on_message(
        self,
        process: EngineProcess,
        message: StepReport | AdapterReply | LoadProgress | EngineReady | EngineStartFailed | SendFailed,
    ) -> None:
        if process is not self._process:
            return  # replaced
        if isinstance(message, StepReport):
            self._on_report(message)
        elif isinstance(message, AdapterReply):
            reply = self._adapter_calls.pop(message.call, None)
            if reply is not None and not reply.done():
                if isinstance(message.result, ForewordError):
                    reply.set_exception(message.result)
                else:
                    reply.set_result(message.result)
        elif isinstance(message, LoadProgress):
            self._load_progress = message
            if self._on_progress is not None and self.info is None:
                self._on_progress(message.stage, message.done, message.total)
        elif isinstance(message, SendFailed):
            self._on_send_failed(process, message)
        elif self._ready is not None and not self._ready.done():
            if isinstance(message, EngineReady):
                self._ready.set_result(message)
            else:
                self._ready.set_exception(message.error)

    def _on_send_failed(self, process: EngineProcess, failure: SendFailed) -> None:
        """Fail the request of the message; restart the engine, whose arrival numbers differ now."""
        name = type(failure.error).__name__
        if isinstance(failure.message, Request) and failure.message.id in self._inflight:
            self._inflight.remove(failure.message.id)
            error = RequestFailed(f"the request could not be sent to the engine ({name})")
            self._deliver(ErrorEvent(failure.message.id, error))
        process.kill(f"a message to it could not be sent ({name})")

    def _on_report(self, report: StepReport) -> None:
        self._stats = report.stats
        if self.on_step is not None:
            self._safe_callback(self.on_step, report.stats)
        if report.blocks is not None and self.on_blocks is not None:
            self._safe_callback(self.on_blocks, report.blocks)
        for event in report.events:
            new = self._inflight.on_event(event)
            if new is None:
                continue
            self._restart_policy.record_progress()
            self._deliver(new)
            if isinstance(new, ErrorEvent) and not isinstance(event, ErrorEvent):
                self._send(RemoveRequest(new.request_id))
        self._send_pending()

    def _deliver(self, event: Event) -> None:
        on_event = self._listeners.get(event.request_id)
        if on_event is None:
            return
        if is_last(event):
            del self._listeners[event.request_id]
        self._safe_callback(on_event, event)

    # Start and restart

    async def _launch(self) -> EngineReady:
        """Start a process and wait until it accepts requests. Raises ConfigError or CheckpointError."""
        self._ready = asyncio.get_running_loop().create_future()
        self._load_progress = None
        self._process = process = await EngineProcess.launch(self._fork_server, self._on_message)
        process.send(replace(self._init_message(), log_model=log_model.get()))
        exited = asyncio.create_task(process.exited.wait())
        await asyncio.wait((self._ready, exited), return_when=asyncio.FIRST_COMPLETED)
        exited.cancel()
        if not self._ready.done():
            reason = await process.reap(self._fork_server)
            progress = self._load_progress_text()
            raise ConfigError(f"the engine process ended while it was loading{progress}: {reason}")
        process.ready_s = time.monotonic()
        return self._ready.result()

    def _load_fraction(self) -> float | None:
        loaded = self._load_progress
        return loaded.done / loaded.total if loaded is not None and loaded.total else None

    def _load_progress_text(self) -> str:
        if (loaded := self._load_progress) is None:
            return ""
        if loaded.stage != "weights":
            return f", with {loaded.done} of {loaded.total} {loaded.stage} ready"
        return f", with {loaded.done / GIB:.2f} of {loaded.total / GIB:.2f} GiB of weights read"

    def _init_message(self) -> Init:
        if self._resolved is None:
            return Init(self._config, self._never_sampled_ids)
        trace = self._config.trace if self._restarts else None  # keep the trace of the crashed engine
        config = self._config if trace is None else replace(self._config, trace=f"{trace}.{self._restarts}")
        adapters = tuple(self._adapters.values())
        return Init(config, self._never_sampled_ids, self._resolved, self._timings, adapters)

    async def _supervise(self) -> None:
        """Restart the engine whenever it exits, until the restart policy gives up."""
        try:
            while self._process is not None:
                await self._process.exited.wait()
                if not await self._replace(self._process):
                    break
        except Exception:
            logger.exception("client: restart failed")
        self.alive = False
        self._usage_changed.set()
        self._fail_adapter_calls()
        self._fail_all("the engine died and could not be restarted")
        self.dead.set()

    async def _replace(self, process: EngineProcess) -> bool:
        """Start a new engine and resume the open requests; False to give up."""
        noticed_s = time.monotonic()
        self._serving = False
        self._fail_adapter_calls()
        self._restarts += 1
        plugin = self._drop_plugin(process)
        self._stats, self._health = StepStats(), EngineHealth()
        if self.on_restart is not None:
            is_planned = process is self._reloaded
            self._safe_callback(self.on_restart, None if is_planned else process.exit_reason or "it hung up")
        num_open = len(self._inflight)
        self._hand_over(process)
        reason = await process.reap(self._fork_server)
        level = logging.INFO if process is self._reloaded else logging.ERROR
        text = "client: engine died: %s; %d open requests move to other replicas"
        if self.on_crash is None:
            text = "client: engine died: %s; %d open requests wait for a restart"
        logger.log(level, text, reason, num_open)
        if plugin is not None:
            text = (
                "client: it was in the code of drafter %s: the next engine runs without it, so that requests"
            )
            logger.error(f"{text} with this method get no drafts until the server is started again", plugin)
        if not self._should_restart(process) or not await self._relaunch():
            return False
        logger.warning("client: engine restarted after %.1f s", time.monotonic() - noticed_s)
        self._serving = True
        if self._num_threads is not None:
            self.set_threads(self._num_threads)
        self._send_pending()
        if self.on_ready is not None:
            self._safe_callback(self.on_ready)
        return True

    def _hand_over(self, process: EngineProcess) -> None:
        """End the open requests for a caller that resumes them."""
        if self.on_crash is not None:
            busy = () if process is self._reloaded else process.heartbeat.busy_requests()
            self._safe_callback(self.on_crash, self._inflight.in_batch(busy))
            self._fail_all("the engine died")

    def _drop_plugin(self, process: EngineProcess) -> str | None:
        """Run without the drafter in whose code the engine ended, and count its error; returns its name."""
        if not process.heartbeat.plugin:
            return None
        plugin = self._config.drafter_plugins()[process.heartbeat.plugin - 1]
        self._config = self._config.without_plugin(plugin)
        if self.on_step is not None:  # the dead engine could not report it
            errors = Counter(self._stats.drafter_errors) + Counter((plugin.name,))
            last = replace(self._stats, step=self._stats.step + 1, stage_seconds={}, drafter_errors=errors)
            self._safe_callback(self.on_step, last)
        return plugin.name

    def _should_restart(self, process: EngineProcess) -> bool:
        """Update crash blame and restart policy."""
        if process is self._reloaded:
            self._inflight.on_crash(())
            return True
        crash = self._inflight.on_crash(process.heartbeat.busy_requests())
        for failed in crash.failed:
            self._deliver(failed)
            logger.error("client: request %s: %s", failed.request_id, failed.error)
        healthy_s = process.heartbeat.read().healthy_until_s - process.ready_s
        if not self._restart_policy.on_crash(healthy_s, crash.had_requests):
            logger.error(
                "client: engine keeps crashing without requests, giving up after %d restarts",
                self._restarts - 1,
            )
            return False
        if self._restart_policy.needs_probe:
            self._inflight.set_probe(self._probe_request())
        return True

    def _probe_request(self) -> Request:
        """A request for one token, which no working engine fails."""
        token_id = next(token_id for token_id in itertools.count() if token_id not in self._never_sampled_ids)
        params = SamplingParams(
            max_tokens=1, temperature=0.0, ignore_eos=True, speculation=Speculation("off")
        )
        return Request(f"self-test-{self._restarts}", (token_id,), params, seed=0, arrival_s=time.monotonic())

    async def _relaunch(self) -> bool:
        """Try a few starts; False if all fail, or the new engine would sample other tokens."""
        assert self.info is not None
        while True:
            try:
                ready = await self._launch()
            except ForewordError as error:
                logger.error("client: engine restart failed: %s", error)
                if not self._restart_policy.on_start_failed():
                    return False
                await asyncio.sleep(RESTART_DELAY_S)
                continue
            self._restart_policy.on_started()
            if ready.info.fingerprint != self.info.fingerprint:
                logger.error("client: model or machine changed: tokens would differ, giving up")
                return False
            return True

    def _fail_all(self, message: str) -> None:
        for failed in self._inflight.fail_all(EngineDead(message)):
            self._deliver(failed)

    def _fail_adapter_calls(self) -> None:
        for reply in self._adapter_calls.values():
            if not reply.done():
                reply.set_exception(RequestFailed("the engine ended meanwhile: try again"))

    # Health

    async def _watch(self) -> None:
        """Check the engine's health and the deadlines every WATCH_INTERVAL_S."""
        process: EngineProcess | None = None
        while True:
            if process is not self._process and self._process is not None:
                process = self._process
                detector = HangDetector(self._config.hang_timeout, partial(self._cpu_seconds, process.pid))
            if process is not None:
                self._check_health(process, detector)
            self._expire_requests()
            await asyncio.sleep(WATCH_INTERVAL_S)

    def _check_health(self, process: EngineProcess, detector: HangDetector) -> None:
        before, self._health = self._health, detector.check(time.monotonic(), process.heartbeat.read())
        if self._health.hung:
            process.kill(self._health.detail)
        elif before.ready and not self._health.ready:
            logger.warning("client: engine unresponsive: %s", self._health.detail)

    def _expire_requests(self) -> None:
        """Enforce deadlines that the engine cannot: a responsive one is usually earlier."""
        if self._process is None:
            return
        busy = () if self._is_responsive else self._process.heartbeat.busy_requests()
        expired = self._inflight.expire(time.monotonic(), self._is_responsive, busy)
        for failed in expired:
            self._deliver(failed)
            self._send(RemoveRequest(failed.request_id))
        if expired:
            self._send_pending()

    def _cpu_seconds(self, pid: int) -> float | None:
        """None on a GPU, where the host may wait without CPU time."""
        return cpu_seconds(pid) if self.info is not None and self.info.resolved.device == "cpu" else None
