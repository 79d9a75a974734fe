"""The routes of engine sessions: who may use them, what they refuse, and when a session ends."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from foreword.config.options import Config
from foreword.errors import ConfigError
from foreword.server.routes import engine
from tests.server.conftest import RunningServer, run_server
from tests.support.fakes import FakeOutput
from tests.support.waiting import wait_until

KEY = "a key of the engine"
BEARER = {"Authorization": f"Bearer {KEY}"}
SESSIONS = "/engine/sessions"
IMAGE = {
    "digest": "",
    "num_tokens": 1,
    "grid_thw": [1, 1, 1],
    "original_size": [1, 1],
    "shape": [1, 3, 1, 1],
    "pixels": None,
}


@pytest.fixture(scope="module")
def node() -> Iterator[RunningServer]:
    config = Config(engine_key=KEY, api_key="key of clients", image_memory="2MiB")
    with run_server(config, key="key of clients") as server:
        yield server


@contextmanager
def session(server: RunningServer) -> Iterator[tuple[str, Iterator[str]]]:
    """Id and lines of an open session."""
    with server.http.stream("POST", SESSIONS, headers=BEARER) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        yield json.loads(next(lines))[1], lines


def send(server: RunningServer, session_id: str, *messages: Any) -> httpx.Response:
    body = json.dumps(list(messages))  # httpx refuses an infinity
    return server.http.post(f"{SESSIONS}/{session_id}/messages", headers=BEARER, content=body)


def submission(request_id: str, **changes: Any) -> dict[str, Any]:
    return {"request": {"id": request_id, "prompt_ids": [1], "params": {}, "seed": 1} | changes}


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer key of clients"}, {"Authorization": f"Bearer {KEY}x"}, {"x-api-key": "x"}],
)
def test_only_the_engine_key_opens_a_session(node: RunningServer, headers: dict[str, str]) -> None:
    for path in (SESSIONS, f"{SESSIONS}/x/messages"):
        response = node.http.post(path, headers=headers)
        assert response.status_code == 401, response.text
        assert "the engine key is not right" in response.text


def test_engine_key_opens_nothing_else(node: RunningServer) -> None:
    assert node.http.get("/v1/models", headers=BEARER).status_code == 401
    assert node.http.get("/v1/models", headers={"Authorization": "Bearer key of clients"}).status_code == 200


def test_without_an_engine_key_there_are_no_routes(shared: RunningServer) -> None:
    response = shared.http.post(SESSIONS, headers=BEARER)
    assert response.status_code == 404
    assert "there is no route" in response.json()["error"]["message"]


def test_routes_are_not_in_the_docs(node: RunningServer) -> None:
    assert "/engine" not in node.http.get("/openapi.json").text


@pytest.mark.parametrize("key", ["", "   ", "fifteen letters"])
def test_short_engine_key_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="at least 16 characters"):
        Config(engine_key=key)


@pytest.mark.parametrize(
    ("message", "text", "param"),
    [
        ({"requst": {}}, "[0].requst", "[0].requst"),
        ({}, "[0] must have one of request, add_image, ", "[0]"),
        (submission("other-1"), "[0].request.id must begin with", "[0].request.id"),
        (submission("x", prompt_ids=["a"]), "must be an integer, got 'a'", "[0].request.prompt_ids[0]"),
        (submission("x", params={"top_p": 2}), "top_p must be above 0 and at most 1", "top_p"),
        (submission("x", params={"seed": 1.5}), "must be an integer", "[0].request.params.seed"),
        (submission("x", prompt_ids=[1, -1]), "prompt: token id -1 is outside", "prompt"),
        (submission("x", prompt_ids=[2**70]), "prompt: token id 1180591620717411303424 is", "prompt"),
        (submission("x", eos_token_ids=[2**31]), "stop_token_ids: token id 2147483648", "stop_token_ids"),
        (submission("x", seed=-1), "seed must be between 0 and ", "seed"),
        (submission("x", seed=2**64), "seed must be between 0 and ", "seed"),
        (submission("x", arrival_s=float("inf")), "times must be finite", "[0].request"),
        (submission("x", images=[IMAGE | {"start": -(2**70)}]), "exceeds the prompt (1 tokens)", "messages"),
        (submission("x", images=[IMAGE | {"num_tokens": 2**31}]), "exceeds the prompt", "messages"),
        (submission("x", images=[IMAGE | {"grid_thw": [1, -1, -1]}]), "between 1 and 16777216", "messages"),
        (submission("x", images=[IMAGE | {"shape": [1, 3, 2**31, 1]}]), "between 1 and", "messages"),
        (submission("x", images=[IMAGE | {"original_size": [0, 1]}]), "between 1 and", "messages"),
        (
            submission("x", images=[IMAGE]),
            "must come without pixels, after an add_image",
            "[0].request.images[0]",
        ),
        (
            {"add_image": {"digest": "", "pixels": base64.b64encode(bytes(3 << 20)).decode()}},
            "the images of a session may have 2097152 bytes (--image-memory)",
            "[0].add_image",
        ),
        (
            {"remove": {"request_id": "x", "num_tokens": -1}},
            "must be at least 0, got -1",
            "[0].remove.num_tokens",
        ),
    ],
)
def test_invalid_message_names_the_field(node: RunningServer, message: Any, text: str, param: str) -> None:
    with session(node) as (session_id, _):
        response = send(node, session_id, message)
    assert response.status_code == 400
    assert text in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("body", [b"", b"[{", b"\xff", b"[" * 100_000])
def test_body_that_is_no_json_is_refused(node: RunningServer, body: bytes) -> None:
    with session(node) as (session_id, _):
        path = f"{SESSIONS}/{session_id}/messages"
        response = node.http.post(path, headers=BEARER, content=body)
    assert response.status_code == 400
    assert "the body is not valid JSON" in response.json()["error"]["message"]


def test_refused_list_takes_no_effect(node: RunningServer) -> None:
    node.client.submitted.clear()
    with session(node) as (session_id, _):
        good = submission(f"{session_id}-1")
        assert send(node, session_id, good, good | {"remove": {"request_id": "x"}}).status_code == 400
        assert send(node, session_id, good, submission("other")).status_code == 400
    assert node.client.submitted == []


def test_open_calls_are_bounded(node: RunningServer) -> None:
    """Each is a task, of a few bytes of a message."""
    calls = [{"reload": {"call": number}} for number in range(engine.MAX_CALLS + 1)]
    with session(node) as (session_id, _):
        response = send(node, session_id, *calls)
    assert response.status_code == 400 and "64 open calls" in response.text


def test_one_id_twice_is_refused(node: RunningServer) -> None:
    node.set_output(FakeOutput(hang_after=1))
    with session(node) as (session_id, _):
        good = submission(f"{session_id}-1")
        assert send(node, session_id, good).status_code == 204
        assert "be new" in send(node, session_id, good).text
        other = submission(f"{session_id}-2")
        assert "[1].request.id must" in send(node, session_id, other, other).text
    wait_until(lambda: not node.client.live)


def test_hung_up_router_ends_its_requests(node: RunningServer) -> None:
    node.set_output(FakeOutput(hang_after=1))
    with session(node) as (session_id, _):
        assert send(node, session_id, submission(f"{session_id}-1")).status_code == 204
        assert len(node.client.live) == 1
    wait_until(lambda: not node.client.live)
    assert send(node, session_id).status_code == 404


def test_silent_router_ends_its_session(node: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    node.set_output(FakeOutput(hang_after=1))
    with session(node) as (session_id, lines):
        assert send(node, session_id, submission(f"{session_id}-1")).status_code == 204
        monkeypatch.setattr(engine, "LEASE_S", 0.2)
        for _ in lines:  # until the server ends it
            pass
        wait_until(lambda: not node.client.live)


def test_draining_server_says_so_and_ends_idle_sessions() -> None:
    with run_server(Config(engine_key=KEY)) as node, session(node) as (_, lines):
        drain = node.app.state.engine_sessions._drain
        drain.stopping = True
        statuses = (json.loads(line)[4] for line in lines)
        assert any(heartbeat and heartbeat[0]["status"] == "draining" for heartbeat in statuses)
        drain.draining = True
        assert list(lines)[-1:] != [""]  # it ends
        assert node.http.post(SESSIONS, headers=BEARER).status_code == 503


def test_draining_server_lets_open_requests_finish() -> None:
    """Its router may still send messages; a new request is refused, together with the status."""
    with run_server(Config(engine_key=KEY)) as node, session(node) as (session_id, lines):
        node.set_output(FakeOutput(hang_after=1))
        assert send(node, session_id, submission(f"{session_id}-1")).status_code == 204
        drain = node.app.state.engine_sessions._drain
        drain.stopping = drain.draining = True
        assert send(node, session_id, submission(f"{session_id}-2")).status_code == 204
        reports = map(json.loads, lines)
        events, *_, status = next(report for report in reports if "ShuttingDown" in str(report[0]))
        assert events[-1]["request_id"] == f"{session_id}-2" and status[0]["status"] == "draining"
        assert node.client.live == {f"{session_id}-1"}
        removal = {"remove": {"request_id": f"{session_id}-1"}}
        assert send(node, session_id, removal).status_code == 204
        assert not node.client.live
        for _ in lines:  # until the server ends it
            pass


def test_session_of_a_dead_engine_is_refused(node: RunningServer) -> None:
    with run_server(Config(engine_key=KEY)) as other:
        other.client.kill()
        response = other.http.post(SESSIONS, headers=BEARER)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_dead"
