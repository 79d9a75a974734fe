"""Code that holds the event loop is measured, and named in the log."""

from __future__ import annotations

import logging
import re
import threading
from typing import Any

import pytest

from foreword.server import stall_monitor
from foreword.server.routes import tokenize
from foreword.server.stall_monitor import StallMonitor
from tests.server.conftest import run_server
from tests.support.waiting import WAIT_S, wait_until


def test_handler_that_blocks_is_counted_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    describe, respond, is_seen = stall_monitor._describe, tokenize.Response, threading.Event()

    def describe_once(*args: Any) -> str:
        text = describe(*args)
        is_seen.set()
        return text

    def block(*args: Any, **kwargs: Any) -> Any:
        assert is_seen.wait(WAIT_S)
        return respond(*args, **kwargs)

    monkeypatch.setattr(stall_monitor, "WARN_INTERVAL_S", 0)  # a busy machine has stalls of its own
    with run_server() as server, caplog.at_level(logging.WARNING):
        _, before_s = stalls(server.http.get("/metrics").text)
        monkeypatch.setattr(stall_monitor, "_describe", describe_once)
        monkeypatch.setattr(tokenize, "Response", block)
        assert server.http.post("/detokenize", json={"tokens": [65]}).json() == {"prompt": "A"}
        monkeypatch.setattr(tokenize, "Response", respond)
        place = "in POST /detokenize, at foreword.server.routes.tokenize._respond"
        wait_until(lambda: re.search(rf"the event loop stood still for [\d.]+ s {place}\n", caplog.text))
        count, seconds = stalls(server.http.get("/metrics").text)
    assert count >= 1 and seconds - before_s >= stall_monitor.WARN_S


def stalls(metrics: str) -> tuple[float, float]:
    """(number, seconds in all)"""
    count, total = (
        float(re.search(rf"^foreword_event_loop_stall_seconds_{part} (.*)$", metrics, re.MULTILINE)[1])  # type: ignore[index]
        for part in ("count", "sum")
    )
    return count, total


def test_short_stalls_are_counted_and_one_line_a_minute_is_written(caplog: pytest.LogCaptureFixture) -> None:
    counted: list[float] = []
    monitor = StallMonitor(counted.append)
    with caplog.at_level(logging.WARNING):
        for due_s, stall_s in (
            (100, 0.04),
            (101, 0.125),
            (102, 0.5),
            (103, 8),
            (161, 0.5),
            (163, 0.5),
            (164, 1),
        ):
            monitor._on_tick(due_s, due_s + stall_s)
    assert counted == [0.125, 0.5, 8, 0.5, 0.5, 1]
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["the event loop stood still for 0.50 s in unknown code"] * 2
