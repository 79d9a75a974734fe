"""Drain: open requests finish, new ones are refused, and the rest get an error."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from foreword.server.drain import DrainState
from tests.support.apps import open_app
from tests.support.fakes import FakeEngineClient, FakeOutput
from tests.support.waiting import WAIT_S, wait_until_async

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
HANGS = FakeOutput("Hello", hang_after=2)


class DrainingServer:
    """An application and its drain; requests run in the same loop."""

    def __init__(self, client: FakeEngineClient, drain: DrainState, app: FastAPI) -> None:
        self.client = client
        self.drain = drain
        self.admission = app.state.models.admission
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", timeout=WAIT_S)

    async def ask(self, **fields: Any) -> httpx.Response:
        return await self.http.post(CHAT, json={**BODY, **fields})


async def draining_server(resources: AsyncExitStack, script: FakeOutput) -> DrainingServer:
    client, drain = FakeEngineClient(script), DrainState()
    return DrainingServer(client, drain, await resources.enter_async_context(open_app(client, drain=drain)))


@pytest.mark.parametrize("stream", [False, True])
async def test_open_requests_finish_and_new_ones_are_refused(resources: AsyncExitStack, stream: bool) -> None:
    server = await draining_server(resources, FakeOutput("Hello", delay_s=0.02))
    open_ = asyncio.create_task(server.ask(stream=stream))
    await wait_until_async(lambda: server.client.live)
    server.drain.draining = True
    refused = await server.ask()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert int(refused.headers["Retry-After"]) >= 1 and refused.headers["Connection"] == "close"
    assert (await server.http.get("/health")).json()["status"] == "draining"
    assert (await server.http.get("/metrics")).status_code == 200
    assert server.drain.num_open == 1
    await server.drain.wait_empty()
    answer = await open_
    assert answer.status_code == 200 and ("[DONE]" if stream else "Hello") in answer.text
    assert "error" not in answer.text


async def test_requests_are_taken_until_the_drain_begins(resources: AsyncExitStack) -> None:
    server = await draining_server(resources, FakeOutput("Hello"))
    server.drain.stopping = True
    assert (await server.http.get("/ready")).json()["status"] == "draining"
    assert (await server.http.get("/health")).status_code == (await server.ask()).status_code == 200
    server.drain.draining = True
    assert (await server.http.get("/ready")).status_code == (await server.ask()).status_code == 503


@pytest.mark.parametrize(("stream", "status"), [(False, 503), (True, 200)])
async def test_unfinished_answers_get_an_error(resources: AsyncExitStack, stream: bool, status: int) -> None:
    server = await draining_server(resources, HANGS)
    open_ = [asyncio.create_task(server.ask(stream=stream, n=2)) for _ in range(3)]
    await wait_until_async(lambda: server.client.stats.step == 6 * HANGS.hang_after)
    server.drain.draining = True
    server.drain.cancel_open()
    await server.drain.wait_empty()
    for answer in await asyncio.gather(*open_):
        assert answer.status_code == status and '"code":"shutting_down"' in answer.text
        assert answer.text.endswith("data: [DONE]\n\n") == stream
    assert not server.client.live and server.admission.num_open == 0 and len(server.client.aborted) == 6


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        ("/v1/responses", {"input": "Hi"}, "response.failed"),
        ("/v1/messages", {"messages": BODY["messages"], "max_tokens": 9}, "error"),
    ],
)
async def test_error_of_a_cut_stream_has_the_form_of_its_api(
    resources: AsyncExitStack, path: str, body: dict[str, Any], last: str
) -> None:
    server = await draining_server(resources, HANGS)
    open_ = asyncio.create_task(server.http.post(path, json={**body, "stream": True}))
    await wait_until_async(lambda: server.client.stats.step == HANGS.hang_after)
    server.drain.draining = True
    server.drain.cancel_open()
    events = (await open_).text.removesuffix("\n\n").split("\n\n")
    assert events[-1].startswith(f"event: {last}\n") and "shutting down" in events[-1]
    assert not any("[DONE]" in event for event in events)


async def test_other_requests_get_an_error(resources: AsyncExitStack) -> None:
    server = await draining_server(resources, HANGS)
    open_ = asyncio.create_task(server.http.post("/v1/embeddings", json={"input": "text"}))
    await wait_until_async(lambda: server.client.live)
    server.drain.draining = True
    server.drain.cancel_open()
    assert (await open_).status_code == 503 and not server.client.live


async def test_application_timeout_is_not_a_drain(resources: AsyncExitStack) -> None:
    server = await draining_server(resources, FakeOutput("x"))

    def late(_: Any) -> Any:
        raise TimeoutError

    server.client.submit = late  # type: ignore[method-assign]
    assert (await server.ask()).status_code == 500
    assert server.drain.num_open == 0
