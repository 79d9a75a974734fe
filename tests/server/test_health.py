"""/health: the status code, the body, and the probe of an idle engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema
import pytest
import uvicorn
from fastapi import FastAPI

from foreword.config.options import Config
from foreword.core.params import SamplingParams
from foreword.core.readiness import Readiness
from foreword.errors import EngineDead, Overloaded
from foreword.server.app import loading_app
from foreword.server.health import DrainState, EngineProbe, Health, HealthBody
from foreword.server.http.bounded_connections import uvicorn_config
from foreword.server.http.request_log import RequestLog
from foreword.tokenizer.input_processor import make_requests
from tests.server.conftest import RunningServer, run_server
from tests.support.apps import open_app
from tests.support.fakes import FakeEngineClient, FakeOutput, byte_tokenizer
from tests.support.waiting import WAIT_S, wait_until_async

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
HANGS = FakeOutput("Hello", hang_after=2)


class ScriptedClient(FakeEngineClient):
    """An engine client with a readiness set by the test."""

    state = Readiness("ok")

    @property
    def readiness(self) -> Readiness:
        return self.state


@pytest.fixture(scope="module")
def scripted_server() -> Iterator[RunningServer]:
    with run_server(Config(), ScriptedClient()) as server:
        yield server


def check(reply: httpx.Response, schema: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = reply.json()
    jsonschema.validate(body, schema)
    assert set(body) == {"status", "detail", "progress", "restarts", "encoder", "error"}
    assert (reply.status_code == 200) == (body["status"] == "ok") == (body["error"] is None)
    return body


@pytest.mark.parametrize(
    ("state", "again", "code"),
    [
        (Readiness("ok", restarts=2), False, None),
        (Readiness("loading", "weights", 0.25), True, "model_loading"),
        (Readiness("restarting", "it died", 0.5, 3), True, "model_loading"),
        (Readiness("unresponsive", "no sign of life for 5 s"), True, "engine_unresponsive"),
        (Readiness("dead", "it will not come back", restarts=4), False, "engine_dead"),
    ],
)
@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_each_state_matches_the_published_schema(
    scripted_server: RunningServer, state: Readiness, again: bool, code: str | None, path: str
) -> None:
    api = scripted_server.http.get("/openapi.json").json()
    answers = api["paths"][path]["get"]["responses"]
    schemas = {code: answers[code]["content"]["application/json"]["schema"] for code in ("200", "503")}
    assert schemas["200"] == schemas["503"]
    scripted_server.client.state = state
    reply = scripted_server.http.get(path)
    body = check(reply, {**schemas["200"], "components": api["components"]})
    assert Readiness(*(body[name] for name in ("status", "detail", "progress", "restarts"))) == state
    assert ("Retry-After" in reply.headers) == again
    if not state.is_ready:
        assert body["error"]["code"] == code and body["error"]["message"] == state.detail
    for liveness in ("/live", "/healthz"):
        assert scripted_server.http.get(liveness).status_code == 200
    scripted_server.client.state = Readiness("ok")


def test_head_requests_match_get(scripted_server: RunningServer) -> None:
    for state in (Readiness("dead", "it will not come back"), Readiness("ok")):
        scripted_server.client.state = state
        for path in ("/health", "/ready", "/live", "/healthz"):
            whole, head = scripted_server.http.get(path), scripted_server.http.head(path)
            assert head.status_code == whole.status_code and not head.content
            assert head.headers["Content-Length"] == str(len(whole.content))


def health_of(
    client: FakeEngineClient,
    drain: DrainState | None = None,
    probe: EngineProbe | None = None,
    encoder: Any = None,
) -> Health:
    class Models:
        @property
        def readiness(self) -> Readiness:
            return client.readiness

    models: Any = Models()
    models.probe, models.encoder = probe, encoder
    return Health(drain or DrainState(), models)


async def body_of(health: Health) -> tuple[int, dict[str, Any]]:
    response = await health.response()
    body = HealthBody.model_validate_json(bytes(response.body)).model_dump()
    return response.status_code, body


async def test_draining_server_is_not_healthy() -> None:
    client, drain = FakeEngineClient(), DrainState()
    await client.start()
    health = health_of(client, drain)
    assert (await body_of(health))[0] == 200
    drain.draining = True
    status, body = await body_of(health)
    assert (status, body["status"], body["error"]["code"]) == (503, "draining", "shutting_down")


async def test_server_that_will_stop_is_healthy_but_not_ready() -> None:
    """During --drain-delay requests are still taken, so that /health stays 200 while load balancers leave."""
    client, drain = FakeEngineClient(), DrainState()
    await client.start()
    health = health_of(client, drain)
    drain.stopping = True
    assert (await body_of(health))[0] == 200
    response = await health.response(takes_traffic=True)
    body = HealthBody.model_validate_json(bytes(response.body))
    assert (response.status_code, body.status) == (503, "draining") and "still taken" in body.detail


@pytest.mark.parametrize(("alive", "said"), [(True, "ok"), (False, "down")])
async def test_encoder_state_is_reported(alive: bool, said: str) -> None:
    client, encoder = FakeEngineClient(), SimpleNamespace(alive=alive)
    await client.start()
    status, body = await body_of(health_of(client, encoder=encoder))
    assert (status, body["encoder"]) == (200, said)


# The probe


async def started(
    script: FakeOutput, idle_s: float = 1e-9, limit_s: float = 0.05
) -> tuple[FakeEngineClient, EngineProbe]:
    client = FakeEngineClient(script)
    await client.start()
    tokenizer, params = byte_tokenizer(), SamplingParams(max_tokens=1, seed=0)
    return client, EngineProbe(
        client, lambda name: make_requests([97], params, tokenizer, name, 2048)[0], idle_s, limit_s
    )


async def test_idle_engine_is_probed() -> None:
    client, probe = await started(FakeOutput("x"))
    assert await probe.is_responsive() and await probe.is_responsive()
    assert [request.id for request in client.submitted] == ["health-probe-0-0", "health-probe-1-0"]
    assert not client.live


@pytest.mark.parametrize("idle_s", [0, 3600])
async def test_recently_active_engine_is_not_probed(idle_s: float) -> None:
    client, probe = await started(FakeOutput("x"), idle_s)
    assert await probe.is_responsive() and not client.submitted


async def test_silent_engine_is_unresponsive_until_it_answers() -> None:
    client, probe = await started(FakeOutput("x", delay_s=0.3))
    assert not await probe.is_responsive()
    assert not await probe.is_responsive() and len(client.submitted) == 1  # the first probe is still pending
    health = health_of(client, probe=probe)
    assert (await health.readiness()).status == "unresponsive"
    client.script = FakeOutput("x")
    async with asyncio.timeout(WAIT_S):
        while not await probe.is_responsive():
            await asyncio.sleep(0.01)
    probe.on_step()
    assert (await health.readiness()).is_ready


@pytest.mark.parametrize(("error", "answers"), [(EngineDead("gone"), False), (Overloaded("full"), True)])
async def test_probe_accepts_a_refusal_but_no_failure(error: Any, answers: bool) -> None:
    _, probe = await started(FakeOutput(fail_after=0, error=error))
    assert await probe.is_responsive() == answers


def test_probe_is_a_one_token_request() -> None:
    with run_server(Config(health_probe=0.001)) as server:
        assert server.http.get("/health").status_code == 200
        (probe_request,) = server.client.submitted
        assert (
            probe_request.params.max_tokens,
            probe_request.params.speculation.method,
            len(probe_request.prompt_ids),
        ) == (
            1,
            "off",
            1,
        )
        assert (
            'requests_finished_total{model="fake-model",reason="stop"} 0.0'
            in server.http.get("/metrics").text
        )


# While loading


async def test_loading_server_answers_503() -> None:
    client = ScriptedClient()
    client.state = Readiness("loading", "weights", 0.5)
    app = loading_app(health_of(client), Config(), RequestLog())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
        reply = await http.get("/health")
        assert (reply.status_code, reply.json()["progress"]) == (503, 0.5)
        assert (await http.get("/live")).status_code == (await http.head("/live")).status_code == 200
        assert (await http.get("/healthz")).status_code == 200
        assert (await http.get("/ready")).json()["error"]["code"] == "model_loading"
        assert (await http.head("/health")).status_code == 503
        for method, path in (
            ("POST", CHAT),
            ("GET", "/v1/models"),
            ("GET", "/metrics"),
            ("DELETE", "/nothing"),
        ):
            reply = await http.request(method, path)
            assert (
                reply.status_code == 503
                and reply.headers["Retry-After"] == "1"
                and "X-Request-Id" in reply.headers
            )
            assert reply.json()["error"]["code"] == "model_loading"


def test_loading_app_has_the_connection_limits() -> None:
    app = loading_app(Health(DrainState()), Config(), RequestLog())
    assert isinstance(uvicorn_config(app, Config()), uvicorn.Config)


# Errors before and after the first token


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [{"prompt": "Hi", "n": 3}, {"prompt": ["Hi", "Ho", "Ha"]}])
def test_queue_timeout_refuses_the_whole_request(
    served: RunningServer, body: dict[str, Any], stream: bool
) -> None:
    """A queue timeout of the first choice fails the others, which still wait."""
    refused = FakeOutput(fail_after=0, error=Overloaded("it waited too long", retry_after_s=1.1))
    served.set_output(
        lambda request: refused if request is served.client.submitted[0] else FakeOutput(delay_s=1000)
    )
    before = served.metrics()["foreword_requests_rejected_total", "queue_timeout"]
    reply = served.http.post("/v1/completions", json={**body, "stream": stream})
    assert (reply.status_code, reply.headers["Retry-After"]) == (429, "2")
    assert len(served.client.aborted) == 2
    assert served.metrics()["foreword_requests_rejected_total", "queue_timeout"] == before + 1


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
