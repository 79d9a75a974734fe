"""The server's own work goes on while every thread of requests hangs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from foreword.config.options import Config
from foreword.server import app as app_module
from foreword.server.apis.responses.store import ResponseStore, StoredResponse
from foreword.server.auth.usage_db import read_usage
from tests.server.auth.test_keys import key_of, keyed, write
from tests.support.apps import open_app
from tests.support.fakes import FakeEngineClient, FakeOutput
from tests.support.waiting import FakeClock, wait_until_async


@asynccontextmanager
async def hung_threads() -> AsyncIterator[None]:
    """A full default executor, whose threads are in a C function that does not return before the end."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(2))
    reader, writer = os.pipe()
    calls = [loop.run_in_executor(None, os.read, reader, 1) for _ in range(4)]
    try:
        yield
    finally:
        os.write(writer, b"x" * len(calls))
        await asyncio.gather(*calls)
        os.close(reader)
        os.close(writer)


async def test_housekeeping_goes_on_while_all_threads_of_requests_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "TICK_S", 0.01)
    keys, usage = tmp_path / "keys.yaml", tmp_path / "usage.db"
    write(keys, key_of("alice"), key_of("mallory"), key_of("root", admin=True))
    config = Config(api_key_file=str(keys), usage_db=str(usage))
    async with (
        hung_threads(),
        open_app(FakeEngineClient(FakeOutput("ok")), config) as app,
        app.router.lifespan_context(app),
    ):
        models, clock = app.state.models, FakeClock()
        models.response_store = ResponseStore(1 << 20, 60.0, clock)
        models.response_store.begin("alice", "resp_1", StoredResponse(None, b"[]", ()))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:

            async def complete(key: str) -> int:
                reply = await http.post("/v1/completions", json={"prompt": "a"}, headers=keyed(key))
                return reply.status_code

            assert [await complete(key) for key in ("alice", "mallory")] == [200, 200]
            write(keys, key_of("alice"), key_of("root", admin=True))
            await wait_until_async(lambda: len(models.keyring.meters) == 2)
            assert [await complete(key) for key in ("alice", "mallory")] == [200, 401]
            assert sum(total.requests for _, total in read_usage(usage)) == 3
            assert len(models.response_store) == 1
            clock.now += 61
            await wait_until_async(lambda: len(models.response_store) == 0)
            assert (await http.get("/admin/usage", headers=keyed("root"))).status_code == 200
            assert (await http.post("/admin/keys/reload", headers=keyed("root"))).status_code == 200


async def test_housekeeping_goes_on_where_one_step_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app_module, "TICK_S", 0.01)
    keys = tmp_path / "keys.yaml"
    write(keys, key_of("alice"), key_of("mallory"))
    config = Config(api_key_file=str(keys))
    async with open_app(FakeEngineClient(), config) as app, app.router.lifespan_context(app):
        models = app.state.models
        num_calls = 0

        def expire() -> None:
            nonlocal num_calls
            num_calls += 1
            raise KeyError("a fault of the store")

        monkeypatch.setattr(models.response_store, "expire", expire)
        await wait_until_async(lambda: num_calls > 1)
        write(keys, key_of("alice"))
        await wait_until_async(lambda: len(models.keyring.meters) == 1)
    assert "housekeeping: the expiry of responses failed" in caplog.messages
