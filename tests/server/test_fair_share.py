"""Two keys of a real server: a flood of one does not starve the other."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx
import pytest

from foreword.cli.main import main
from foreword.config.options import Config
from tests.server.conftest import RunningServer, run_engine
from tests.support.waiting import WAIT_S, wait_until

FLOOD, SINGLES = 40, 3


def num_open(server: RunningServer, key: str) -> int:
    return httpx.get(f"{server.url}/admin/requests", headers={"x-api-key": key}).json()["open"]


def test_flood_of_one_key_does_not_starve_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.yaml"
    for flags in (["greedy"], ["modest"], ["root", "--admin"]):
        assert main(["keys", "new", *flags, "--file", str(path)]) == 0
    greedy, modest, root = capsys.readouterr().out.split()
    config = Config(
        api_key_file=str(path), threads=1, max_num_seqs=1, kv_cache_memory="4000tokens", speculate="off"
    )
    with run_engine(config) as server:
        flood_and_ask(server, greedy, modest, root)


def flood_and_ask(server: RunningServer, greedy: str, modest: str, root: str) -> None:
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
