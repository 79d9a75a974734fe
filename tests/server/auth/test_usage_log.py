"""Usage in memory and in the database: shared writes, failures, days and quotas."""

import asyncio
import logging
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from foreword.core.outputs import GRAMMAR, DraftResult
from foreword.server.auth import usage_db
from foreword.server.auth.usage_db import Usage, UsageDatabase, UsageId, read_usage
from foreword.server.auth.usage_log import UsageCounter, UsageLog

MIDNIGHT_S = 1_893_542_400.0  # the beginning of 2030-01-02
DAY_1, DAY_2 = "2030-01-01", "2030-01-02"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "usage.db"


@asynccontextmanager
async def opened(path: Path, **options: Any) -> AsyncIterator[UsageLog]:
    log = UsageLog(path, **options)
    await log.flush()
    try:
        yield log
    finally:
        await log.close()


def use(counter: UsageCounter, tokens: int = 5) -> UsageCounter:
    counter.requests += 1
    counter.count_tokens(tokens, None)
    return counter


def sums(path: Path) -> dict[str, int]:
    return {group[0]: usage.tokens for group, usage in read_usage(path, ("key",))}


async def test_commit_writes_what_is_new(path: Path) -> None:
    seen: list[tuple[Any, ...]] = []
    async with opened(path, on_usage=lambda *values: seen.append(values)) as log:
        counter = log.counter("alice", "big")
        assert log.counter("alice", "big") is counter
        counter.prompt_tokens += 3
        counter.count_tokens(4, DraftResult("suffix", 6, 5))
        counter.count_tokens(2, DraftResult(GRAMMAR, 9, 1))
        await log.commit(counter)
        await log.commit(counter)
        assert read_usage(path, ("key", "model")) == [(("alice", "big"), Usage(0, 3, 0, 6, 6, 4, 0))]
        use(log.counter("bob", "small"))
        await log.flush()
        assert sums(path) == {"alice": 9, "bob": 5}
    assert seen == [("alice", "big", 0, 3, 6), ("bob", "small", 1, 0, 5)]


async def test_close_writes_the_rest(path: Path) -> None:
    async with opened(path) as log:
        use(log.counter("alice", "big"))
    assert sums(path) == {"alice": 5}


async def test_answers_share_a_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that end during one write are in the next one."""
    writing, release, batches = threading.Event(), threading.Event(), list[int]()
    add = UsageDatabase.add

    def slow_add(self: UsageDatabase, rows: Mapping[UsageId, Usage]) -> None:
        batches.append(len(rows))
        writing.set()
        assert release.wait(60)
        add(self, rows)

    async with opened(path) as log:
        monkeypatch.setattr(UsageDatabase, "add", slow_add)
        first = asyncio.create_task(log.commit(use(log.counter("first", "m"))))
        await asyncio.to_thread(writing.wait)
        others = [asyncio.create_task(log.commit(use(log.counter(str(i), "m")))) for i in range(50)]
        await asyncio.sleep(0)
        release.set()
        await asyncio.gather(first, *others)
        assert batches == [1, 50] and len(sums(path)) == 51


@pytest.mark.parametrize("is_answer", [True, False])
async def test_cancel_of_the_one_who_waits_cancels_no_write(
    path: Path, monkeypatch: pytest.MonkeyPatch, is_answer: bool
) -> None:
    release, add = threading.Event(), UsageDatabase.add

    def slow_add(self: UsageDatabase, rows: Mapping[UsageId, Usage]) -> None:
        assert release.wait(60)
        add(self, rows)

    async with opened(path) as log:
        monkeypatch.setattr(UsageDatabase, "add", slow_add)
        counter = use(log.counter("alice", "m"))
        task = asyncio.create_task(log.commit(counter) if is_answer else log.flush())
        await asyncio.sleep(0)
        while log._pending:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        release.set()
        await log.flush()
        assert sums(path) == {"alice": 5}


def lock(path: Path) -> Callable[[], None]:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    return other.close


def fill_up(path: Path) -> Callable[[], None]:
    """A database of one more page than a disk without free space has."""
    patch = pytest.MonkeyPatch()
    initialize = usage_db._initialize

    def initialize_full(connection: sqlite3.Connection) -> None:
        initialize(connection)
        connection.execute("PRAGMA max_page_count = 2")

    patch.setattr(usage_db, "_initialize", initialize_full)
    return patch.undo


def destroy(path: Path) -> Callable[[], None]:
    path.with_name("usage.db-wal").write_bytes(b"")
    path.write_bytes(b"no database " * 1000)

    def remove() -> None:
        for file in path.parent.iterdir():
            file.unlink()

    return remove


@pytest.mark.parametrize(
    ("break_database", "problem"),
    [
        (lock, "database is locked"),
        (fill_up, "database or disk is full"),
        (destroy, "file is not a database"),
    ],
)
async def test_server_goes_on_while_the_database_fails(
    path: Path,
    break_database: Callable[[Path], Callable[[], None]],
    problem: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is said once, no answer waits any more, and what was not written is written later."""
    monkeypatch.setattr(usage_db, "BUSY_S", 0.0)
    caplog.set_level(logging.INFO, "foreword.serve")
    errors: list[None] = []
    log = UsageLog(path, on_error=lambda: errors.append(None))
    await log.flush()
    assert log._database is not None
    # In the thread that writes: a flush() that takes too long returns before it
    await asyncio.get_running_loop().run_in_executor(log._executor, log._database.close)
    repair = break_database(path)
    names = [f"{i:0500}" for i in range(40)]  # more than two pages
    for name in names:
        use(log.counter(name, "m"))
    await log.flush()
    for name in names:
        await log.commit(use(log.counter(name, "m")))
    assert [record.message.partition("; ")[0] for record in caplog.records] == [
        f"usage database {path}: {problem}"
    ]
    assert len(errors) == 1, "one write was tried"
    await log.flush()
    assert len(errors) == 2 and len(caplog.records) == 1
    repair()
    await log.flush()
    assert sums(path) == dict.fromkeys(names, 10)
    assert caplog.records[-1].message.endswith("works again: 40 rows are caught up")
    await log.commit(use(log.counter(names[0], "m")))
    assert sums(path)[names[0]] == 15, "answers wait for their write again"
    await log.close()


async def test_slow_database_delays_one_answer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreword.server.auth.usage_log.COMMIT_TIMEOUT_S", 0.0)
    release, add = threading.Event(), UsageDatabase.add

    def stalled_add(self: UsageDatabase, rows: Mapping[UsageId, Usage]) -> None:
        assert release.wait(60)
        add(self, rows)

    async with opened(path) as log:
        monkeypatch.setattr(UsageDatabase, "add", stalled_add)
        await log.commit(use(log.counter("alice", "m")))
        await log.commit(use(log.counter("alice", "m")))
        assert log.tokens_today("alice") == 10
        monkeypatch.undo()
        release.set()
    assert sums(path) == {"alice": 10}


async def test_tokens_of_today_are_those_of_all_servers_and_of_before(path: Path) -> None:
    now = [MIDNIGHT_S - 100]
    async with opened(path, now=lambda: now[0]) as ours:
        await ours.commit(use(ours.counter("alice", "m"), 10))
    async with opened(path, now=lambda: now[0]) as ours, opened(path, now=lambda: now[0]) as theirs:
        assert ours.tokens_today("alice") == 10, "a restart keeps them"
        await theirs.commit(use(theirs.counter("alice", "other"), 100))
        await ours.flush()
        assert ours.tokens_today("alice") == 110
        use(ours.counter("alice", "m"), 1000)
        assert ours.tokens_today("alice") == 1110, "before they are written"
        await ours.flush()
        await theirs.flush()
        assert ours.tokens_today("alice") == theirs.tokens_today("alice") == 1110
        assert ours.tokens_today("bob") == 0 and ours.seconds_left_today() == 100
        now[0] = MIDNIGHT_S
        assert ours.tokens_today("alice") == 0, "from midnight on, without a write"
        assert ours.seconds_left_today() == 86_400
        await ours.commit(use(ours.counter("alice", "m"), 7))
        await theirs.flush()
        assert ours.tokens_today("alice") == theirs.tokens_today("alice") == 7
    assert {group[0]: usage.tokens for group, usage in read_usage(path, ("day",))} == {DAY_1: 1110, DAY_2: 7}


async def test_usage_of_yesterday_keeps_its_day(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it could not be written before midnight."""
    monkeypatch.setattr(usage_db, "BUSY_S", 0.0)
    now = [MIDNIGHT_S - 1]
    async with opened(path, now=lambda: now[0]) as log:
        unlock = lock(path)
        await log.commit(use(log.counter("alice", "m"), 3))
        now[0] = MIDNIGHT_S + 1
        await log.commit(use(log.counter("alice", "m"), 4))
        unlock()
        await log.flush()
        assert log.tokens_today("alice") == 4
    assert {group[0]: usage.tokens for group, usage in read_usage(path, ("day",))} == {DAY_1: 3, DAY_2: 4}


async def test_without_a_database_tokens_are_counted() -> None:
    log = UsageLog()
    await log.commit(use(log.counter("alice", "m")))
    await log.flush()
    assert log.tokens_today("alice") == 5
    await log.close()
