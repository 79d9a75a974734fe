"""A server is ready once all that it serves is loaded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from foreword.checkpoint import prepare_checkpoint
from foreword.config.options import Config
from foreword.embedding.client import EncoderClient
from foreword.embedding.encoder_messages import EncoderInfo
from foreword.engine_client.forkserver import ForkServer
from foreword.fleet.memory import plan_server
from foreword.fleet.model_manager import ModelManager
from foreword.fleet.model_processes import ModelProcesses
from foreword.server.app import create_app, loading_app
from foreword.server.health import DrainState, Health
from foreword.server.http.request_log import RequestLog
from tests.support.checkpoints import write_checkpoint
from tests.support.embedding_checkpoints import write_encoder
from tests.support.fakes import FakeEngineClient
from tests.support.waiting import wait_until_async


@pytest.mark.full
async def test_server_is_not_ready_before_its_encoder(tmp_path: Path) -> None:
    tiny = write_checkpoint(tmp_path / "tiny")
    write_encoder(tmp_path / "bert")
    config = Config(model=str(tiny), embedding_model=str(tmp_path / "bert"))
    engine, encoder = FakeEngineClient(), EncoderClient(config)
    may_load, load = asyncio.Event(), encoder.start

    async def load_late() -> EncoderInfo:
        await may_load.wait()
        return await load()

    encoder.start = load_late  # type: ignore[method-assign]

    async def open_processes(config: Config, *_: Any) -> ModelProcesses:
        return ModelProcesses(prepare_checkpoint(config), engine, encoder)

    fork_server, drain = ForkServer(), DrainState()
    plan = await plan_server(config, fork_server)
    async with ModelManager(config, plan, fork_server, open_processes=open_processes) as manager:
        loading = loading_app(Health(drain, manager, answers_requests=False), config, RequestLog())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(loading), base_url="http://s") as http:
            await wait_until_async(lambda: engine.readiness.is_ready)
            refused = await http.post("/v1/completions", json={"prompt": "Hi"})
            for path in ("/ready", "/health"):
                reply = await http.get(path)
                assert reply.status_code == refused.status_code == 503
                assert reply.json()["detail"] == "the encoder is still loading"
                assert reply.json()["error"]["code"] == "model_loading"
        may_load.set()
        await manager.wait_ready()
        serving = create_app(manager.models, Health(drain, manager), drain, RequestLog())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(serving), base_url="http://s") as http:
            assert (await http.get("/ready")).status_code == 200
            body = {"prompt": "Hi", "max_tokens": 2}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
            assert (await http.post("/v1/embeddings", json={"input": "Hi"})).status_code == 200
