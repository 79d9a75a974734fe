"""Two keys of a real server: a flood of one does not starve the other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from foreword.cli.main import main
from foreword.config.options import Config
from tests.server.conftest import RunningServer, run_engine
from tests.support.waiting import WAIT_S, wait_until

FLOOD, SINGLES = 40, 3


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.yaml"


def new_key(path: Path, capsys: pytest.CaptureFixture[str], name: str, *flags: str) -> str:
    assert main(["keys", "new", name, "--file", str(path), *flags]) == 0
    return capsys.readouterr().out.strip()


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[RunningServer]:
    path.write_text("keys: []")
    config = Config(
        api_key_file=str(path), threads=1, max_num_seqs=1, kv_cache_memory="4000tokens", speculate="off"
    )
    with run_engine(config) as server:
        yield server


def reload(server: RunningServer, key: str) -> None:
    """Wait until the server has loaded the key."""
    headers = {"x-api-key": key}
    wait_until(lambda: httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200)


def num_open(server: RunningServer, key: str) -> int:
    return httpx.get(f"{server.url}/admin/requests", headers={"x-api-key": key}).json()["open"]


def test_flood_of_one_key_does_not_starve_another(
    server: RunningServer, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    greedy, modest = (new_key(path, capsys, name) for name in ("greedy", "modest"))
    root = new_key(path, capsys, "root", "--admin")
    reload(server, root)
    ended: list[str] = []

    def ask(key: str, name: str) -> None:
        body = {"prompt": name, "max_tokens": 64, "ignore_eos": True}
        assert client.post("/v1/completions", json=body, headers={"x-api-key": key}).status_code == 200
        ended.append(name)

    with httpx.Client(
        base_url=server.url, timeout=WAIT_S, limits=httpx.Limits(max_connections=None)
    ) as client:
        flood, singles = (
            [threading.Thread(target=ask, args=who) for _ in range(count)]
            for who, count in (((greedy, "greedy"), FLOOD), ((modest, "modest"), SINGLES))
        )
        for thread in flood:
            thread.start()
        wait_until(lambda: num_open(server, root) >= FLOOD // 2)
        before = ended.count("greedy")
        for thread in singles:
            thread.start()
        for thread in singles:
            thread.join()
        meanwhile = ended.count("greedy") - before
        for thread in flood:
            thread.join()
    assert (ended.count("greedy"), ended.count("modest")) == (FLOOD, SINGLES)
    assert meanwhile < FLOOD // 2, f"first come, first served would finish the flood first: {ended}"


def test_server_log_has_no_key(
    server: RunningServer,
    path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    key = new_key(path, capsys, "quiet")
    reload(server, key)
    for wrong in (key, key[:-1]):
        httpx.post(
            f"{server.url}/v1/completions?key={key}",
            headers={"x-api-key": wrong},
            json={"prompt": "a", "max_tokens": 1},
        )
    assert "key file read: " in caplog.text
    assert key[:-1] not in caplog.text.replace(f"?key={key}", "") and "sha256" not in caplog.text


def test_timeout_of_a_request_is_enforced(
    server: RunningServer, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = new_key(path, capsys, "hasty")
    reload(server, key)
    body = {
        "prompt": "a",
        "max_tokens": 3000,
        "ignore_eos": True,
        "timeout": 0.05,
        "speculation": {"method": "off"},
    }
    with httpx.Client(base_url=server.url, headers={"x-api-key": key}, timeout=WAIT_S) as client:
        reply = client.post("/v1/completions", json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (408, "deadline_exceeded")
        assert "deadline_exceeded" in client.post("/v1/completions", json={**body, "stream": True}).text
