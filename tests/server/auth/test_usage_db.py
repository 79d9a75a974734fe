"""The usage database: sums, several servers, and files that are no database."""

import io
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from foreword.errors import ConfigError
from foreword.server.auth import usage_db
from foreword.server.auth.usage_db import (
    Usage,
    UsageDatabase,
    UsageId,
    check_usage_file,
    parse_day,
    parse_dimensions,
    read_usage,
    utc_day,
    write_csv,
)
from tests.support.waiting import WAIT_S

MONDAY, TUESDAY = "2030-01-07", "2030-01-08"
ROWS = {
    UsageId(MONDAY, "alice", "big"): Usage(1, 10, 4, 20, 8, 6, 0),
    UsageId(MONDAY, "bob", "big"): Usage(2, 30, 0, 40, 0, 0, 1),
    UsageId(TUESDAY, "alice", "small, cheap"): Usage(3, 50, 0, 60, 0, 0, 0),
}
KILLED_WRITER = f"""
import os, signal, sys
from pathlib import Path
from foreword.server.auth.usage_db import Usage, UsageDatabase, UsageId
UsageDatabase(Path(sys.argv[1])).add({{UsageId({MONDAY!r}, "alice", "big"): Usage(7)}})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "usage.db"


def add_row(database: UsageDatabase, day: str = MONDAY, key: str = "alice", tokens: int = 5) -> None:
    database.add({UsageId(day, key, "big"): Usage(requests=1, generated_tokens=tokens)})


def test_counters_are_added_and_summed(path: Path) -> None:
    database = UsageDatabase(path)
    database.add(ROWS)
    database.add({UsageId(MONDAY, "alice", "big"): Usage(1, 1, 1, 1, 1, 1, 1)})
    assert read_usage(path) == [
        ((MONDAY, "alice", "big"), Usage(2, 11, 5, 21, 9, 7, 1)),
        ((MONDAY, "bob", "big"), Usage(2, 30, 0, 40, 0, 0, 1)),
        ((TUESDAY, "alice", "small, cheap"), Usage(3, 50, 0, 60, 0, 0, 0)),
    ]
    by_key = read_usage(path, by=("key",))
    assert [(group, usage.requests) for group, usage in by_key] == [(("alice",), 5), (("bob",), 2)]
    assert [group for group, _ in read_usage(path, by=("model",), since=TUESDAY)] == [("small, cheap",)]
    assert [group for group, _ in read_usage(path, by=("key",), until=MONDAY, model="big", key="bob")] == [
        ("bob",)
    ]
    assert read_usage(path, since="2031-01-01") == []
    database.close()


def test_csv_quotes_names(path: Path) -> None:
    database, text = UsageDatabase(path), io.StringIO()
    database.add(ROWS)
    write_csv(text, ("model",), read_usage(path, ("model",), since=TUESDAY))
    assert text.getvalue().splitlines() == [
        "model,requests,prompt_tokens,cached_tokens,generated_tokens,drafted_tokens,accepted_tokens,errors",
        '"small, cheap",3,50,0,60,0,0,0',
    ]
    database.close()


def test_commit_survives_a_kill(path: Path) -> None:
    writer = subprocess.run([sys.executable, "-c", KILLED_WRITER, str(path)], timeout=WAIT_S, check=False)
    assert writer.returncode == -signal.SIGKILL
    assert read_usage(path, by=("key",)) == [(("alice",), Usage(7))]


def test_servers_share_a_file(path: Path) -> None:
    """Each learns the other's tokens once, and not its own."""
    ours, theirs = UsageDatabase(path), UsageDatabase(path)
    assert ours.changed_tokens(MONDAY) == {}
    assert ours.changed_tokens(MONDAY) is None
    add_row(ours)
    assert ours.changed_tokens(MONDAY) is None
    add_row(theirs, tokens=7)
    add_row(theirs, key="bob", tokens=1)
    assert ours.changed_tokens(MONDAY) == {"alice": 12, "bob": 1}
    assert ours.changed_tokens(TUESDAY) == {}, "another day is read anew"
    ours.close()
    theirs.close()


def test_failed_write_adds_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_db, "BUSY_S", 0.0)
    database = UsageDatabase(path)
    add_row(database)
    with sqlite3.connect(path, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            add_row(database)
    other.close()
    add_row(database)
    assert read_usage(path, by=("key",)) == [(("alice",), Usage(requests=2, generated_tokens=10))]
    database.close()


def test_moved_file_is_made_anew(path: Path) -> None:
    database = UsageDatabase(path)
    add_row(database)
    for suffix in ("", "-wal", "-shm"):
        os.rename(f"{path}{suffix}", f"{path.with_name('old.db')}{suffix}")
    add_row(database, tokens=3)
    assert [usage.generated_tokens for _, usage in read_usage(path)] == [3]
    assert [usage.generated_tokens for _, usage in read_usage(path.with_name("old.db"))] == [5]
    database.close()


def test_usage_file_is_recognized_while_it_is_written(path: Path) -> None:
    check_usage_file(path)
    database = UsageDatabase(path)
    add_row(database)
    check_usage_file(path)
    database.close()
    check_usage_file(path)


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("CREATE TABLE other (a)", "is a database of another program"),
        ("PRAGMA user_version = 99", "was written by a newer version"),
    ],
)
def test_database_of_others_is_refused(path: Path, statement: str, reason: str) -> None:
    if "version" in statement:
        UsageDatabase(path).changed_tokens(MONDAY)
    with sqlite3.connect(path, isolation_level=None) as other:
        other.execute(statement)
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    other.close()
    with pytest.raises(ConfigError, match=reason) as caught:
        check_usage_file(path)
    assert caught.value.param == "usage_db"


def test_unusable_paths_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "keys.yaml"
    text.write_text("keys: []\n" * 50)
    for path, reason in (
        (text, "is no SQLite database"),
        (tmp_path, "cannot be read: Is a directory"),
        (tmp_path / "none" / "usage.db", "cannot be created: .*none is no directory"),
    ):
        with pytest.raises(ConfigError, match=f"usage database .* {reason}"):
            check_usage_file(path)
    with pytest.raises(ConfigError, match="does not exist"):
        read_usage(tmp_path / "usage.db")
    assert not (tmp_path / "usage.db").exists()


def test_days_and_dimensions() -> None:
    assert utc_day(0.0) == "1970-01-01" and utc_day(86_399.9) == "1970-01-01"
    assert utc_day(86_400.0) == "1970-01-02"
    assert parse_day(MONDAY, "since") == MONDAY
    with pytest.raises(ConfigError, match="since must be a day such as 2030-01-31, got 'yesterday'"):
        parse_day("yesterday", "since")
    assert parse_dimensions("model, day") == ("day", "model")
    with pytest.raises(ConfigError, match=r"by must be day, key, model, .* got 'modle'; did you mean model"):
        parse_dimensions("key,modle")
