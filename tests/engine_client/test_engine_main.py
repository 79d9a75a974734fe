"""The engine process: messages of its client, and a start that fails."""

from __future__ import annotations

import errno
import logging
import re
import subprocess
import sys
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from foreword.config.options import Config
from foreword.core.structured_output import Vocabulary
from foreword.engine_client import engine_main as engine_process
from foreword.engine_client.engine_main import _handle, _serve
from foreword.engine_client.heartbeat import HeartbeatPage
from foreword.engine_client.messages import (
    AddImage,
    DropImage,
    EngineStartFailed,
    Init,
    LoadAdapter,
    RemoveRequest,
)
from foreword.errors import CheckpointError, ConfigError, RequestFailed


def test_finish_and_abort_reach_the_engine() -> None:
    received: list[tuple[str, int | None]] = []
    engine: Any = SimpleNamespace(remove=lambda *removed: received.append(removed))
    with HeartbeatPage.create() as page:
        for message in (RemoveRequest("a", 5), RemoveRequest("b", None)):
            _handle(engine, message, page)
    assert received == [("a", 5), ("b", None)]


def test_vocabulary_is_blamed_on_its_request() -> None:
    noted: list[tuple[int, ...]] = []
    with HeartbeatPage.create() as page:
        engine: Any = SimpleNamespace(
            num_submitted=7, set_vocabulary=lambda _: noted.append(page.busy_requests())
        )
        _handle(engine, Vocabulary((), (), ()), page)
    assert noted == [(7,)]


def test_unforeseen_error_of_an_adapter_is_its_reply() -> None:
    """Not the end of the engine and of all other requests."""

    def load_adapter(path: str) -> None:
        raise RuntimeError(f"{path}: can't allocate memory")

    engine: Any = SimpleNamespace(num_submitted=0, load_adapter=load_adapter)
    with HeartbeatPage.create() as page:
        reply = _handle(engine, LoadAdapter(3, "a"), page)
    assert reply is not None and reply.call == 3 and isinstance(reply.result, RequestFailed)
    assert "a: can't allocate memory" in reply.result.message


def test_idle_engine_checks_itself_and_prepares_its_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, before it waits for its next message; here its client hangs up."""
    calls: list[str] = []
    client, connection = Pipe()

    def prepare() -> None:
        calls.append("prepare")
        client.close()

    proposer = SimpleNamespace(prepare=prepare)
    engine: Any = SimpleNamespace(idle=True, check=lambda: calls.append("check"), proposer=proposer)
    monkeypatch.setattr(engine_process, "IDLE_CHECK_S", 0)
    with HeartbeatPage.create() as page, connection, pytest.raises(EOFError):
        _serve(engine, connection, page)
    assert calls == ["check", "prepare"]


def test_worker_stores_pixels_and_blames_the_next_request() -> None:
    kept: dict[bytes, bytes] = {}
    encoder = SimpleNamespace(add_pixels=kept.__setitem__, drop_pixels=kept.pop)
    with HeartbeatPage.create() as heartbeat:
        engine: Any = SimpleNamespace(num_submitted=7, encoder=encoder)
        _handle(engine, AddImage(b"a", b"abc"), heartbeat)
        assert kept == {b"a": b"abc"} and heartbeat.busy_requests() == (7,), "the next request is blamed"
        _handle(engine, DropImage(b"a"), heartbeat)
        assert not kept and heartbeat.busy_requests() == ()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x/t"), "start: /x/t: No space left on device"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "start: out of memory"),
        (MemoryError(), "start: out of memory"),
        (CheckpointError("no weights"), "^no weights$"),
    ],
)
@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_expected_start_error_is_one_line(
    error: Exception,
    message: str,
    level: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The client reports it; only level debug logs a traceback."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(engine_process, "load", fail)
    monkeypatch.setattr(engine_process, "set_up_logging", lambda *_: None)
    caplog.set_level(level, "foreword")
    client, engine = Pipe()
    client.send(Init(Config(), ()))
    page: Any = SimpleNamespace(start=lambda: None)
    assert engine_process._run(engine, page, None, lambda engine: None) == 1
    failure = client.recv()
    assert isinstance(failure, EngineStartFailed) and isinstance(failure.error, ConfigError | CheckpointError)
    assert re.search(message, str(failure.error))
    assert [bool(record.exc_info) for record in caplog.records] == [True] * (level == logging.DEBUG)


def test_client_does_not_import_torch() -> None:
    code = "import sys, foreword.engine_client.make_client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
