"""The routes by which a fleet adds servers to a router and drains them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from foreword.config.options import Config
from foreword.engine_client.make_client import make_engine_client
from tests.server.conftest import RunningServer, run_server
from tests.support.fakes import FakeEngineClient, FakeOutput, engine_info
from tests.support.waiting import wait_until

KEY = "a key of the engines"
BEARER = {"Authorization": f"Bearer {KEY}"}
ROUTE = "/engine/replicas"


@pytest.fixture
def nodes() -> Iterator[list[RunningServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(run_server(Config(engine_key=KEY))) for _ in range(2)]


@pytest.fixture
def router(nodes: list[RunningServer]) -> Iterator[RunningServer]:
    """A router that uses the first server."""
    config = Config(engine_key=KEY, replicas=0, replica_urls=nodes[0].url)
    client: Any = make_engine_client(config, (), lambda: None)  # type: ignore[arg-type, return-value]
    with run_server(config, client) as server:
        yield server


def states(router: RunningServer) -> dict[str, str]:
    (model,) = router.http.get(ROUTE, headers=BEARER).json()["models"]
    return {f"http://{each['address']}": each["status"] for each in model["replicas"]}


def add(router: RunningServer, url: str, **fields: Any) -> int:
    return router.http.post(ROUTE, headers=BEARER, json={"url": url, **fields}).status_code


def test_added_server_answers(router: RunningServer, nodes: list[RunningServer]) -> None:
    assert states(router) == {nodes[0].url: "ok"}
    assert add(router, nodes[1].url) == 204
    assert add(router, nodes[1].url) == 204  # again does nothing
    wait_until(lambda: states(router) == {nodes[0].url: "ok", nodes[1].url: "ok"})
    for _ in range(4):
        assert router.complete().choices[0].text == "Hello world"
    assert all(node.client.submitted for node in nodes)


def test_drained_server_hands_its_streams_over(router: RunningServer, nodes: list[RunningServer]) -> None:
    nodes[0].set_output(FakeOutput("Hello world", hang_after=5))
    answer = iter(router.complete(stream=True))
    text = "".join(next(answer).choices[0].text for _ in range(5))
    add(router, nodes[1].url)
    wait_until(lambda: states(router)[nodes[1].url] == "ok")
    assert router.http.delete(f"{ROUTE}/{nodes[0].url[7:]}", headers=BEARER).status_code == 204
    assert text + "".join(event.choices[0].text for event in answer) == "Hello world"
    assert states(router) == {nodes[1].url: "ok"}
    wait_until(lambda: not nodes[0].client.live)


def test_router_without_servers_takes_new_ones(router: RunningServer, nodes: list[RunningServer]) -> None:
    router.http.delete(f"{ROUTE}/{nodes[0].url[7:]}", headers=BEARER)
    assert states(router) == {}
    assert router.http.get("/health").json()["detail"] == "there is no replica"
    add(router, nodes[1].url)
    assert router.complete().choices[0].text == "Hello world"  # it waits for the server


def test_waiting_request_is_told(router: RunningServer, nodes: list[RunningServer]) -> None:
    nodes[0].set_output(FakeOutput(hang_after=0))

    def wait_s() -> float:
        (model,) = router.http.get(ROUTE, headers=BEARER).json()["models"]
        return float(model["longest_wait_s"])

    assert wait_s() == 0.0
    body = {"model": "fake-model", "prompt": "Hi"}
    router.disconnect("/v1/completions", body, lambda: wait_s() > 0.05)


def test_server_with_another_fingerprint_gets_no_requests(router: RunningServer) -> None:
    other = FakeEngineClient(info=replace(engine_info(), fingerprint="fp_other"))
    with run_server(Config(engine_key=KEY), other) as node:
        add(router, node.url)
        wait_until(lambda: states(router)[node.url] == "different")
        (model,) = router.http.get(ROUTE, headers=BEARER).json()["models"]
        assert "fingerprint fp_other differs from fp_fake" in model["replicas"][1]["detail"]


def test_server_that_comes_back_with_a_shorter_context_gets_no_requests(
    router: RunningServer, nodes: list[RunningServer]
) -> None:
    add(router, nodes[1].url)
    wait_until(lambda: states(router)[nodes[1].url] == "ok")
    shorter = replace(engine_info().resolved, max_model_len=32)
    nodes[1].client.info = replace(engine_info(), resolved=shorter)
    for session in list(nodes[1].app.state.engine_sessions._sessions.values()):
        session._heard_s -= 3600  # it ends
    wait_until(lambda: states(router)[nodes[1].url] == "different")
    (model,) = router.http.get(ROUTE, headers=BEARER).json()["models"]
    assert "its context of 32 tokens is shorter" in model["replicas"][1]["detail"]


def test_reload_names_the_servers_that_it_cannot_reach(
    router: RunningServer, nodes: list[RunningServer]
) -> None:
    add(router, "http://127.0.0.1:9")
    add(router, nodes[1].url)
    wait_until(lambda: states(router)[nodes[1].url] == "ok")
    lines = router.http.post("/admin/reload").text.splitlines()
    ready = [line for line in lines if "ready after" in line]
    assert len(ready) == 2 and len(lines) == 7
    assert "replica 127.0.0.1:9 is not reloaded: no connection" in lines[-1] and '"error"' in lines[-1]


def test_routes_are_those_of_a_router(router: RunningServer, nodes: list[RunningServer]) -> None:
    for url in ("", "10.0.0.1:80", "ftp://a", "http://a,http://b"):
        assert add(router, url) == 400
    assert add(router, "http://a", model="other") == 404
    assert router.http.get(ROUTE).status_code == 401
    assert router.http.post("/engine/sessions", headers=BEARER).status_code == 404
    assert nodes[0].http.get(ROUTE, headers=BEARER).status_code == 404
    assert "/engine" not in router.http.get("/openapi.json").text
