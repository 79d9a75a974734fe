"""/admin routes: permissions, content, and aborts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from foreword.config.options import Config
from foreword.server.auth.key_file import dump_keys
from tests.server.auth.test_keys import CHAT, key_of, keyed, write
from tests.server.conftest import MODEL, RunningServer, run_server
from tests.support.fakes import FakeEngineClient, FakeOutput
from tests.support.waiting import wait_until

HELD = FakeOutput("secret answer", hang_after=2)
PROMPT = [{"role": "user", "content": "secret question"}]
ROUTES = (
    ("GET", "/admin/requests"),
    ("POST", "/admin/requests/x/abort"),
    ("GET", "/admin/keys"),
    ("POST", "/admin/keys/reload"),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    write(
        path, key_of("alice", tokens_per_minute=500, models=(MODEL,), expires=4e9), key_of("root", admin=True)
    )
    return path


@pytest.fixture
def server(path: Path) -> Iterator[RunningServer]:
    with run_server(Config(api_key_file=str(path)), FakeEngineClient(HELD), key="alice") as server:
        yield server


def admin(server: RunningServer, method: str, route: str) -> httpx.Response:
    return server.http.request(method, route, headers=keyed("root"))


def test_only_admin_keys_are_allowed(server: RunningServer) -> None:
    for method, route in ROUTES:
        assert server.http.request(method, route).status_code == 401
        refused = server.http.request(method, route, headers=keyed("alice"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        assert admin(server, method, route).status_code == (404 if "abort" in route else 200)


def test_routes_need_an_admin_key_in_the_file(tmp_path: Path) -> None:
    write(tmp_path / "keys", key_of("alice"))
    for config in (Config(), Config(api_key="alice"), Config(api_key_file=str(tmp_path / "keys"))):
        with run_server(config) as server:
            for method, route in ROUTES:
                assert server.http.request(method, route, headers=keyed("alice")).status_code == 404


@pytest.mark.parametrize(
    ("config", "status"),
    [
        (Config(), 200),
        (Config(host="::1"), 200),
        (Config(host="localhost"), 200),
        (Config(host="0.0.0.0"), 404),
        (Config(host="::"), 404),
        (Config(host="server.example"), 404),
        (Config(host="0.0.0.0", uds="/run/foreword.sock"), 200),
        (Config(api_key="alice"), 404),
    ],
)
def test_reload_needs_an_admin_key_or_the_loopback(config: Config, status: int) -> None:
    with run_server(config) as server:
        reply = server.http.post("/admin/reload", headers=keyed("alice") if config.api_key else {})
        assert reply.status_code == status


def test_routes_are_not_in_the_public_docs(server: RunningServer) -> None:
    assert "/admin" not in server.http.get("/openapi.json").text


def test_open_requests(server: RunningServer) -> None:
    body = {"messages": PROMPT, "stream": True, "n": 2, "max_tokens": 9, "seed": 5}
    with server.http.stream("POST", CHAT, json=body, headers=keyed("alice")) as stream:
        lines = stream.iter_lines()
        next(lines)
        wait_until(
            lambda: all(
                one["generated_tokens"] == 2
                for one in admin(server, "GET", "/admin/requests").json()["requests"]
            )
        )
        shown = admin(server, "GET", "/admin/requests")
        assert "secret" not in shown.text
        told = shown.json()
        prompt_tokens = told["requests"][0]["prompt_tokens"]
        assert (told["open"], told["open_prompt_tokens"]) == (2, 2 * prompt_tokens) and prompt_tokens > 10
        assert len({one.pop("id") for one in told["requests"]}) == 2
        assert all(one.pop("age_s") >= 0 for one in told["requests"])
        assert told["requests"] == 2 * [
            {
                "account": "alice",
                "state": "running",
                "priority": 0,
                "prompt_tokens": prompt_tokens,
                "generated_tokens": 2,
                "max_tokens": 9,
                "drafters": [],
            }
        ]
    server.wait_until_idle()
    assert admin(server, "GET", "/admin/requests").json() == {
        "open": 0,
        "open_prompt_tokens": 0,
        "requests": [],
    }


def test_abort_an_answer(server: RunningServer) -> None:
    """All choices at once, by the id of the response; the client gets an error."""
    with server.openai.chat.completions.create(model=MODEL, messages=PROMPT, stream=True, n=2) as stream:  # type: ignore[call-overload]
        answer = next(iter(stream)).id
        ended = admin(server, "POST", f"/admin/requests/{answer}/abort")
        assert ended.json() == {"aborted": [f"{answer}-0", f"{answer}-1"]}
        with pytest.raises(openai.APIError, match="an operator of this server ended the request") as caught:
            list(stream)
        assert caught.value.code == "aborted"
    server.wait_until_idle()
    assert sorted(server.client.aborted) == [f"{answer}-0", f"{answer}-1"]
    assert admin(server, "POST", f"/admin/requests/{answer}/abort").status_code == 404


def test_abort_one_choice(server: RunningServer) -> None:
    server.set_output(
        lambda request: HELD if request.id.endswith("-0") else FakeOutput("ok then", delay_s=0.02)
    )
    body = {"messages": PROMPT, "stream": True, "n": 2}
    with server.http.stream("POST", CHAT, json=body, headers=keyed("alice")) as stream:
        lines = stream.iter_lines()
        answer = json.loads(next(lines).removeprefix("data: "))["id"]
        assert admin(server, "POST", f"/admin/requests/{answer}-0/abort").json() == {
            "aborted": [f"{answer}-0"]
        }
        rest = "\n".join(lines)
    assert (
        '"finish_reason":"stop"' in rest
        and '"code":"aborted"' in rest
        and rest.rstrip().endswith("data: [DONE]")
    )
    server.wait_until_idle()


def test_aborted_answer_is_not_retried(server: RunningServer) -> None:
    """Clients retry a 5xx by themselves, so an operator's abort is a 403."""

    def end() -> None:
        wait_until(lambda: len(server.client.submitted) == 1)
        assert (
            admin(server, "POST", f"/admin/requests/{server.client.submitted[0].id}/abort").status_code == 200
        )

    operator = threading.Thread(target=end)
    operator.start()
    with pytest.raises(openai.PermissionDeniedError) as caught:
        server.openai.with_options(max_retries=2).completions.create(model=MODEL, prompt="Hi")
    operator.join()
    assert caught.value.code == "aborted" and len(server.client.submitted) == 1


def test_keys(server: RunningServer, path: Path) -> None:
    server.set_output(FakeOutput("ok"))
    server.complete("Hi")
    shown = admin(server, "GET", "/admin/keys")
    alice, root = shown.json()["keys"]
    usage = alice.pop("usage")
    assert (usage["requests"], usage["open"], usage["refused"], usage["generated_tokens"]) == (1, 0, 0, 3)
    assert alice == {
        "name": "alice",
        "admin": False,
        "models": [MODEL],
        "expires": "2096-10-02T07:06:40+00:00",
        "requests_per_minute": None,
        "tokens_per_minute": 500,
        "tokens_per_day": None,
        "max_concurrency": None,
        "priority": 0,
    }
    assert root["admin"] and root["usage"]["requests"] == 0, "operators' requests are not charged"
    assert key_of("alice").digest.hex() not in shown.text and key_of("alice").salt.hex() not in shown.text
    assert "hash" not in shown.text


def test_reload(server: RunningServer, path: Path) -> None:
    path.write_text(dump_keys([key_of("bob"), key_of("root", admin=True)]))
    assert admin(server, "POST", "/admin/keys/reload").json() == {"keys": 2}
    assert server.http.get("/v1/models", headers=keyed("alice")).status_code == 401
    assert server.http.get("/v1/models", headers=keyed("bob")).status_code == 200
    path.write_text("keys: [{name: root}]")
    broken = admin(server, "POST", "/admin/keys/reload")
    assert (
        broken.status_code == 400 and "entry 1 (root): hash is missing" in broken.json()["error"]["message"]
    )
    assert server.http.get("/v1/models", headers=keyed("bob")).status_code == 200
