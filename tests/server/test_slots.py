"""llama-server's routes of slots, with a real engine and a directory of KV blocks."""

from __future__ import annotations

import random
import shutil
import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from foreword.config.options import Config
from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.kv_cache import pinned_prefixes
from foreword.kv_cache.pinned_prefixes import PinnedPrefixes
from foreword.server import slots
from foreword.server.intake import NUM_WORKERS
from foreword.server.slots import SlotKey, SlotTable, shared_hashes
from tests.server.conftest import RunningServer, run_engine, run_server
from tests.support.checkpoints import write_checkpoint
from tests.support.waiting import wait_until

MODEL = "tiny"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[RunningServer]:
    config = Config(
        model=str(write_checkpoint(folder / MODEL)),
        max_model_len=192,
        max_num_seqs=4,
        threads=1,
        speculate="off",
        api_key="one,two",
        log_level="warning",
        kv_cache_dir=str(folder / "kv"),
    )
    with run_engine(config) as server:
        yield server


def call(server: RunningServer, method: str, path: str, key: str = "one", **fields: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    body = {"json": fields} if fields else {}
    return server.http.request(method, path, headers=headers, **body)


def complete(server: RunningServer, first: int, key: str = "one", **fields: Any) -> dict[str, Any]:
    body = {"prompt": list(range(first, first + 80)), "max_tokens": 4, "temperature": 0, **fields}
    answer: dict[str, Any] = call(server, "POST", "/v1/completions", key, **body).raise_for_status().json()
    return answer


def change(server: RunningServer, slot: int, action: str, key: str = "one", **fields: Any) -> httpx.Response:
    return call(server, "POST", f"/slots/{slot}?action={action}", key, **fields)


def files_of(folder: Path) -> set[Path]:
    return {path for path in folder.glob("kv/*/blocks/*/*") if path.suffix != ".tmp"}


def test_conversation_of_a_slot_is_saved_restored_and_erased(served: RunningServer, folder: Path) -> None:
    complete(served, 10, id_slot=2)
    complete(served, 60, id_slot=1)
    saved = change(served, 2, "save", filename="talk.bin").raise_for_status().json()
    assert saved.pop("timings")["save_ms"] > 0 and saved.pop("n_written") > 5 * 64
    assert saved == {"id_slot": 2, "filename": "talk.bin", "n_saved": 80}
    (pin,) = folder.glob("kv/*/pins/*")
    restored = change(served, 3, "restore", filename="talk.bin").raise_for_status().json()
    assert restored.pop("timings")["restore_ms"] > 0 and restored.pop("n_read") > 5 * 64
    assert restored == {"id_slot": 3, "filename": "talk.bin", "n_restored": 80}
    again = change(served, 3, "save", filename="copy").json()
    assert again["n_saved"] == 80, "a slot has what was restored into it"
    assert change(served, 3, "erase").json() == {"id_slot": 3, "n_erased": 80}
    refused = change(served, 3, "save", filename="copy")
    assert refused.status_code == 400 and "'copy'" in refused.json()["error"]["message"]
    assert change(served, 0, "restore", filename="copy").json()["n_restored"] == 80, "as it was"
    assert change(served, 0, "erase", filename="copy").json()["n_erased"] == 80
    too_long = {"prompt": [9] * 500, "max_tokens": 4, "id_slot": 1}
    assert call(served, "POST", "/v1/completions", **too_long).status_code == 400
    assert change(served, 1, "save", filename="other").json()["n_saved"] == 80, "as it was"
    assert pin.exists(), "a slot is erased, not what is saved"
    before = files_of(folder)
    assert change(served, 2, "erase", filename="talk.bin").json() == {"id_slot": 2, "n_erased": 80}
    assert not pin.exists() and files_of(folder) == before, "slot 0 has the conversation too"
    assert change(served, 0, "erase").json()["n_erased"] == 80
    gone = change(served, 0, "restore", filename="talk.bin")
    assert gone.status_code == 400 and gone.json()["error"]["param"] == "filename"


def test_request_without_a_slot_is_of_slot_0(served: RunningServer) -> None:
    complete(served, 100)
    complete(served, 110, slot_id=1)  # llama-server's older name
    complete(served, 100, max_tokens=20, id_slot=-1)
    assert change(served, 0, "save", filename="zero").json()["n_saved"] == 96
    assert change(served, 1, "save", filename="one").json()["n_saved"] == 80


def test_conversation_without_a_token_of_an_answer_is_saved(served: RunningServer) -> None:
    complete(served, 100, id_slot=2)
    complete(served, 10, id_slot=2, max_tokens=0, prompt=list(range(10, 60)), echo=True)
    assert change(served, 2, "save", filename="prompt").json()["n_saved"] == 48


def test_many_saves_take_few_threads(served: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for blocks that never come."""
    monkeypatch.setattr(pinned_prefixes, "MAX_QUIET_S", 0.5)
    find, threads, counts = PinnedPrefixes.find_written, set[int](), list[int]()

    def find_slowly(pins: PinnedPrefixes, hashes: list[bytes], start: int) -> tuple[int, bool]:
        threads.add(threading.get_ident())
        counts.append(len(threads))
        time.sleep(0.01)
        threads.remove(threading.get_ident())
        return find(pins, hashes, start)[0], False

    monkeypatch.setattr(PinnedPrefixes, "find_written", find_slowly)
    complete(served, 120, id_slot=2)
    with ThreadPoolExecutor(24) as pool:
        saved = list(pool.map(lambda _: change(served, 2, "save", filename="many"), range(24)))
    assert all(answer.is_success for answer in saved)
    assert len(counts) > 48 and max(counts) < NUM_WORKERS, "one is left for other keys"


def test_error_of_the_directory_hides_its_path(served: RunningServer, folder: Path) -> None:
    complete(served, 130, id_slot=2)
    (namespace,) = folder.glob("kv/tiny-*")
    namespace.chmod(0o777)
    answer = change(served, 2, "save", filename="public")
    namespace.chmod(0o700)
    assert answer.status_code == 500 and str(folder) not in answer.text
    assert "directory of KV blocks cannot be used" in answer.json()["error"]["message"]


def test_keys_have_slots_and_names_of_their_own(served: RunningServer) -> None:
    complete(served, 30, id_slot=0)
    assert change(served, 0, "save", filename="mine").json()["n_saved"] == 80
    complete(served, 31, "two", id_slot=0)
    assert change(served, 0, "save", "two", filename="mine").json()["n_saved"] == 80
    assert change(served, 0, "restore", filename="mine").json()["n_restored"] == 80
    assert change(served, 0, "erase", "two", filename="mine").json()["n_erased"] == 80
    assert change(served, 0, "erase", "two").json()["n_erased"] == 80
    assert change(served, 0, "save", "two", filename="mine").status_code == 400
    for action in ("restore", "erase"):
        answer, never = (change(served, 0, action, "two", filename=name) for name in ("mine", "never"))
        assert answer.status_code == never.status_code == 400
        assert answer.text.replace("mine", "never") == never.text, "as if no one had saved it"
    assert change(served, 0, "restore", filename="mine").json()["n_restored"] == 80


def test_slots_are_listed(served: RunningServer) -> None:
    slots = call(served, "GET", "/slots").raise_for_status().json()
    facts = {"n_ctx": 192, "speculative": False, "is_processing": False}
    assert slots == [{"id": number, **facts} for number in range(4)]
    assert served.http.get("/slots").status_code == 401


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/slots/4?action=save", {"filename": "x"}, "id_slot"),
        ("/slots/-1?action=save", {"filename": "x"}, "id_slot"),
        ("/slots/x?action=save", {"filename": "x"}, "id_slot"),
        (f"/slots/{'1' * 5000}?action=erase", {}, "id_slot"),
        ("/v1/completions", {"prompt": [7], "id_slot": 10**400}, "id_slot"),
        ("/v1/completions", {"prompt": [7] * 20, "id_slot": 4}, "id_slot"),
        ("/v1/completions", {"prompt": [7], "seed": 10**400}, "seed"),
        ("/slots/0?action=keep", {"filename": "x"}, "action"),
        ("/slots/0", {"filename": "x"}, "action"),
        ("/slots/0?action=save", {}, "filename"),
        ("/slots/0?action=save", {"filename": "../x"}, "filename"),
        ("/slots/0?action=save", {"filename": 3}, "filename"),
        ("/slots/0?action=restore", {"filename": "a\0b"}, "filename"),
        ("/slots/0?action=erase", {"filename": "/etc/passwd"}, "filename"),
        ("/slots/0?action=erase", {"file": "x"}, "file"),
        ("/slots/0?action=save", {"filename": "x", "model": "none"}, "model"),
    ],
)
def test_wrong_requests_are_refused_by_name(
    served: RunningServer, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = call(served, "POST", path, **fields)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == param, answer.text


def test_without_a_directory_there_are_no_slots() -> None:
    with run_server() as server:
        for answer in (server.http.get("/slots"), server.http.post("/slots/0", params={"action": "erase"})):
            assert answer.status_code == 400 and "--kv-cache-dir" in answer.json()["error"]["message"]
        body = {"model": "fake-model", "prompt": "Hi", "id_slot": 99}
        assert server.http.post("/v1/completions", json=body).status_code == 200, "a hint without effect"


def test_erased_conversation_can_be_saved_again(served: RunningServer, folder: Path) -> None:
    complete(served, 150, id_slot=1)
    assert change(served, 1, "save", filename="again").json()["n_saved"] == 80
    before = files_of(folder)
    assert change(served, 1, "erase", filename="again").json()["n_erased"] == 80
    assert len(before - files_of(folder)) == 5
    wait_until(lambda: change(served, 1, "save", filename="again").is_success)
    assert change(served, 1, "save", filename="again").json()["n_saved"] == 80


def test_directory_may_be_deleted_under_a_running_server(served: RunningServer, folder: Path) -> None:
    answer = complete(served, 170, id_slot=1)
    change(served, 1, "save", filename="kept").raise_for_status()
    shutil.rmtree(folder / "kv")
    gone = change(served, 1, "restore", filename="kept")
    assert gone.status_code == 400 and "nothing is saved as 'kept'" in gone.json()["error"]["message"]
    assert complete(served, 170, id_slot=1)["choices"] == answer["choices"]
    wait_until(lambda: change(served, 1, "save", filename="kept").is_success)
    assert change(served, 1, "restore", filename="kept").json()["n_restored"] > 0


def request_of(prompt: range) -> Request:
    return Request("x", tuple(prompt), SamplingParams(), seed=0)


def test_open_slots_are_counted_while_others_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "MAX_SLOTS", 4)
    table, rng, num_open = SlotTable(), random.Random(5), Counter[SlotKey]()
    for _ in range(2000):
        key = SlotKey("one", rng.randrange(12))
        if num_open[key] and rng.random() < 0.6:
            table.end(key, request_of(range(20)), [1])
            num_open[key] -= 1
        elif num_open.total() < 8:
            table.start(key)
            num_open[key] += 1
        else:
            table.restore(key, [bytes(16)])
        assert all(table.find(SlotKey("one", i)).num_open == num_open[SlotKey("one", i)] for i in range(12))
        assert len(table._slots) <= max(4, len(+num_open) + 1)


def test_tokens_of_all_slots_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "MAX_TOKENS", 100)
    table, keys = SlotTable(), [SlotKey("one", number) for number in range(4)]
    for key in keys:
        table.start(key)
        table.end(key, request_of(range(40)), [1, 2])
    assert [len(table.find(key).tokens) for key in keys] == [0, 0, 42, 42], "the oldest goes first"
    table.restore(keys[0], [bytes(16)] * 7)
    assert [table.find(key).num_tokens for key in keys] == [112, 0, 0, 0]
    table.erase(keys[0])
    assert table._num_tokens == 0 and table.find(keys[2]).tokens == array("i")


def test_copy_of_a_slot_is_not_changed_by_later_requests() -> None:
    table, key, other = SlotTable(), SlotKey("one", 0), SlotKey("two", 0)
    for each in (key, other):
        table.start(each)
        table.end(each, request_of(range(64)), [1])
    copy, (slot,) = table.find(key), table.others(key)
    hashes = copy.block_hashes(16)
    table.start(key)
    table.end(key, request_of(range(100, 180)), [1])
    assert (
        copy.block_hashes(16) == hashes == slot.block_hashes(16) and copy.num_blocks(16) == len(hashes) == 4
    )
    assert shared_hashes([slot], hashes[:2], 16) == set(hashes), "a longer one keeps all of its blocks"
    assert shared_hashes([slot], table.find(key).block_hashes(16), 16) == set()
