"""A server is ready once all that it serves is loaded."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from foreword.checkpoint import prepare_checkpoint
from foreword.config.options import Config
from foreword.embedding.encoder_messages import EncoderInfo
from foreword.fleet.server_stack import ServerStack
from foreword.server.http.request_log import RequestLog
from foreword.server.lifecycle import DrainState
from tests.support.checkpoints import write_checkpoint
from tests.support.embedding_checkpoints import write_encoder
from tests.support.fakes import FakeEngineClient
from tests.support.waiting import wait_until_async


@pytest.mark.full
async def test_server_is_not_ready_before_its_encoder(tmp_path: Path) -> None:
    tiny = write_checkpoint(tmp_path / "tiny")
    write_encoder(tmp_path / "bert")
    config = Config(model=str(tiny), embedding_model=str(tmp_path / "bert"))
    stack = ServerStack(prepare_checkpoint(config))
    engine = FakeEngineClient()
    stack.engine = engine  # type: ignore[assignment]  # it is ready at once
    assert stack.encoder is not None
    may_load, load = asyncio.Event(), stack.encoder.start

    async def load_late() -> EncoderInfo:
        await may_load.wait()
        return await load()

    stack.encoder.start = load_late  # type: ignore[method-assign]
    app = stack.loading_app(DrainState(), RequestLog())
    async with stack, httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://s") as http:
        starting = asyncio.create_task(stack.start())
        await wait_until_async(lambda: engine.readiness.is_ready)
        refused = await http.post("/v1/completions", json={"prompt": "Hi"})
        for path in ("/ready", "/health"):
            reply = await http.get(path)
            assert reply.status_code == refused.status_code == 503
            assert reply.json()["detail"] == "the encoder is still loading"
            assert reply.json()["error"]["code"] == "model_loading"
        may_load.set()
        await starting
        serving = stack.serving_app(RequestLog())
        transport = httpx.ASGITransport(serving)
        async with httpx.AsyncClient(transport=transport, base_url="http://s") as ready:
            assert (await ready.get("/ready")).status_code == 200
            body = {"prompt": "Hi", "max_tokens": 2}
            assert (await ready.post("/v1/completions", json=body)).status_code == 200
            assert (await ready.post("/v1/embeddings", json={"input": "Hi"})).status_code == 200
