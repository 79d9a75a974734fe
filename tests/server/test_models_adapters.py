"""LoRA adapters as models: names, routes, permissions."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foreword.config.lora import AdapterInfo
from foreword.config.models_file import ModelEntry
from foreword.config.options import Config
from foreword.errors import ConfigError
from foreword.server.model_names import ModelNames
from tests.server.auth.test_keys import key_of, keyed, write
from tests.server.conftest import MODEL, RunningServer, run_server
from tests.support.fakes import FakeEngineClient, FakeOutput, engine_info

CHAT, COMPLETIONS, MESSAGES, RESPONSES = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "messages", "responses")
)
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
USER = [{"role": "user", "content": "hi"}]


def client_of(config: Config, output: FakeOutput | None = None) -> FakeEngineClient:
    """An engine that has loaded the adapters of the config."""
    adapters = tuple(
        AdapterInfo(module.path, f"digest of {module.path}", 8, 4, 1000) for module in config.adapters
    )
    return FakeEngineClient(output or FakeOutput("ok"), replace(engine_info(), adapters=adapters))


@pytest.fixture
def updating(tmp_path: Path) -> Iterator[tuple[RunningServer, FakeEngineClient, Path]]:
    """A server with one adapter, whose clients may load others from a directory."""
    folder = tmp_path / "adapters"
    for name in ("one", "two", "broken"):
        (folder / name).mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (folder / "link").symlink_to(tmp_path / "secret")
    config = Config(
        lora_modules="tuned=/models/tuned", allow_runtime_lora_updating=True, lora_dir=str(folder)
    )
    client = client_of(config)
    with run_server(config, client) as server:
        yield server, client, folder


def post(server: RunningServer, path: str, **body: Any) -> tuple[int, Any]:
    reply = server.http.post(path, json=body)
    return reply.status_code, reply.json()


def names(server: RunningServer) -> list[str]:
    return [card["id"] for card in server.http.get("/v1/models").json()["data"]]


def test_adapter_is_a_model_with_a_parent() -> None:
    config = Config(lora_modules='tuned=/a/b,{"name": "other", "path": "/c", "base_model_name": "alias"}')
    client = client_of(config)
    with run_server(config, client, aliases=("alias",)) as server:
        cards = {card["id"]: card for card in server.http.get("/v1/models").json()["data"]}
        assert {name: (card["root"], card["parent"]) for name, card in cards.items()} == {
            MODEL: (MODEL, None),
            "alias": (MODEL, None),
            "tuned": ("/a/b", MODEL),
            "other": ("/c", MODEL),
        }
        assert server.http.get("/v1/models/tuned").json() == cards["tuned"]
        assert cards["tuned"]["max_model_len"] == cards[MODEL]["max_model_len"]
        status, body = post(server, CHAT, messages=USER, model="missing")
        assert status == 404 and "'tuned' and 'other'" in body["error"]["message"]


def test_requests_of_every_api_name_their_adapter() -> None:
    config = Config(lora_modules="tuned=/a,other=/b")
    client = client_of(config)
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": USER},
        COMPLETIONS: {"prompt": "a"},
        MESSAGES: {"messages": USER, "max_tokens": 5},
        RESPONSES: {"input": "a"},
        "/v1/embeddings": {"input": "a"},
    }
    with run_server(config, client) as server:
        for path, body in bodies.items():
            prints = set()
            for name, digest in (
                (None, ""),
                (MODEL, ""),
                ("tuned", "digest of /a"),
                ("other", "digest of /b"),
            ):
                status, answer = post(server, path, **body, **({} if name is None else {"model": name}))
                assert status == 200, answer
                assert answer["model"] == (name or MODEL)
                assert client.submitted[-1].adapter == digest
                prints.add(answer.get("system_fingerprint"))
            assert len(prints) == (3 if path in (CHAT, COMPLETIONS) else 1)


def test_stream_names_the_adapter() -> None:
    config = Config(lora_modules="tuned=/a")
    with run_server(config, client_of(config)) as server:
        body = {"messages": USER, "model": "tuned", "stream": True}
        lines = server.http.post(CHAT, json=body).text.split("\n\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if "{" in line]
        assert {chunk["model"] for chunk in chunks} == {"tuned"}


def test_any_model_name_still_finds_adapters() -> None:
    config = Config(lora_modules="tuned=/a", any_model_name=True)
    client = client_of(config)
    with run_server(config, client) as server:
        for name, model in (("tuned", "tuned"), ("gpt-9", MODEL)):
            assert post(server, CHAT, messages=USER, model=name)[1]["model"] == model
        assert [request.adapter for request in client.submitted] == ["digest of /a", ""]


def test_key_needs_the_adapters_name(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    write(keys, key_of("a", models=(MODEL,)), key_of("b"))
    config = Config(lora_modules="tuned=/a", api_key_file=str(keys))
    with run_server(config, client_of(config)) as server:
        for key, status in (("a", 403), ("b", 200)):
            body = {"messages": USER, "model": "tuned"}
            assert server.http.post(CHAT, json=body, headers=keyed(key)).status_code == status
            listed = server.http.get("/v1/models", headers=keyed(key)).json()["data"]
            assert ("tuned" in [card["id"] for card in listed]) == (key == "b")


def test_adapters_are_loaded_and_unloaded(updating: tuple[RunningServer, FakeEngineClient, Path]) -> None:
    server, client, folder = updating
    status, card = post(server, LOAD, lora_name="new", lora_path="one")
    assert (status, card["id"], card["parent"], card["root"]) == (200, "new", MODEL, str(folder / "one"))
    assert post(server, LOAD, lora_name="absolute", lora_path=str(folder / "two"))[0] == 200
    assert names(server) == [MODEL, "tuned", "new", "absolute"]
    assert post(server, CHAT, messages=USER, model="new")[1]["model"] == "new"
    assert client.submitted[-1].adapter == f"digest of {folder / 'one'}"
    assert post(server, UNLOAD, lora_name="new", lora_int_id=3)[0] == 200
    assert list(client.adapters) == [str(folder / "two")]
    assert post(server, CHAT, messages=USER, model="new")[0] == 404
    assert post(server, UNLOAD, lora_name="new")[0] == 404
    assert post(server, UNLOAD, lora_name="tuned")[0] == 200, "one of the start can be unloaded too"
    assert names(server) == [MODEL, "absolute"]


def test_load_in_place_replaces_an_adapter(updating: tuple[RunningServer, FakeEngineClient, Path]) -> None:
    server, client, folder = updating
    assert post(server, LOAD, lora_name="new", lora_path="one")[0] == 200
    status, body = post(server, LOAD, lora_name="new", lora_path="two")
    assert status == 400 and "load_inplace" in body["error"]["message"]
    assert post(server, LOAD, lora_name="new", lora_path="two", load_inplace=True)[0] == 200
    assert list(client.adapters) == [str(folder / "two")], "the one before is unloaded"
    assert names(server) == [MODEL, "tuned", "new"]


def test_adapter_of_two_names_stays_until_both_are_gone(
    updating: tuple[RunningServer, FakeEngineClient, Path],
) -> None:
    server, client, _ = updating
    for name in ("first", "second"):
        assert post(server, LOAD, lora_name=name, lora_path="one")[0] == 200
    assert post(server, UNLOAD, lora_name="first")[0] == 200
    assert len(client.adapters) == 1 and post(server, CHAT, messages=USER, model="second")[0] == 200
    assert post(server, UNLOAD, lora_name="second")[0] == 200
    assert client.adapters == {}


def test_bad_loads_are_refused(updating: tuple[RunningServer, FakeEngineClient, Path]) -> None:
    server, client, _ = updating
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"lora_name": MODEL, "lora_path": "one"}, "already"),
        ({"lora_name": "tuned", "lora_path": "one"}, "already"),
        ({"lora_name": MODEL, "lora_path": "one", "load_inplace": True}, "already"),
        ({"lora_name": " ", "lora_path": "one"}, "lora_name"),
        ({"lora_name": "a\nb", "lora_path": "one"}, "printable"),
        ({"lora_name": "x" * 201, "lora_path": "one"}, "200"),
        ({"lora_name": "x", "lora_path": "missing"}, "no adapter"),
        ({"lora_name": "x", "lora_path": "../secret"}, "not in --lora-dir"),
        ({"lora_name": "x", "lora_path": "one/../../secret"}, "not in --lora-dir"),
        ({"lora_name": "x", "lora_path": "link"}, "not in --lora-dir"),
        ({"lora_name": "x", "lora_path": "/etc"}, "not in --lora-dir"),
        ({"lora_name": "x", "lora_path": "."}, "not in --lora-dir"),
        ({"lora_name": "x", "lora_path": "a\0b"}, "no adapter"),
        ({"lora_name": "x", "lora_path": "broken"}, "rank 99"),
        ({"lora_name": "x"}, "lora_path"),
    )
    for body, text in cases:
        status, answer = post(server, LOAD, **body)
        assert status == 400 and text in answer["error"]["message"], body
    assert names(server) == [MODEL, "tuned"] and client.adapters == {}


def test_open_requests_of_another_name_are_not_waited_for(
    updating: tuple[RunningServer, FakeEngineClient, Path],
) -> None:
    """The adapter stays for the other name; so it does if it replaces itself."""
    server, client, _ = updating
    for name in ("first", "second"):
        assert post(server, LOAD, lora_name=name, lora_path="one")[0] == 200
    release = threading.Event()

    async def never_unused(digest: str) -> None:
        await asyncio.to_thread(release.wait)

    client.wait_unused = never_unused  # type: ignore[method-assign]
    try:
        assert post(server, UNLOAD, lora_name="first")[0] == 200
        assert post(server, LOAD, lora_name="second", lora_path="one", load_inplace=True)[0] == 200
    finally:
        release.set()
    assert len(client.adapters) == 1 and names(server) == [MODEL, "tuned", "second"]


def test_unload_waits_for_open_requests(updating: tuple[RunningServer, FakeEngineClient, Path]) -> None:
    server, client, folder = updating
    assert post(server, LOAD, lora_name="new", lora_path="one")[0] == 200
    client.script = FakeOutput("a long answer", delay_s=0.05)
    answers: list[tuple[int, Any]] = []
    running = threading.Thread(
        target=lambda: answers.append(post(server, CHAT, messages=USER, model="new", max_tokens=8))
    )
    running.start()
    while not client.live:
        pass
    unloading = threading.Thread(target=lambda: post(server, UNLOAD, lora_name="new"))
    unloading.start()
    while "new" in names(server):
        pass
    assert client.live and str(folder / "one") in client.adapters, "the open request keeps it"
    assert post(server, CHAT, messages=USER, model="new")[0] == 404, "new requests do not find it"
    for thread in (running, unloading):
        thread.join()
    assert answers[0][0] == 200 and client.adapters == {}


def test_routes_need_the_flag() -> None:
    config = Config(lora_modules="tuned=/a")
    with run_server(config, client_of(config)) as server:
        for path, body in ((LOAD, {"lora_path": "one"}), (UNLOAD, {})):
            status, answer = post(server, path, lora_name="tuned", **body)
            assert status == 403 and "--allow-runtime-lora-updating" in answer["error"]["message"]


def test_routes_need_an_admin_key_if_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "adapters" / "one").mkdir(parents=True)
    keys = tmp_path / "keys.json"
    write(keys, key_of("a", admin=True), key_of("b"))
    config = Config(
        allow_runtime_lora_updating=True, lora_dir=str(tmp_path / "adapters"), api_key_file=str(keys)
    )
    with run_server(config, client_of(config)) as server:
        for key, status in (("b", 403), ("a", 200)):
            body = {"lora_name": "x", "lora_path": "one"}
            assert server.http.post(LOAD, json=body, headers=keyed(key)).status_code == status


async def test_names_collide_at_the_start() -> None:
    def names_of(names: str, modules: str) -> ModelNames:
        return ModelNames(ModelEntry("model", Config(served_model_name=names, lora_modules=modules)))

    names_of("model,alias", "tuned=/a")
    with pytest.raises(ConfigError, match="both called 'tuned'"):
        names_of("model,tuned", "tuned=/a")
    with pytest.raises(ConfigError, match="base_model_name of 'x' is 'y'; the model is called 'model'"):
        names_of("model,alias", '{"name": "x", "path": "/a", "base_model_name": "y"}')
