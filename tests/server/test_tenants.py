"""What one key may learn of another's: the rows of docs/security.md that no other test holds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foreword.config.options import Config
from foreword.server.app import ROUTERS
from tests.server.auth.test_keys import CHAT, key_of, keyed, write
from tests.server.conftest import RunningServer, run_engine, run_server
from tests.support.checkpoints import write_checkpoint
from tests.support.fakes import FakeEngineClient, FakeOutput
from tests.support.waiting import wait_until

SECRET = "what nobody else may read"
PROMPT = f"{SECRET}, at some length, so that it fills several blocks of the cache"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = write_checkpoint(tmp_path_factory.mktemp("tenants") / "tiny")
    return Config(
        model=str(path), api_key="alice,bob", block_size=16, kv_cache_memory="4000tokens", log_level="warning"
    )


def num_cached(server: RunningServer, key: str, **fields: Any) -> int:
    """Tokens of PROMPT that the prefix cache has for this key, which then has all of them."""
    body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, **fields}
    reply = server.http.post("/v1/completions", json=body, headers=keyed(key))
    cached: int = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def test_prefix_cache_shows_nothing_of_another_key(tiny: Config) -> None:
    """A salt of the client divides its key's namespace: the same one opens no other key's."""
    with run_engine(tiny) as server:
        for fields in ({}, {"cache_salt": "tenant-7"}):
            assert num_cached(server, "alice", **fields) == 0
            whole = num_cached(server, "alice", **fields)
            assert whole > 0
            assert num_cached(server, "bob", **fields) == 0
            assert num_cached(server, "bob", **fields) == whole


def test_shared_prefix_cache_is_shared(tiny: Config) -> None:
    """The opposite, so that the test above can fail."""
    with run_engine(replace(tiny, share_prefix_cache=True)) as server:
        assert num_cached(server, "alice") == 0
        assert num_cached(server, "bob") > 0


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[RunningServer]:
    """Alice's answers stay open after two tokens."""
    limits = {"requests_per_minute": 10, "tokens_per_minute": 10_000}
    write(
        tmp_path / "keys.yaml", key_of("alice", **limits), key_of("bob", **limits), key_of("root", admin=True)
    )
    config = Config(api_key_file=str(tmp_path / "keys.yaml"), usage_db=str(tmp_path / "usage.db"))

    def output(request: Any) -> FakeOutput:
        is_alice = request.fairness_key == "alice"
        return FakeOutput("of alice" if is_alice else "of bob", hang_after=2 if is_alice else None)

    with run_server(config, FakeEngineClient(output)) as server:
        yield server


def alice_asks(server: RunningServer) -> Any:
    """An open stream of alice with an id that bob may choose too."""
    headers = {**keyed("alice"), "X-Request-Id": "trace-1"}
    body = {"messages": [{"role": "user", "content": SECRET}], "stream": True}
    return server.http.stream("POST", CHAT, json=body, headers=headers)


def test_no_route_names_another_key_or_its_request(keys: RunningServer) -> None:
    with alice_asks(keys) as stream:
        lines = stream.iter_lines()
        response_id = re.search(r'"id":"(chatcmpl-\w+)"', next(lines))
        assert response_id is not None
        paths = [
            route.path.replace("{name}", response_id[1]).replace("{name:path}", response_id[1])
            for router in ROUTERS
            for route in router.routes
            if "GET" in getattr(route, "methods", ())
        ]
        assert {"/health", "/metrics", "/v1/models", "/admin/requests", "/admin/usage"} <= set(paths)
        for path in (*paths, f"/v1/responses/{response_id[1]}", "/nowhere"):
            for headers in (keyed("bob"), keyed("wrong"), {}):
                reply = keys.http.get(path, headers=headers)
                texts = ["alice", SECRET, "trace-1", *([] if response_id[1] in path else [response_id[1]])]
                assert not any(text in reply.text for text in texts), path
        assert "alice" in keys.http.get("/admin/requests", headers=keyed("root")).text
        keys.http.post(f"/admin/requests/{response_id[1]}/abort", headers=keyed("root"))
    keys.wait_until_idle()


def test_ids_of_clients_may_collide(keys: RunningServer) -> None:
    """Requests are known by ids of the server's own: an equal X-Request-Id is of no effect."""
    with alice_asks(keys) as stream:
        lines = stream.iter_lines()
        next(lines)
        for body in ({}, {"request_id": "trace-1"}):
            reply = keys.http.post(
                CHAT,
                json={"messages": [{"role": "user", "content": "Hi"}], **body},
                headers={**keyed("bob"), "X-Request-Id": "trace-1"},
            )
            assert reply.json()["choices"][0]["message"]["content"] == "of bob"
            assert reply.headers["X-Request-Id"] == "trace-1"
        (live,) = keys.client.live
        keys.http.post(f"/admin/requests/{live.rpartition('-')[0]}/abort", headers=keyed("root"))
        assert "aborted" in "".join(lines)
    keys.wait_until_idle()
    ids = [request.id for request in keys.client.submitted]
    assert len(set(ids)) == len(ids) == 3 and not any("trace-1" in name for name in ids)


def test_rate_limits_and_usage_are_the_keys_own(keys: RunningServer) -> None:
    def ask_as_bob() -> dict[str, str]:
        body = {"prompt": "Hi", "max_tokens": 2}
        headers = keys.http.post("/v1/completions", json=body, headers=keyed("bob")).headers
        return {name: value for name, value in headers.items() if name.startswith("x-ratelimit-remaining")}

    assert ask_as_bob()["x-ratelimit-remaining-requests"] == "9"
    with alice_asks(keys) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert ask_as_bob()["x-ratelimit-remaining-requests"] == "8"
        (live,) = keys.client.live
        keys.http.post(f"/admin/requests/{live.rpartition('-')[0]}/abort", headers=keyed("root"))
    wait_until(keys.idle)
    for route in ("/admin/usage", "/admin/keys"):
        assert keys.http.get(route, headers=keyed("bob")).status_code == 403


def test_response_of_another_key_is_refused_like_none(keys: RunningServer) -> None:
    """Its text says neither that it exists nor whose it is."""
    made = keys.http.post("/v1/responses", json={"input": "Hi"}, headers=keyed("bob")).json()
    unknown = "resp_" + "0" * 32
    for path, method in (("{}", "GET"), ("{}/input_items", "GET"), ("{}", "DELETE"), ("{}/cancel", "POST")):
        texts = [
            keys.http.request(
                method, f"/v1/responses/{path.format(name)}", headers=keyed("root")
            ).text.replace(name, "ID")
            for name in (made["id"], unknown)
        ]
        assert texts[0] == texts[1] and "error" in texts[0]
    for name, item_id in ((made["id"], made["output"][0]["id"]), (unknown, "msg_" + "0" * 32)):
        for body in ({"previous_response_id": name}, {"input": [{"type": "item_reference", "id": item_id}]}):
            reply = keys.http.post("/v1/responses", json={"input": "Hi", **body}, headers=keyed("root"))
            assert (reply.status_code, reply.json()["error"]["code"]) == (404, "response_not_found")
