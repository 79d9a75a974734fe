"""`foreword top`: tables of made-up and of real servers, on a terminal and in a pipe."""

from __future__ import annotations

import contextlib
import io
import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from foreword.cli.main import main
from foreword.cli.top import Snapshot, parse_metrics, render
from foreword.config.options import Config
from tests.cli.test_chat_terminal import CTRL_C, Terminal
from tests.server.auth.test_keys import key_of, keyed, write
from tests.server.conftest import MODEL, RunningServer, run_server
from tests.support.fakes import FakeEngineClient, FakeOutput
from tests.support.waiting import WAIT_S

URL = "http://127.0.0.1:8000"
METRICS = """
foreword_info{version="1.2"} 1.0
foreword_http_requests_total{route="/v1/chat/completions",status="200"} %(requests)s
process_resident_memory_bytes 99000000.0
foreword_requests_running{model="big"} 3.0
foreword_requests_running{model="small"} 0.0
foreword_requests_waiting{model="big"} 12.0
foreword_kv_cache_usage_ratio{model="big"} 0.25
foreword_generation_tokens_total{model="big"} %(tokens)s
foreword_prompt_tokens_total{model="big"} 10.0
foreword_prefix_cache_queries_total{model="big"} 100.0
foreword_prefix_cache_hits_total{model="big"} 30.0
foreword_time_to_first_token_seconds_count{model="big"} 4.0
foreword_time_to_first_token_seconds_sum{model="big"} 1.0
foreword_spec_drafts_total{drafter="suffix",model="big"} 10.0
foreword_spec_emitted_tokens_total{drafter="suffix",model="big"} 35.0
foreword_spec_draft_tokens_total{drafter="suffix",model="big"} %(drafted)s
foreword_spec_accepted_tokens_total{drafter="suffix",model="big"} %(accepted)s
foreword_spec_draft_tokens_total{drafter="draft",model="big"} 0.0
"""
BEFORE = {"requests": 10, "tokens": 1000, "drafted": 100, "accepted": 90}
AFTER = {"requests": 40, "tokens": 1250, "drafted": 200, "accepted": 140}
CARDS = (
    {"id": "big", "root": "big", "status": "loaded", "pinned": True, "memory_bytes": 4_200_000_000},
    {"id": "an-alias", "root": "big"},
    {"id": "adapter", "root": "/adapters/a", "parent": "big"},
    {"id": "big:creative", "root": "big:creative", "variant_of": "big"},
    {"id": "small", "root": "small", "status": "loading", "progress": 0.42, "waiting_requests": 4},
    {"id": "broken", "root": "broken", "status": "failed", "error": "no such file"},
    {"id": "many", "status": "loaded", "replicas": [{"status": "ok"}, {"status": "ok"}, {"status": "dead"}]},
)


def snapshot(at_s: float, numbers: dict[str, int], **fields: Any) -> Snapshot:
    return Snapshot(at_s, CARDS, parse_metrics(METRICS % numbers), **fields)


def show(before: Snapshot, now: Snapshot, note: str | None = None, width: int = 80) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=width).print(render(URL, before, now, note))
    return [line.rstrip() for line in text.getvalue().splitlines()]


def row(lines: Sequence[str], name: str) -> list[str]:
    return next(line for line in lines if line.startswith(name)).replace("loaded, ", "loaded,").split()


def test_rates_are_those_between_two_snapshots() -> None:
    lines = show(snapshot(0, BEFORE), snapshot(10, AFTER))
    assert lines[:2] == [f"foreword 1.2 at {URL}", "3.0 requests/s, API process 99.0MB"]
    assert row(lines, "model") == [
        *("model", "status", "memory", "run", "wait", "tok/s", "prompt/s", "first", "accept", "kv", "cached")
    ]
    assert row(lines, "big") == [
        *("big", "loaded,pinned", "4.2GB", "3", "12", "25.0", "0.0", "250ms", "50%", "25%", "30%")
    ]
    assert row(lines, "small")[1:6] == ["loading", "42%", "-", "0", "4"], "it waits for the model"
    assert row(lines, "broken")[1] == "failed" and row(lines, "many")[1:3] == ["loaded", "2/3"]
    assert row(lines, "suffix") == ["suffix", "big", "10.0", "5.0", "50%", "3.50"]
    hidden = ("an-alias", "adapter", "big:creative", "draft ")
    assert not [line for line in lines if line.startswith(hidden)], "first names, and drafters that drafted"
    assert max(map(len, lines)) <= 80


TIERS = """
foreword_kv_adopted_tokens_total{model="small"} 64.0
foreword_prefix_cache_queries_total{model="small"} 0.0
foreword_kv_disk_hit_tokens_total{model="big"} 20.0
foreword_kv_disk_bytes_total{direction="read",model="big"} 3000000.0
foreword_kv_disk_bytes_total{direction="write",model="big"} 5000000000.0
foreword_kv_disk_seconds_total{direction="read",model="big"} 2.0
foreword_kv_disk_avoided_seconds_total{model="big"} 14.5
foreword_kv_host_hit_tokens_total{model="big"} 4.0
foreword_kv_host_bytes_total{direction="read",model="big"} 1000000.0
foreword_kv_host_bytes_total{direction="write",model="big"} 2000000.0
foreword_kv_host_seconds_total{direction="read",model="big"} 0.5
foreword_kv_host_avoided_seconds_total{model="big"} 2.0
"""


def test_tiers_of_the_kv_cache_are_shown_where_there_are_some() -> None:
    now = Snapshot(10, CARDS, parse_metrics(METRICS % AFTER + TIERS))
    lines = show(snapshot(0, BEFORE), now)
    start = next(i for i, line in enumerate(lines) if line.startswith("kv from"))
    assert [line.split() for line in lines[start:]] == [
        ["kv", "from", "model", "tokens", "cached", "taken", "over", "read", "written", "saved"],
        ["memory", "big", "6", "6%", "0", "-", "-", "-"],
        ["host", "big", "4", "4%", "-", "1.0MB", "2.0MB", "1.5s"],
        ["disk", "big", "20", "20%", "-", "3.0MB", "5.0GB", "12.5s"],
        ["memory", "small", "0", "-", "64", "-", "-", "-"],
    ]
    assert max(map(len, lines)) <= 80
    assert not [line for line in show(now, snapshot(20, AFTER)) if line.startswith("kv from")]


def test_idle_ratios_are_those_since_the_start_and_a_restart_counts_from_zero() -> None:
    lines = show(snapshot(0, AFTER), snapshot(10, AFTER))
    assert row(lines, "big")[5] == "0.0" and row(lines, "big")[8] == "70%"
    assert row(show(snapshot(0, {**AFTER, "tokens": 5000}), snapshot(10, AFTER)), "big")[5] == "125.0"


def test_a_narrow_terminal_cuts_names() -> None:
    name = "organisation/a-model-with-a-very-long-name-instruct-q4_k_m"
    long = {"id": name, "status": "loaded", "pinned": True}
    now = Snapshot(1, (long, {"id": "\x1b[2Jevil", "root": "\x1b[2Jevil"}))
    lines = show(now, now)
    assert max(map(len, lines)) <= 80 and row(lines, "organis")[0].endswith("…")
    assert not any("\x1b" in line for line in lines)


def test_keys_with_most_tokens_come_first() -> None:
    keys: list[dict[str, Any]] = [
        {"name": f"key-{i}", "tokens_per_day": None, "usage": {"open": 0, "tokens_today": i}}
        for i in range(12)
    ]
    keys[3] |= {"tokens_per_day": 500, "usage": {"open": 2, "tokens_today": 510}}
    counts = {"requests": 7, "prompt_tokens": 500, "cached_tokens": 2, "generated_tokens": 10}
    usage = [{"key": "key-3", **counts}]
    lines = show(snapshot(0, BEFORE), snapshot(1, AFTER, keys=keys, usage=usage))
    start = next(i for i, line in enumerate(lines) if line.startswith("key "))
    assert lines[start + 1].split() == ["key-3", "2", "7", "500", "2", "10", "510", "500"]
    assert lines[start + 2].split() == ["key-11", "0", "0", "0", "-", "0", "11", "-"]
    assert lines[start + 11] == "and 2 more" and len(lines) == start + 12


def test_first_snapshot_has_no_rates() -> None:
    lines = show(snapshot(5, AFTER), snapshot(5, AFTER))
    assert row(lines, "big")[5] == "-" and row(lines, "suffix") == ["suffix", "big", "-", "-", "70%", "3.50"]


def test_note_is_shown_above_the_last_numbers() -> None:
    lines = show(snapshot(0, BEFORE), snapshot(10, AFTER), "no answer")
    assert lines[2] == "no answer" and row(lines, "big")[5] == "25.0"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    write(tmp_path / "keys", key_of("alice", tokens_per_day=900), key_of("root", admin=True))
    config = Config(api_key_file=str(tmp_path / "keys"), usage_db=str(tmp_path / "usage.db"))
    with run_server(config, FakeEngineClient(FakeOutput("Hello", bursts=(3,)))) as server:
        yield server


def test_real_server(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    body = {"model": MODEL, "prompt": "abc"}
    server.http.post("/v1/completions", json=body, headers=keyed("alice")).raise_for_status()
    top = ["top", "--url", server.url, "--interval", "0.1", "--api-key"]
    assert main([*top, "root"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert row(lines, MODEL)[1] == "loaded,pinned" and row(lines, "suffix")[1] == MODEL
    assert row(lines, "alice") == ["alice", "0", "1", "3", "0", "6", "9", "900"]
    assert main([*top, "alice", "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert row(lines, MODEL) and not [line for line in lines if line.startswith("alice")]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--interval", "0"], "interval must be from 0.1 to 3600 seconds, got 0"),
        (["--url", "127.0.0.1:9"], "http://127.0.0.1:9 does not answer: "),
    ],
)
def test_errors(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", *flags]) in (1, 2)
    assert message in capsys.readouterr().err


def test_missing_key_is_named(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--url", server.url]) == 1
    assert "wants an API key: --api-key KEY or FOREWORD_API_KEY" in capsys.readouterr().err


class Handler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        body = METRICS % BEFORE if self.path == "/metrics" else json.dumps({"data": CARDS[:1]})
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())


@contextlib.contextmanager
def listening(port: int = 0) -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_terminal_waits_for_a_server_that_went_away() -> None:
    """Ctrl-C ends it as it ends `top`: without an error, and with the screen as before."""
    with contextlib.ExitStack() as stack:
        with listening() as port:
            words = ("-m", "foreword", "top", "--url", f"127.0.0.1:{port}", "--interval", "0.1")
            terminal = Terminal(*words, env={"FOREWORD_API_KEY": ""})
            stack.callback(terminal.close)
            terminal.read_until("big")
        terminal.read_until("does not answer")
        with listening(port):
            while "does not answer" in terminal.read_until("requests/s"):
                pass
            terminal.press(CTRL_C)
            assert terminal.process.wait(WAIT_S) == 0
        assert "Traceback" not in terminal.read_all()
