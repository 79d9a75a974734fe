"""The worker pool: crashes, limits, timeouts, replacement, shutdown."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from foreword.core.structured_output import StructuredOutput
from foreword.errors import InvalidRequest, OverBudget, Overloaded, RequestFailed, ShuttingDown
from foreword.workers.pool import JobFailed, JobLimits, WorkerPool, load_reply
from tests.support.waiting import WAIT_S, wait_until

MODULE = "tests.support.echo_worker"
LIMITS = JobLimits(cpu_s=0.2, wall_s=30.0, num_bytes=256 << 20, queue_timeout_s=30.0)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(MODULE, "echo", lambda: b"hello ", LIMITS, num_workers=1)
    yield pool
    pool.close()


def run(pool: WorkerPool, job: bytes = b"world", sent: threading.Event | None = None) -> bytes:
    with pool.worker("field") as worker:
        worker.send(job)
        if sent is not None:
            sent.set()
        return worker.receive(1 << 10)


def pid_of(pool: WorkerPool) -> int:
    run(pool)
    (worker,) = pool.workers
    assert worker.process is not None
    return worker.process.pid


def test_jobs_wait_for_a_worker_and_get_their_own_reply(pool: WorkerPool) -> None:
    jobs = [b"%d" % n for n in range(20)]
    with ThreadPoolExecutor(6) as executor:
        assert list(executor.map(lambda job: run(pool, job), jobs)) == [b"hello " + job for job in jobs]


@pytest.mark.parametrize(
    ("job", "reason"),
    [(b"abort", "crashed"), (b"take memory", "out of memory"), (b"burn CPU", "0.2 s of CPU")],
)
def test_job_that_ends_its_worker_fails_alone(pool: WorkerPool, job: bytes, reason: str) -> None:
    before = pid_of(pool)
    with pytest.raises(JobFailed, match=reason):
        run(pool, job)
    assert run(pool) == b"hello world"
    assert pid_of(pool) != before


def test_worker_collects_garbage_only_between_jobs(pool: WorkerPool) -> None:
    """Collections took half of the CPU time of long conversations, and grew faster than they."""
    count = int(run(pool, b"count collections").split()[2])
    assert run(pool, b"make lists") == b"hello collected %d times beside 300000" % count
    assert run(pool, b"count collections") == b"hello collected %d times" % count
    run(pool, b"make cycles")
    assert run(pool, b"count collections") == b"hello collected %d times" % (count + 1)


def test_worker_that_runs_gets_the_next_job_before_another_is_started() -> None:
    pool = WorkerPool(MODULE, "echo", lambda: b"hello ", LIMITS, num_workers=2)
    try:
        for _ in range(3):
            run(pool)
        assert [worker.process is not None for worker in pool.workers].count(True) == 1
    finally:
        pool.close()


def test_killed_worker_is_overload_not_a_failed_job(pool: WorkerPool) -> None:
    """The kernel's OOM killer picks any process."""
    pid = pid_of(pool)
    with ThreadPoolExecutor(1) as executor:
        pending = executor.submit(run, pool, b"sleep", sent := threading.Event())
        sent.wait(WAIT_S)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(Overloaded, match=r"^field: the machine is too busy to echo it"):
            pending.result(WAIT_S)


def test_hanging_worker_is_replaced(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = pid_of(pool)
    with monkeypatch.context() as patch:
        patch.setattr(pool, "limits", replace(LIMITS, wall_s=0.1))
        with pytest.raises(Overloaded, match="too busy"):
            run(pool, b"sleep")
    assert pid_of(pool) != pid


def test_worker_that_died_idle_is_replaced(pool: WorkerPool) -> None:
    pid = pid_of(pool)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert run(pool) == b"hello world"


def test_interrupted_job_leaves_no_reply_to_the_next_one(pool: WorkerPool) -> None:
    with pytest.raises(KeyboardInterrupt), pool.worker("field") as worker:
        worker.send(b"first")
        raise KeyboardInterrupt
    assert run(pool) == b"hello world"


def test_queue_timeout_is_overload(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "limits", replace(LIMITS, queue_timeout_s=0.05))
    with (
        pool.worker("field"),
        pytest.raises(Overloaded, match=r"no worker was free to echo it within 0\.05 s"),
    ):
        run(pool)


def test_close_ends_a_pending_job() -> None:
    pool = WorkerPool(MODULE, "echo", lambda: b"", LIMITS, num_workers=1)
    pid = pid_of(pool)
    with ThreadPoolExecutor(1) as executor:
        pending = executor.submit(run, pool, b"sleep", sent := threading.Event())
        sent.wait(WAIT_S)
        pool.close()
        with pytest.raises(ShuttingDown):
            pending.result(WAIT_S)
    with pytest.raises(ShuttingDown):
        run(pool)
    assert not Path(f"/proc/{pid}").exists()


def test_close_may_come_at_any_time() -> None:
    pool = WorkerPool(MODULE, "echo", lambda: b"", LIMITS, num_workers=2)
    thread = threading.Thread(target=pool.close)
    thread.start()
    with pytest.raises(ShuttingDown):
        while True:
            run(pool)
    thread.join()


def test_worker_that_does_not_start_is_an_internal_error() -> None:
    pool = WorkerPool("tests.no_such_module", "echo", lambda: b"", LIMITS, num_workers=1)
    with pytest.raises(RequestFailed, match=r"tests\.no_such_module does not start"):
        run(pool)
    pool.close()


def test_spawn_error_is_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = WorkerPool(MODULE, "echo", lambda: b"hello ", LIMITS, num_workers=1)
    with monkeypatch.context() as patch:
        patch.setattr("foreword.workers.pool.spawn", Mock(side_effect=OSError("no files left")))
        with pytest.raises(RequestFailed, match="no files left"):
            run(pool)
    assert run(pool) == b"hello world"
    pool.close()


def test_interrupted_start_leaves_no_ready_message_to_the_first_job(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = WorkerPool(MODULE, "echo", lambda: b"hello ", LIMITS, num_workers=1)
    with monkeypatch.context() as patch:
        patch.setattr("foreword.workers.pool.Connection.poll", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(pool)
    assert run(pool) == b"hello world"
    pool.close()


def test_close_during_start_ends_the_new_process() -> None:
    """close() sees no process to kill while the setup is loaded."""
    pool = WorkerPool(MODULE, "echo", lambda: loading.set() or closing.wait(WAIT_S) or b"", LIMITS, 1)
    loading, closing = threading.Event(), threading.Event()
    with ThreadPoolExecutor(2) as executor:
        pending = executor.submit(run, pool, b"sleep")
        loading.wait(WAIT_S)
        closed = executor.submit(pool.close)
        while not pool.closed:
            time.sleep(0.01)
        closing.set()
        with pytest.raises(ShuttingDown):
            pending.result(WAIT_S)
        closed.result(WAIT_S)


def test_failed_load_leaves_no_worker_without_setup() -> None:
    setups = iter([OSError("no file"), b"hello "])

    def load() -> bytes:
        setup = next(setups)
        if isinstance(setup, Exception):
            raise setup
        return setup

    pool = WorkerPool(MODULE, "echo", load, LIMITS, num_workers=1)
    with pytest.raises(OSError, match="no file"):
        run(pool)
    assert run(pool) == b"hello world"
    pool.close()


def test_worker_cannot_open_files_or_dump_core(pool: WorkerPool) -> None:
    limits = Path(f"/proc/{pid_of(pool)}/limits").read_text().splitlines()
    values = {line[:26].strip(): line[26:].split()[:2] for line in limits}
    assert values["Max open files"] == ["0", "0"]
    assert values["Max core file size"] == ["0", "0"]
    assert values["Max address space"][0].isdigit()


ORPHAN = f"""
import os
from foreword.workers.pool import JobLimits, WorkerPool
pool = WorkerPool({MODULE!r}, "echo", lambda: b"", JobLimits(1.0, 30.0, 1 << 28, 30.0), 1)
with pool.worker("field") as worker:
    print(worker.process.pid, flush=True)
    os._exit(9)
"""


def test_worker_ends_with_its_parent() -> None:
    parent = subprocess.run(
        [sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    stat = Path(f"/proc/{int(parent.stdout)}/stat")
    wait_until(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z")


class _Known:
    """A class of replies."""


class _Foreign:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


def test_replies_hold_no_other_classes() -> None:
    """A worker that a request has taken over runs nothing in the server."""
    plain = {"a": [1, 2.5, None, ("x", {"y"})]}
    assert load_reply(pickle.dumps(plain), ()) == plain
    assert isinstance(load_reply(pickle.dumps(_Known()), (_Known,)), _Known)
    for foreign in (_Foreign(), _Known(), os.system, pickle.loads, StructuredOutput("regex", "a")):
        with pytest.raises(pickle.UnpicklingError, match="a worker replied with"):
            load_reply(pickle.dumps(foreign), (InvalidRequest,))
    assert str(load_reply(pickle.dumps(OverBudget("no", "field")), (InvalidRequest,))) == "no"


def test_reply_is_made_without_garbage_collection() -> None:
    """Collections took most of the time in which a reply of many lists held the interpreter's lock."""
    reply = pickle.dumps([[] for _ in range(100_000)])
    collections: list[str] = []

    def record(phase: str, _: object) -> None:
        collections.append(phase)

    gc.collect()
    gc.callbacks.append(record)
    try:
        assert len(load_reply(reply, ())) == 100_000
        during = len(collections)
        with pytest.raises(pickle.UnpicklingError):
            load_reply(pickle.dumps(os.system), ())
        assert gc.isenabled()
    finally:
        gc.callbacks.remove(record)
    assert during <= 2, "one that began when it ended"
