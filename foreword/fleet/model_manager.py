"""Loads and unloads the models of one server, as the LoadScheduler decides. Imports no torch."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from foreword.checkpoint import prepare_checkpoint
from foreword.config.lora import LoraModule
from foreword.config.models_file import ModelEntry
from foreword.config.options import Config
from foreword.core.readiness import Readiness
from foreword.engine_client.forkserver import ForkServer
from foreword.errors import ForewordError, InvalidRequest, ModelLoadFailed, RequestFailed, ShuttingDown
from foreword.fleet.cpu_affinity import ThreadSharing
from foreword.fleet.load_scheduler import LoadScheduler, Refusal
from foreword.fleet.memory import FleetPlan, resident_bytes
from foreword.fleet.server_stack import ServerStack
from foreword.metrics.recorder import MetricsRecorder
from foreword.metrics.server_metrics import ServerMetrics
from foreword.planning.memory import format_bytes
from foreword.planning.replica_resources import read_machine
from foreword.server.model_names import ServedModel
from foreword.server.registry import ManagedModel, ModelStatus, ServedModels
from foreword.utils.logging import log_model
from foreword.utils.threads import run_in_own_thread

logger = logging.getLogger(__name__)

MEASURE_INTERVAL_S: Final = 2.0  # of the memory of loaded models, which grows with use
PROGRESS_INTERVAL_S: Final = 10.0  # of log lines while a model is loaded


@dataclass(slots=True, eq=False)
class _Host:
    """One model and its processes."""

    entry: ModelEntry
    model: ManagedModel
    config: Config  # of the next load
    stack: ServerStack | None = None  # from the beginning of a load to the end of an unload
    recorder: MetricsRecorder | None = None  # from the first load on, so that counters never fall
    error: str | None = None  # of the last load, or the end of the last engine
    memory_bytes: int | None = None  # as measured while loaded
    unload_reason: str | None = None  # of an operator's unload
    watcher: asyncio.Task[None] | None = None  # waits for the end of the engine
    last_used_s: float = 0.0
    logged_s: float = 0.0  # time of the last line about progress


class ModelManager:
    """One ServerStack for each loaded model; all engines come from one fork server.

    Requests wait for admission in the LoadScheduler, which never unloads a model with open answers.
    """

    def __init__(
        self,
        config: Config,
        plan: FleetPlan,
        fork_server: ForkServer,
        measure: Callable[[Sequence[int]], int] = resident_bytes,
    ) -> None:
        """config       of the server
        fork_server  starts the engines, and is closed with this
        measure      bytes of process groups; called in a thread
        """
        models, specs = plan.models, plan.specs
        self._scheduler = LoadScheduler(specs, plan.memory_limits, models.max_loaded, models.max_swap_wait)
        self._specs = {spec.name: spec for spec in specs}
        self._measure = measure
        self._fork_server = fork_server
        self._hosts = {entry.name: _Host(entry, _make_model(entry), entry.config) for entry in models.entries}
        self._metrics = ServerMetrics(self._hosts)
        self._threads = ThreadSharing(read_machine())
        hosted = [host.model for host in self._hosts.values()]
        self.models = ServedModels(config, self._metrics, hosted, self)
        self._waiting: dict[str, asyncio.Future[None]] = {}  # by request id, until admission or refusal
        self._open: dict[str, _Host] = {}  # by request id, until end()
        self._tasks: set[asyncio.Task[None]] = set()  # that a shutdown cancels
        self._unloads: set[asyncio.Task[None]] = set()  # that it waits for
        self._closing: set[ServerStack] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def __aenter__(self) -> ModelManager:
        """Begin to load pinned and preloaded models."""
        self._start(self._measure_regularly())
        self._decide()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all engines."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for loaded in self._waiting.values():
            if not loaded.done():
                loaded.set_exception(ShuttingDown("the server is shutting down"))
                loaded.exception()  # perhaps nobody waits any more
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._unloads, return_exceptions=True)
        await asyncio.gather(*(self._close(host) for host in self._hosts.values()))
        await self._fork_server.close()

    def skip_drain(self) -> None:
        """Kill the engines instead of waiting for their steps."""
        for stack in (*self._closing, *(host.stack for host in self._hosts.values())):
            if stack is not None:
                stack.engine.skip_drain()

    @property
    def readiness(self) -> Readiness:
        """The server answers requests, whatever is loaded."""
        return Readiness("ok")

    # What routes need: see ModelLoader

    def submit(self, request_id: str, model: str) -> asyncio.Future[None]:
        loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._is_closed:
            loaded.set_exception(ShuttingDown("the server is shutting down"))
            return loaded
        self._open[request_id] = self._hosts[model]
        self._waiting[request_id] = loaded
        self._scheduler.submit(request_id, model, time.monotonic())
        self._decide()
        return loaded

    def end(self, request_id: str) -> None:
        host = self._open.pop(request_id, None)
        if host is None:
            return
        if (loaded := self._waiting.pop(request_id, None)) is not None:
            loaded.cancel()
        host.last_used_s = time.monotonic()
        self._scheduler.end(request_id, host.last_used_s)
        self._decide()

    def status(self, model: str) -> ModelStatus:
        host, scheduler = self._hosts[model], self._scheduler
        state = scheduler.state(model)
        is_loading = state == "loading" and host.stack is not None
        return ModelStatus(
            status=state,
            progress=host.stack.engine.readiness.progress if is_loading and host.stack is not None else None,
            error=host.error,
            pinned=scheduler.is_pinned(model),
            memory_bytes=host.memory_bytes,
            estimated_bytes=self._specs[model].estimated_bytes,
            open_requests=scheduler.num_open(model),
            waiting_requests=scheduler.num_waiting(model),
        )

    def load(self, model: str, pin: bool | None = None) -> None:
        if (problem := self._scheduler.why_not(model)) is not None:
            raise InvalidRequest(f"the model cannot be loaded: {problem}", "model")
        if pin is not None:
            self._scheduler.set_pinned(model, pin)
        self._scheduler.load(model)
        self._decide()

    def unload(self, model: str) -> None:
        if self._scheduler.state(model) in ("loading", "loaded"):
            self._hosts[model].unload_reason = "requested"
        self._scheduler.unload(model)
        self._decide()

    def recorders(self) -> Sequence[MetricsRecorder]:
        return [host.recorder for host in self._hosts.values() if host.recorder is not None]

    # Decisions

    def _decide(self) -> None:
        """Do what the scheduler decides after each event."""
        if self._is_closed:
            return
        now = time.monotonic()
        decision = self._scheduler.decide(now)
        for request_id in decision.admitted:
            loaded = self._waiting.pop(request_id)
            if not loaded.done():
                loaded.set_result(None)
        for refusal in decision.refused:
            self._refuse(refusal, now)
        for name in decision.unload:
            host = self._hosts[name]
            self._start_unload(self._unload(host, self._unload_reason(host, now)))
        if decision.load is not None:
            self._start(self._load(self._hosts[decision.load]))
        self._share_threads()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if decision.wake_s is not None:
            delay_s = max(decision.wake_s - time.monotonic(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._decide)

    def _share_threads(self) -> None:
        """Divide the cores among the engines with open answers."""
        working = {
            name: (host.model.context.client, host.config)
            for name, host in self._hosts.items()
            if host.model.context is not None and self._scheduler.num_open(name)
        }
        self._threads.update(working)

    def _refuse(self, refusal: Refusal, now_s: float) -> None:
        loaded = self._waiting.pop(refusal.request_id, None)
        if loaded is None or loaded.done():
            return
        error: ForewordError
        if refusal.reason == "does_not_fit":
            error = InvalidRequest(f"the model {refusal.model!r} cannot be loaded: {refusal.detail}", "model")
        else:
            reason = self._hosts[refusal.model].error or "its load failed"
            error = ModelLoadFailed(f"the model {refusal.model!r} cannot be loaded: {reason}", "model")
            if refusal.retry_at_s is not None:
                error.retry_after_s = max(refusal.retry_at_s - now_s, 1.0)
        loaded.set_exception(error)

    def _unload_reason(self, host: _Host, now_s: float) -> str:
        keep_alive_s = host.entry.keep_alive
        if host.unload_reason is not None:
            return host.unload_reason
        is_expired = keep_alive_s is not None and now_s >= host.last_used_s + keep_alive_s
        return "keep_alive" if is_expired else "evicted"

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _start_unload(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._unloads.add(task)
        task.add_done_callback(self._unloads.discard)

    # Models

    async def _load(self, host: _Host) -> None:
        name, started_s = host.entry.name, time.monotonic()
        log_model.set(name)  # the engine's tasks and callbacks inherit it
        host.error = None
        logger.info("loading, about %s", format_bytes(self._specs[name].estimated_bytes))
        try:
            await self._start_stack(host)
        except Exception as error:
            if not isinstance(error, ForewordError):
                logger.exception("loading failed")
                error = RequestFailed("an unexpected error; see the server's log")
            host.error = str(error)
            logger.error("cannot be loaded: %s", error)
            await self._close(host)
            self._metrics.on_load_failed(name)
            self._scheduler.on_load_failed(name, time.monotonic())
        else:
            load_s = time.monotonic() - started_s
            size = host.memory_bytes = await self._measure_host(host)
            self._metrics.on_load(name, load_s)
            logger.info("loaded in %.1f s, %s", load_s, format_bytes(size))
            host.last_used_s = time.monotonic()
            self._scheduler.on_loaded(name, size, host.last_used_s)
            host.watcher = asyncio.create_task(self._watch(host))
        self._decide()

    async def _start_stack(self, host: _Host) -> None:
        """Start the processes and make the context. Raises ForewordError, with the stack perhaps open."""

        def on_progress(stage: str, done: int, total: int) -> None:
            now = time.monotonic()
            if total and now - host.logged_s >= PROGRESS_INTERVAL_S:
                host.logged_s = now
                logger.info("loading: %s %.0f%%", stage, 100 * done / total)

        host.logged_s = time.monotonic()
        prepared = await run_in_own_thread(prepare_checkpoint, host.config)
        stack = ServerStack(prepared, on_progress, self._fork_server, owns_fork_server=False)
        host.stack = stack
        info = await stack.start()
        if host.recorder is None:
            host.recorder = stack.make_recorder()
            host.recorder.add_engine_processes(lambda: {} if host.stack is None else host.stack.engine.pids)
        host.model.context = stack.make_context(self.models, host.recorder, host.model.variants)
        host.model.max_model_len = info.resolved.max_model_len

    async def _watch(self, host: _Host) -> None:
        """Unload the model once its engine is gone for good; a later request loads it again."""
        assert host.stack is not None
        await host.stack.engine.dead.wait()
        host.watcher = None  # this task, which closing the model would cancel
        host.error = "its engine died and could not be restarted; see the server's log"
        self._metrics.on_unload(host.entry.name, "dead")
        self._scheduler.on_load_failed(host.entry.name, time.monotonic())
        self._start_unload(self._close(host))
        self._decide()

    async def _unload(self, host: _Host, reason: str) -> None:
        log_model.set(host.entry.name)
        freed = host.memory_bytes or 0
        await self._close(host)
        logger.info("unloaded (%s), %s are free again", reason, format_bytes(freed))
        host.unload_reason = None
        self._metrics.on_unload(host.entry.name, reason)
        self._scheduler.on_unloaded(host.entry.name)
        self._decide()

    async def _close(self, host: _Host) -> None:
        """End the processes of a model in any state."""
        # Until the first wait, the host is ready for the next load.
        context, host.model.context = host.model.context, None
        stack, host.stack, host.memory_bytes = host.stack, None, None
        watcher, host.watcher = host.watcher, None
        if watcher is not None:
            watcher.cancel()
        if host.recorder is not None:
            host.recorder.on_unload()
        if context is not None:
            host.model.served = {name: context.names.resolve(name) for name in context.names.all}
            host.config = _with_adapters(host.config, context.names.modules)
            await context.close()
        if stack is not None:
            self._closing.add(stack)
            await stack.__aexit__(None, None, None)
            self._closing.discard(stack)

    async def _measure_host(self, host: _Host) -> int:
        stack = host.stack
        return 0 if stack is None else await run_in_own_thread(self._measure, stack.pids)

    async def _measure_regularly(self) -> None:
        while True:
            await asyncio.sleep(MEASURE_INTERVAL_S)
            for name, host in self._hosts.items():
                if host.model.context is None:
                    continue
                size = await self._measure_host(host)
                if host.model.context is not None:  # not unloaded meanwhile
                    host.memory_bytes = size
                    self._scheduler.on_measured(name, size)
            self._decide()


def _with_adapters(config: Config, modules: Sequence[LoraModule]) -> Config:
    """The options of the next load: adapters that clients have loaded or unloaded stay so."""
    if {(module.name, module.path) for module in modules} == {(m.name, m.path) for m in config.adapters}:
        return config
    text = ",".join(json.dumps({"name": module.name, "path": module.path}) for module in modules)
    slots = max(config.num_lora_slots, len(modules))
    return replace(config, lora_modules=text or None, enable_lora=True, max_loras=slots)


def _make_model(entry: ModelEntry) -> ManagedModel:
    """A model before its first load: its names follow from its options."""
    config, name = entry.config, entry.name
    names = (name, *(other for other in config.served_names() if other != name))
    served = {each: ServedModel(name, names, name) for each in names}
    for variant in entry.variants:
        served[variant.name] = ServedModel(variant.name, (variant.name, *names), name, name)
    if config.embedding_model is not None:
        encoder = Path(config.embedding_model).name
        served[encoder] = ServedModel(encoder, (encoder,), encoder, is_encoder=True)
    for module in config.adapters:
        served[module.name] = ServedModel(module.name, (module.name,), module.path, name)
    return ManagedModel(name, served, {variant.name: variant for variant in entry.variants}, config)
