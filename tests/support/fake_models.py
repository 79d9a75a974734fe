"""A server of several models with fake engines, and requests whose messages arrive one by one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.types import Message

from foreword.checkpoint import CheckpointInfo
from foreword.config.lora import AdapterInfo
from foreword.config.models_file import ModelEntry, ModelsConfig, ModelVariant
from foreword.config.options import Config
from foreword.core.readiness import Readiness
from foreword.engine_client.forkserver import ForkServer
from foreword.fleet.memory import FleetPlan, ModelPlan
from foreword.fleet.model_manager import ModelManager
from foreword.fleet.model_processes import ModelProcesses
from foreword.planning.memory_plan import MemoryPart
from foreword.planning.resolve import EngineInfo
from foreword.server.app import create_app
from foreword.server.health import DrainState, Health
from foreword.server.http.request_log import RequestLog
from tests.support.fakes import VOCAB_SIZE, FakeEngineClient, FakeOutput, byte_tokenizer, engine_info
from tests.support.waiting import WAIT_S, wait_until_async

CHAT = "/v1/chat/completions"
MODEL_BYTES = 100  # of each model; two fit
DEFAULTS, HELLO = Config(), FakeOutput()
LIMITS = {"cpu": 2 * MODEL_BYTES}


class FakeEngine(FakeEngineClient):
    """An engine that loads until the gate of its model opens."""

    def __init__(self, fleet: FakeFleet, config: Config) -> None:
        super().__init__(fleet.script)
        self.config = config
        self.name = config.served_names()[0]
        self.is_closed = False
        self._fleet = fleet
        fleet.engines.append(self)

    @property
    def readiness(self) -> Readiness:
        return Readiness("loading", progress=0.42) if self.info is None else super().readiness

    async def start(self) -> EngineInfo:
        await self._fleet.gates[self.name].wait()
        if (error := self._fleet.load_errors.pop(self.name, None)) is not None:
            raise error
        info = await super().start()
        adapters = tuple(AdapterInfo(m.path, f"digest of {m.path}", 8, 4, 1000) for m in self.config.adapters)
        self.info = replace(info, adapters=adapters)
        return self.info

    async def close(self) -> None:
        await super().close()
        self.is_closed = True


@dataclass
class FakeFleet:
    """The server, and what its next loads do."""

    script: FakeOutput
    gates: dict[str, asyncio.Event]  # by model: a load waits until it is set
    load_errors: dict[str, Exception] = field(default_factory=dict)  # by model: of its next load
    engines: list[FakeEngine] = field(default_factory=list)  # of all loads, in order
    manager: ModelManager = field(init=False)
    app: FastAPI = field(init=False)

    @property
    def loads(self) -> list[str]:
        """The names of the models that were loaded, in order."""
        return [engine.name for engine in self.engines]

    @property
    def loaded(self) -> set[str]:
        return {model.model_name for model in self.manager.models.loaded}

    def engine(self, model: str) -> FakeEngine:
        """Of the newest load."""
        return next(engine for engine in reversed(self.engines) if engine.name == model)

    def call(self, path: str = CHAT, key: str = "", **body: Any) -> Call:
        """POST a body, by default of a conversation."""
        if path in (CHAT, "/v1/messages"):
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, **body}
        return Call(self.app, "POST", path, json.dumps(body).encode(), key)

    async def ask(self, path: str = CHAT, key: str = "", **body: Any) -> Call:
        return await self.call(path, key, **body).ended()

    async def get(self, path: str, key: str = "") -> Call:
        return await Call(self.app, "GET", path, b"", key).ended()

    async def unload(self, name: str) -> None:
        assert (await self.ask("/models/unload", model=name)).status == 200
        await wait_until_async(lambda: self.manager.status(name).status == "unloaded")

    async def card(self, name: str) -> dict[str, Any]:
        """A model in /v1/models."""
        return next(card for card in (await self.get("/v1/models")).json()["data"] if card["id"] == name)


@asynccontextmanager
async def fleet(
    *names: str,
    config: Config = DEFAULTS,
    script: FakeOutput = HELLO,
    entries: Mapping[str, Mapping[str, Any]] = {},
    variants: Sequence[ModelVariant] = (),
    options: Mapping[str, Mapping[str, Any]] = {},
    is_open: bool = True,
    max_swap_wait: float = 0.0,
) -> AsyncIterator[FakeFleet]:
    """A server of these models, of which two fit.

    entries   fields of ModelEntry, by model
    variants  of the first model
    options   fields of Config, by model
    is_open   loads end at once; else each waits for its gate
    """
    fakes = FakeFleet(script, {name: asyncio.Event() for name in names})
    for gate in fakes.gates.values() if is_open else ():
        gate.set()

    async def open_processes(config: Config, *_: object) -> ModelProcesses:
        prepared = CheckpointInfo(config, Path("none"), byte_tokenizer(), (), VOCAB_SIZE)
        return ModelProcesses(prepared, FakeEngine(fakes, config))

    chosen = [
        ModelEntry(
            name,
            replace(config, served_model_name=name, model=name, **options.get(name, {})),
            **entries.get(name, {}),
        )
        for name in names
    ]
    chosen[0] = replace(chosen[0], variants=tuple(variants))
    models = ModelsConfig(tuple(chosen), LIMITS["cpu"], None, max_swap_wait)
    parts, resolved = (MemoryPart("all", MODEL_BYTES),), engine_info().resolved
    plans = tuple(ModelPlan(entry, "cpu", parts, resolved) for entry in chosen)
    plan = FleetPlan(models, plans, LIMITS)
    fakes.manager = ModelManager(
        config, plan, ForkServer(), measure=lambda pids: MODEL_BYTES, open_processes=open_processes
    )
    drain = DrainState()
    health = Health(drain, fakes.manager)
    fakes.app = create_app(fakes.manager.models, health, drain, RequestLog(config.access_log))
    async with fakes.manager, fakes.app.router.lifespan_context(fakes.app):
        yield fakes
    assert all(engine.is_closed for engine in fakes.engines), "an engine was left open"


class Call:
    """A request to an ASGI application."""

    def __init__(self, app: FastAPI, method: str, path: str, body: bytes, key: str) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""  # as far as it was sent
        self._app = app
        headers = [(b"content-type", b"application/json"), (b"authorization", f"Bearer {key}".encode())]
        self._scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers[: 2 if key else 1],
            "http_version": "1.1",
            "scheme": "http",
            "server": ("x", 80),
            "client": ("y", 1),
        }
        self._request = [{"type": "http.request", "body": body, "more_body": False}]
        self._left = asyncio.Event()
        self._task = asyncio.create_task(app(self._scope, self._receive, self._send))

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str | None:
        """Of the error envelope."""
        return self.json()["error"]["code"]  # type: ignore[no-any-return]

    def disconnect(self) -> None:
        self._left.set()

    async def ended(self) -> Call:
        async with asyncio.timeout(WAIT_S):
            await self._task
        return self

    async def _receive(self) -> Message:
        if self._request:
            return self._request.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            assert not self.status, "a second response"
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message.get("body", b"")
