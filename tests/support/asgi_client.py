"""The real application with a real engine, all within the test's process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from foreword.checkpoint import CheckpointInfo, prepare_checkpoint
from foreword.config.options import Config
from foreword.core.outputs import Event, StepStats, TokenEvent
from foreword.core.readiness import Readiness, ReplicaState
from foreword.core.request import Request
from foreword.engine_client.local import LocalClient
from foreword.planning.resolve import EngineInfo
from tests.support.apps import open_app
from tests.support.waiting import WAIT_S


class InProcessEngineClient:
    """Implements EngineClient with an engine that steps in the event loop."""

    def __init__(self, prepared: CheckpointInfo) -> None:
        self.local = LocalClient(
            prepared.config, prepared.never_sampled_ids, prepared.tokenizer.engine_vocabulary
        )
        self.info: EngineInfo | None = None
        self.stats = StepStats()
        self.alive = False
        self.readiness = Readiness("ok")
        self.on_step: Callable[[StepStats], None] | None = None
        self.on_restart: Callable[[str | None], None] | None = None
        self.dead = asyncio.Event()
        self.pids: Mapping[str, int] = {}
        self._listeners: dict[str, Callable[[Event | None], None]] = {}
        self._stepping: asyncio.Task[None] | None = None

    async def start(self) -> EngineInfo:
        self.info, self.alive = self.local.info, True
        return self.info

    def submit(self, request: Request) -> AsyncIterator[Event]:
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        self.listen(request, queue.put_nowait)
        return self._events(queue)

    def listen(self, request: Request, on_event: Callable[[Event | None], None]) -> None:
        self._listeners[request.id] = on_event
        self.local.submit(request)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())

    def set_threads(self, num_threads: int) -> None:
        self.local.engine.set_threads(num_threads)

    def finish(self, request_id: str, num_tokens: int) -> None:
        self.local.finish(request_id, num_tokens)
        self._forget(request_id)

    def abort(self, request_id: str) -> None:
        self.local.abort(request_id)
        self._forget(request_id)

    async def close(self) -> None:
        self.alive = False

    def replica_states(self) -> Sequence[ReplicaState]:
        return ()

    def _forget(self, request_id: str) -> None:
        if (on_event := self._listeners.pop(request_id, None)) is not None:
            on_event(None)

    async def _events(self, queue: asyncio.Queue[Event | None]) -> AsyncIterator[Event]:
        while (event := await queue.get()) is not None:
            yield event

    async def _step(self) -> None:
        while not self.local.idle:
            report = self.local.step()
            self.stats = report.stats
            if self.on_step is not None:
                self.on_step(report.stats)
            for event in report.events:
                if event.request_id in self._listeners:
                    self._listeners[event.request_id](event)
                if not isinstance(event, TokenEvent) or event.finish_reason is not None:
                    self._forget(event.request_id)
            await asyncio.sleep(0)


@dataclass
class ASGIServer:
    """An application and its client."""

    app: Any
    client: InProcessEngineClient
    http: httpx.AsyncClient

    async def metric(self, name: str) -> float:
        """The sum of a metric over all labels."""
        text = (await self.http.get("/metrics")).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return sum(sample.value for sample in samples if sample.name == f"foreword_{name}")


@asynccontextmanager
async def serving(config: Config) -> AsyncIterator[ASGIServer]:
    """The application of `foreword serve` with this model."""
    prepared = prepare_checkpoint(config)
    client = InProcessEngineClient(prepared)
    async with (
        open_app(client, prepared.config, tokenizer=prepared.tokenizer, processor=prepared.processor) as app,
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://m", timeout=WAIT_S) as http,
    ):
        yield ASGIServer(app, client, http)
    client.local.check()
