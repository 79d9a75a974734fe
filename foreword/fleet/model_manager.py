"""Loads and unloads the models of a server, as the LoadScheduler decides. Imports no torch."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Final

from foreword.config.lora import LoraModule
from foreword.config.options import Config
from foreword.core.readiness import OnLoadProgress, Readiness
from foreword.embedding.client import EncoderClient
from foreword.engine_client.forkserver import ForkServer
from foreword.errors import ForewordError, InvalidRequest, ModelLoadFailed, RequestFailed, ShuttingDown
from foreword.fleet.cpu_affinity import ThreadSharing
from foreword.fleet.load_scheduler import LoadScheduler, Refusal
from foreword.fleet.memory import UNLIMITED, UNPLANNED, FleetPlan, resident_bytes
from foreword.fleet.model_processes import ModelProcesses, OpenProcesses, open_processes
from foreword.metrics.recorder import MetricsRecorder
from foreword.metrics.server_metrics import ServerMetrics
from foreword.planning.memory import format_bytes
from foreword.planning.replica_resources import read_machine
from foreword.server.health import EngineProbe
from foreword.server.loaded_model import LoadedModel
from foreword.server.model_names import ModelNames
from foreword.server.registry import ManagedModel, ModelStatus, ServedModels
from foreword.utils.logging import log_model
from foreword.utils.threads import run_in_own_thread

logger = logging.getLogger(__name__)

MEASURE_INTERVAL_S: Final = 2.0  # between measurements of loaded models, which grow with use
PROGRESS_INTERVAL_S: Final = 10.0  # between log lines while a model is loaded


def _ignore_progress(stage: str, done: int, total: int) -> None:
    pass


@dataclass(slots=True, eq=False)
class _Model(ManagedModel):
    """A model and its processes."""

    next_config: Config = field(kw_only=True)  # config of the next load
    processes: ModelProcesses | None = None  # set when a load begins, None when an unload has ended
    recorder: MetricsRecorder | None = None  # kept through unloads, so that counters never fall
    error: str | None = None  # why the last load failed, or the last engine ended
    memory_bytes: int | None = None  # measured while loaded
    unload_reason: str | None = None  # given by an operator
    watcher: asyncio.Task[None] | None = None  # waits for the end of the engine
    last_used_s: float = 0.0
    logged_s: float = 0.0  # time of the last line about progress


class ModelManager:
    """Loads and unloads the models of a server; all engines come from one fork server.

    Requests wait for admission in the LoadScheduler, which never unloads a model with open answers.
    A pinned model that is alone is the server: the server is as healthy as it, and ends with it.
    """

    def __init__(
        self,
        config: Config,
        plan: FleetPlan,
        fork_server: ForkServer,
        on_progress: OnLoadProgress = _ignore_progress,
        measure: Callable[[Sequence[int]], int] = resident_bytes,
        open_processes: OpenProcesses = open_processes,
    ) -> None:
        """config       of the server
        fork_server  starts the engines, and is closed with this
        on_progress  the progress of a pinned model that is alone; others log theirs
        measure      bytes of process groups; called in a thread
        Raises ConfigError for names that clash, and for an invalid key file.
        """
        entries = plan.models.entries
        only = entries[0].name if len(entries) == 1 else ""
        self._models = {
            entry.name: _Model(entry, ModelNames(entry), "" if only else entry.name, next_config=entry.config)
            for entry in entries
        }
        self._alone = self._models[only] if only and entries[0].pinned else None
        self._plans = {each.entry.name: each for each in plan.plans}
        self._limits = plan.memory_limits
        self._scheduler = LoadScheduler(
            plan.plans, plan.memory_limits, plan.models.max_loaded, plan.models.max_swap_wait
        )
        self._on_progress = on_progress
        self._measure = measure
        self._open_processes = open_processes
        self._fork_server = fork_server
        self._metrics = ServerMetrics(self._models, only)
        self._threads = ThreadSharing(read_machine())
        self.models = ServedModels(config, self._metrics, list(self._models.values()), self)
        self.dead = asyncio.Event()  # the engine of a pinned model that is alone is gone for good
        self._first_load: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting: dict[str, asyncio.Future[None]] = {}  # by request id, until admission or refusal
        self._open: dict[str, _Model] = {}  # by request id, until end()
        self._tasks: set[asyncio.Task[None]] = set()  # cancelled by a shutdown
        self._unloads: set[asyncio.Task[None]] = set()  # awaited by a shutdown
        self._closing: set[ModelProcesses] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def __aenter__(self) -> ModelManager:
        """Begin to load pinned and preloaded models."""
        if any(self._is_measured(model) for model in self._models.values()):
            self._start(self._measure_regularly(), self._tasks)
        self._decide()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all engines, and the worker processes of the intake."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for loading in self._waiting.values():
            if not loading.done():
                loading.set_exception(ShuttingDown("the server is shutting down"))
                loading.exception()  # perhaps nobody waits any more
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._unloads, return_exceptions=True)
        await asyncio.gather(*(self._close(model) for model in self._models.values()))
        await self.models.intake.close()
        await self._fork_server.close()
        if self._first_load.done():
            self._first_load.exception()  # perhaps nobody waits any more

    def skip_drain(self) -> None:
        """Kill the engines instead of waiting for their steps."""
        for processes in (*self._closing, *(model.processes for model in self._models.values())):
            if processes is not None:
                processes.engine.skip_drain()

    async def wait_ready(self) -> None:
        """Wait until a pinned model that is alone is loaded. Raises its ConfigError, CheckpointError."""
        if self._alone is not None:
            await asyncio.shield(self._first_load)

    # HasHealth: the health of a pinned model that is alone

    @property
    def alone(self) -> LoadedModel | None:
        """A pinned model that is alone, once it is loaded."""
        return None if self._alone is None else self._alone.loaded

    @property
    def readiness(self) -> Readiness:
        if self._alone is None:
            return Readiness("ok")
        if self._alone.processes is None:
            if self.dead.is_set():
                return Readiness("dead", "the engine is not running")
            return Readiness("loading", "the server reads its models")
        loaded = self._alone.loaded
        return self._alone.processes.readiness if loaded is None else loaded.client.readiness

    @property
    def encoder(self) -> EncoderClient | None:
        processes = None if self._alone is None else self._alone.processes
        return None if processes is None else processes.encoder

    @property
    def probe(self) -> EngineProbe | None:
        return None if self.alone is None else self.alone.probe

    # What routes need: see ModelLoader

    def submit(self, request_id: str, model: str) -> asyncio.Future[None]:
        loading: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._is_closed:
            loading.set_exception(ShuttingDown("the server is shutting down"))
            return loading
        self._open[request_id] = self._models[model]
        self._waiting[request_id] = loading
        self._scheduler.submit(request_id, model, time.monotonic())
        self._decide()
        return loading

    def end(self, request_id: str) -> None:
        model = self._open.pop(request_id, None)
        if model is None:
            return
        if (loading := self._waiting.pop(request_id, None)) is not None:
            loading.cancel()
        model.last_used_s = time.monotonic()
        self._scheduler.end(request_id, model.last_used_s)
        self._decide()

    def status(self, name: str) -> ModelStatus:
        model, scheduler, plan = self._models[name], self._scheduler, self._plans[name]
        state = scheduler.state(name)
        is_loading = state == "loading" and model.processes is not None
        return ModelStatus(
            status=state,
            progress=model.processes.engine.readiness.progress if is_loading and model.processes else None,
            error=model.error,
            pinned=scheduler.is_pinned(name),
            memory_bytes=model.memory_bytes,
            estimated_bytes=None if plan.device == UNPLANNED else plan.num_bytes,
            open_requests=scheduler.num_open(name),
            waiting_requests=scheduler.num_waiting(name),
        )

    def load(self, name: str, pin: bool | None = None) -> None:
        self._check_may_leave(pin is False)
        if (problem := self._scheduler.why_not(name)) is not None:
            raise InvalidRequest(f"the model cannot be loaded: {problem}", "model")
        if pin is not None:
            self._scheduler.set_pinned(name, pin)
        self._scheduler.load(name)
        self._decide()

    def unload(self, name: str) -> None:
        self._check_may_leave(True)
        if self._scheduler.state(name) in ("loading", "loaded"):
            self._models[name].unload_reason = "requested"
        self._scheduler.unload(name)
        self._decide()

    def _check_may_leave(self, leaves: bool) -> None:
        """Raises InvalidRequest if the server is its only model."""
        if leaves and self._alone is not None:
            problem = "this server has one model, which stays loaded; see --models and --keep-alive"
            raise InvalidRequest(problem, "model")

    def recorders(self) -> Sequence[MetricsRecorder]:
        return [model.recorder for model in self._models.values() if model.recorder is not None]

    # Decisions

    def _decide(self) -> None:
        """Do what the scheduler decides after each event."""
        if self._is_closed:
            return
        now = time.monotonic()
        decision = self._scheduler.decide(now)
        for request_id in decision.admitted:
            loading = self._waiting.pop(request_id)
            if not loading.done():
                loading.set_result(None)
        for refusal in decision.refused:
            self._refuse(refusal, now)
        for name in decision.unload:
            model = self._models[name]
            self._start(self._unload(model, self._unload_reason(model, now)), self._unloads)
        if decision.load is not None:
            self._start(self._load(self._models[decision.load]), self._tasks)
        self._share_threads()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if decision.wake_s is not None:
            delay_s = max(decision.wake_s - time.monotonic(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._decide)

    def _share_threads(self) -> None:
        """Divide the cores among the engines with open answers."""
        if len(self._models) == 1:
            return
        working = {
            name: (model.loaded.client, model.next_config)
            for name, model in self._models.items()
            if model.loaded is not None and self._scheduler.num_open(name)
        }
        self._threads.update(working)

    def _refuse(self, refusal: Refusal, now_s: float) -> None:
        loading = self._waiting.pop(refusal.request_id, None)
        if loading is None or loading.done():
            return
        error: ForewordError
        if refusal.reason == "does_not_fit":
            error = InvalidRequest(f"the model {refusal.model!r} cannot be loaded: {refusal.detail}", "model")
        else:
            reason = self._models[refusal.model].error or "its load failed"
            error = ModelLoadFailed(f"the model {refusal.model!r} cannot be loaded: {reason}", "model")
            if refusal.retry_at_s is not None:
                error.retry_after_s = max(refusal.retry_at_s - now_s, 1.0)
        loading.set_exception(error)

    def _unload_reason(self, model: _Model, now_s: float) -> str:
        keep_alive_s = model.entry.keep_alive
        if model.unload_reason is not None:
            return model.unload_reason
        is_expired = keep_alive_s is not None and now_s >= model.last_used_s + keep_alive_s
        return "keep_alive" if is_expired else "evicted"

    def _start(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    # Models

    async def _load(self, model: _Model) -> None:
        name, started_s = model.name, time.monotonic()
        log_model.set(model.log_name)  # the engine's tasks and callbacks inherit it
        model.error = None
        if model is not self._alone:
            logger.info("loading, about %s", format_bytes(self._plans[name].num_bytes))
        try:
            await self._start_processes(model)
        except Exception as error:
            await self._on_load_failed(model, error)
        else:
            load_s = time.monotonic() - started_s
            size = model.memory_bytes = await self._measure_model(model)
            self._metrics.on_load(name, load_s)
            if model is not self._alone:
                logger.info("loaded in %.1f s, %s", load_s, format_bytes(size or 0))
            model.last_used_s = time.monotonic()
            self._scheduler.on_loaded(name, size or 0, model.last_used_s)
            model.watcher = asyncio.create_task(self._watch(model))
            if not self._first_load.done():
                self._first_load.set_result(None)
        self._decide()

    async def _on_load_failed(self, model: _Model, error: Exception) -> None:
        if model is self._alone and not self._first_load.done():
            self._first_load.set_exception(error)
            return
        if not isinstance(error, ForewordError):
            logger.exception("loading failed", exc_info=error)
            error = RequestFailed("an unexpected error; see the server's log")
        model.error = str(error)
        logger.error("cannot be loaded: %s", error)
        await self._close(model)
        self._metrics.on_load_failed(model.name)
        self._scheduler.on_load_failed(model.name, time.monotonic())

    async def _start_processes(self, model: _Model) -> None:
        """Start the processes. Raises ForewordError, and may leave some open."""

        def log_progress(stage: str, done: int, total: int) -> None:
            now = time.monotonic()
            if total and now - model.logged_s >= PROGRESS_INTERVAL_S:
                model.logged_s = now
                logger.info("loading: %s %.0f%%", stage, 100 * done / total)

        model.logged_s = time.monotonic()
        on_progress = self._on_progress if model is self._alone else log_progress
        processes = await self._open_processes(model.next_config, on_progress, self._fork_server)
        model.processes = processes
        info = await processes.start()
        if model.recorder is None:
            model.recorder = processes.make_recorder(model.name)
            model.recorder.add_engine_processes(
                lambda: {} if model.processes is None else model.processes.engine.pids
            )
        model.loaded = processes.make_loaded_model(self.models, model.names, model.recorder)
        model.max_model_len = info.resolved.max_model_len

    async def _watch(self, model: _Model) -> None:
        """Unload the model once its engine is gone for good; a later request loads it again."""
        assert model.processes is not None
        await model.processes.engine.dead.wait()
        if model is self._alone:
            self.dead.set()
            return
        model.watcher = None  # this task, which closing the model would cancel
        model.error = "its engine died and could not be restarted; see the server's log"
        self._metrics.on_unload(model.name, "dead")
        self._scheduler.on_load_failed(model.name, time.monotonic())
        self._start(self._close(model), self._unloads)
        self._decide()

    async def _unload(self, model: _Model, reason: str) -> None:
        log_model.set(model.log_name)
        freed = model.memory_bytes or 0
        await self._close(model)
        logger.info("unloaded (%s), %s are free again", reason, format_bytes(freed))
        model.unload_reason = None
        self._metrics.on_unload(model.name, reason)
        self._scheduler.on_unloaded(model.name)
        self._decide()

    async def _close(self, model: _Model) -> None:
        """End the processes of a model in any state."""
        # Until the first wait, the record is ready for the next load.
        loaded, model.loaded = model.loaded, None
        processes, model.processes, model.memory_bytes = model.processes, None, None
        watcher, model.watcher = model.watcher, None
        if watcher is not None:
            watcher.cancel()
        if model.recorder is not None:
            model.recorder.on_unload()
        if processes is not None:
            self._closing.add(processes)  # before the first wait, so that skip_drain() finds it
        if loaded is not None:
            model.next_config = _with_adapters(model.next_config, model.names.modules)
            model.names.detach()
            await loaded.close()
        if processes is not None:
            await processes.close()
            self._closing.discard(processes)

    def _is_measured(self, model: _Model) -> bool:
        """Whether the memory of its device has a limit."""
        return self._limits[self._plans[model.name].device] < UNLIMITED

    async def _measure_model(self, model: _Model) -> int | None:
        if model.processes is None or not self._is_measured(model):
            return None
        return await run_in_own_thread(self._measure, model.processes.pids)

    async def _measure_regularly(self) -> None:
        while True:
            await asyncio.sleep(MEASURE_INTERVAL_S)
            for name, model in self._models.items():
                if model.loaded is None:
                    continue
                size = await self._measure_model(model)
                if model.loaded is not None and size is not None:  # not unloaded meanwhile
                    model.memory_bytes = size
                    self._scheduler.on_measured(name, size)
            self._decide()


def _with_adapters(config: Config, modules: Sequence[LoraModule]) -> Config:
    """The options of the next load: adapters that clients have loaded or unloaded stay so."""
    if {(module.name, module.path) for module in modules} == {(m.name, m.path) for m in config.adapters}:
        return config
    text = ",".join(json.dumps({"name": module.name, "path": module.path}) for module in modules)
    slots = max(config.num_lora_slots, len(modules))
    return replace(config, lora_modules=text or None, enable_lora=True, max_loras=slots)
