"""A server of several models with fake engines, and requests whose messages arrive one by one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.types import Message

from foreword.config.lora import AdapterInfo
from foreword.config.models_file import ModelEntry, ModelsConfig, ModelVariant
from foreword.config.options import Config
from foreword.core.readiness import Readiness
from foreword.embedding.sentence_transformers import DECODER_POOLING
from foreword.engine_client.forkserver import ForkServer
from foreword.fleet import model_manager
from foreword.fleet.memory import FleetPlan, ModelPlan
from foreword.fleet.model_manager import ModelManager
from foreword.metrics.definitions import INFO_LABELS
from foreword.metrics.recorder import MetricsRecorder
from foreword.planning.memory_plan import MemoryPart
from foreword.planning.resolve import EngineInfo
from foreword.server.app import make_context, models_app
from foreword.server.http.request_log import RequestLog
from foreword.server.lifecycle import DrainState, Health
from foreword.server.loaded_model import LoadedModel
from foreword.server.registry import ServedModels
from tests.support.fakes import FakeEngineClient, FakeOutput, byte_tokenizer, engine_info
from tests.support.waiting import WAIT_S, wait_until_async

CHAT = "/v1/chat/completions"
MODEL_BYTES = 100  # of each model; two fit
DEFAULTS, HELLO = Config(), FakeOutput()
LIMITS = {"cpu": 2 * MODEL_BYTES}


class FakeEngine(FakeEngineClient):
    """A FakeEngineClient as a ProcessClient."""

    pids: Mapping[str, int] = MappingProxyType({})

    def __init__(self, script: FakeOutput) -> None:
        super().__init__(script)
        self.dead = asyncio.Event()

    @property
    def readiness(self) -> Readiness:
        return Readiness("loading", progress=0.42) if self.info is None else super().readiness

    def skip_drain(self) -> None:
        pass

    def die(self) -> None:
        """The engine is gone for good."""
        self.kill()
        self.dead.set()


class FakeStack:
    """A ServerStack without processes, whose start() waits for its model's gate."""

    encoder = None

    def __init__(self, fleet: FakeFleet, config: Config) -> None:
        self.name = config.served_names()[0]
        self.config = config
        self.engine = FakeEngine(fleet.script)
        self.is_closed = False
        self._fleet = fleet
        fleet.stacks.append(self)

    pids = (1,)

    async def start(self) -> EngineInfo:
        await self._fleet.gates[self.name].wait()
        if (error := self._fleet.load_errors.pop(self.name, None)) is not None:
            raise error
        info = await self.engine.start()
        adapters = tuple(AdapterInfo(m.path, f"digest of {m.path}", 8, 4, 1000) for m in self.config.adapters)
        self.engine.info = replace(info, adapters=adapters)
        return self.engine.info

    def make_recorder(self) -> MetricsRecorder:
        return MetricsRecorder(("suffix",), info={**dict.fromkeys(INFO_LABELS, ""), "model": self.name})

    def make_context(
        self, models: ServedModels, recorder: MetricsRecorder, variants: Sequence[str]
    ) -> LoadedModel:
        engine, tokenizer, aliases = self.engine, byte_tokenizer(), self.config.served_names()[1:]
        return make_context(
            *(models, self.config, engine, tokenizer, recorder, self.name, None, DECODER_POOLING, None),
            *(aliases, None, variants),
        )

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()
        self.is_closed = True


@dataclass
class FakeFleet:
    """The server, and what its next loads do."""

    script: FakeOutput
    gates: dict[str, asyncio.Event]  # by model: a load waits until it is set
    load_errors: dict[str, Exception] = field(default_factory=dict)  # by model: of its next load
    stacks: list[FakeStack] = field(default_factory=list)  # of all loads, in order
    manager: ModelManager = field(init=False)
    app: FastAPI = field(init=False)

    @property
    def loads(self) -> list[str]:
        """The names of the models that were loaded, in order."""
        return [stack.name for stack in self.stacks]

    @property
    def loaded(self) -> set[str]:
        return {context.model_name for context in self.manager.models.loaded}

    def engine(self, model: str) -> FakeEngine:
        """Of the newest load."""
        return next(stack.engine for stack in reversed(self.stacks) if stack.name == model)

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
    monkeypatch: pytest.MonkeyPatch,
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
    monkeypatch.setattr(model_manager, "prepare_checkpoint", lambda config: config)
    monkeypatch.setattr(model_manager, "ServerStack", lambda config, *_, **__: FakeStack(fakes, config))
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
    fakes.manager = ModelManager(config, plan, ForkServer(), lambda pids: MODEL_BYTES)
    drain = DrainState()
    fakes.app = models_app(
        fakes.manager.models, Health(fakes.manager, None, drain), drain, RequestLog(config.access_log)
    )
    async with fakes.manager, fakes.app.router.lifespan_context(fakes.app):
        yield fakes
    assert all(stack.is_closed for stack in fakes.stacks), "an engine was left open"


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
