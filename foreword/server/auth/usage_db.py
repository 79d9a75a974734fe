"""The SQLite file of usage: a row of counters by UTC day, key and model. Several servers may share it.

It is in WAL mode: a commit survives the death of its process, readers never wait, and a power failure may
lose the last seconds. Methods block, and raise sqlite3.Error.
"""

from __future__ import annotations

import csv
import os
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from datetime import UTC, date, datetime
from pathlib import Path
from typing import NamedTuple, TextIO

from foreword.errors import ConfigError, did_you_mean, shown

BUSY_S = 1.0  # how long a write waits for the write of another server
APPLICATION_ID = 0x66777573  # "fwus", in the file's header
SCHEMA_VERSION = 1
FILE_MAGIC = b"SQLite format 3\0"
HEADER_BYTES, VERSION_OFFSET, APPLICATION_OFFSET = 100, 60, 68
DIMENSIONS = ("day", "key", "model")


class Usage(NamedTuple):
    """Usage of one model by one key. Tokens are those of the answers' `usage` objects."""

    requests: int = 0  # HTTP requests that were admitted and have ended
    prompt_tokens: int = 0  # prompts that got a first token; each counts once for all its choices
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    generated_tokens: int = 0  # delivered, also to clients that disconnected later
    drafted_tokens: int = 0  # drafted and verified
    accepted_tokens: int = 0  # drafted tokens that were delivered
    errors: int = 0  # requests that ended with an error

    def plus(self, other: Usage) -> Usage:
        return Usage(*(mine + more for mine, more in zip(self, other, strict=True)))

    @property
    def tokens(self) -> int:
        """Tokens that count against quotas."""
        return self.prompt_tokens + self.generated_tokens


class UsageId(NamedTuple):
    """The key of a row."""

    day: str  # UTC, such as 2030-01-31
    key: str  # its name; "" without keys
    model: str  # name in answers


COLUMNS = ", ".join(Usage._fields)
CREATE = f"""
CREATE TABLE IF NOT EXISTS usage (day TEXT, key TEXT, model TEXT,
{", ".join(f"{name} INTEGER NOT NULL" for name in Usage._fields)},
PRIMARY KEY (day, key, model)) WITHOUT ROWID
"""
MORE = ", ".join(f"{name} = {name} + excluded.{name}" for name in Usage._fields)
ADD = f"""
INSERT INTO usage (day, key, model, {COLUMNS}) VALUES (?, ?, ?{", ?" * len(Usage._fields)})
ON CONFLICT (day, key, model) DO UPDATE SET {MORE}
"""
SUM_DAY = "SELECT key, SUM(prompt_tokens + generated_tokens) FROM usage WHERE day = ? GROUP BY key"


class UsageDatabase:
    """A connection that writes. It opens the file when it is first needed, and again after an error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._inode = 0
        self._read_state: tuple[str, int] | None = None  # day and data_version of the last sums

    def add(self, rows: Mapping[UsageId, Usage]) -> None:
        """Add to the counters, all or nothing."""
        try:
            connection = self._open()
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(ADD, [(*row_id, *usage) for row_id, usage in rows.items()])
            connection.execute("COMMIT")
        except BaseException:
            self.close()  # rolls back
            raise

    def changed_tokens(self, day: str) -> dict[str, int] | None:
        """Tokens by key of that day; None if no other server has written since the last call for it."""
        try:
            connection = self._open()
            (version,) = connection.execute("PRAGMA data_version").fetchone()
            if self._read_state == (day, version):
                return None
            sums = dict(connection.execute(SUM_DAY, (day,)).fetchall())
        except BaseException:
            self.close()
            raise
        self._read_state = day, version
        return sums

    def close(self) -> None:
        """Close the file; the next call opens it again."""
        if self._connection is not None:
            self._connection.close()
        self._connection = self._read_state = None

    def _open(self) -> sqlite3.Connection:
        """The connection to the file that is at the path now: an operator may have moved or removed it."""
        if self._connection is not None:
            if _inode(self._path) == self._inode:
                return self._connection
            self.close()
        # The thread that writes is not the one that closes.
        self._connection = sqlite3.connect(
            self._path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        _initialize(self._connection)
        self._inode = _inode(self._path)
        return self._connection


def _initialize(connection: sqlite3.Connection) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version != SCHEMA_VERSION:
        # Before WAL, so that the header of the file itself tells what it is; see check_usage_file().
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(CREATE)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")  # a commit needs no fsync to survive a kill


def _inode(path: Path) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


def check_usage_file(path: Path) -> None:
    """Raises ConfigError for a path that cannot be a usage database, and for a file of another program."""
    try:
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise _file_error(path, f"cannot be created: {path.parent} is no directory") from None
        if not os.access(path.parent, os.W_OK):
            raise _file_error(path, f"cannot be created: {path.parent} is not writable") from None
        return
    except OSError as error:
        raise _file_error(path, f"cannot be read: {error.strerror or error}") from None
    if not header:
        return
    if not header.startswith(FILE_MAGIC) or len(header) < HEADER_BYTES:
        raise _file_error(path, "is no SQLite database")
    version, application = (
        int.from_bytes(header[offset : offset + 4]) for offset in (VERSION_OFFSET, APPLICATION_OFFSET)
    )
    if application != APPLICATION_ID:
        raise _file_error(path, "is a database of another program")
    if version > SCHEMA_VERSION:
        raise _file_error(path, "was written by a newer version of foreword")


def _file_error(path: Path, message: str) -> ConfigError:
    return ConfigError(f"usage database {path} {message}", "usage_db")


def utc_day(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).date().isoformat()


def parse_day(text: str, name: str) -> str:
    """The day as rows have it. Raises ConfigError, which calls the value `name`."""
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise ConfigError(f"{name} must be a day such as 2030-01-31, got {shown(text, 60)}", name) from None


def parse_dimensions(text: str) -> tuple[str, ...]:
    """ "key,model" as a tuple. Raises ConfigError."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in DIMENSIONS:
            raise ConfigError(
                f"by must be {', '.join(DIMENSIONS)}, or several of them joined by commas, "
                f"got {shown(name, 60)}{did_you_mean(name, DIMENSIONS)}",
                "by",
            )
    return tuple(name for name in DIMENSIONS if name in names)


def read_usage(
    path: Path,
    by: Sequence[str] = DIMENSIONS,
    since: str | None = None,
    until: str | None = None,
    key: str | None = None,
    model: str | None = None,
) -> list[tuple[tuple[str, ...], Usage]]:
    """Sums by `by`, in order; days from `since` to `until`, both included. A server may be writing.

    Raises ConfigError if the file cannot be read.
    """
    conditions = {"day >= ?": since, "day <= ?": until, "key = ?": key, "model = ?": model}
    given = {text: value for text, value in conditions.items() if value is not None}
    where = f"WHERE {' AND '.join(given)}" if given else ""
    names, sums = ", ".join(by), ", ".join(f"SUM({name})" for name in Usage._fields)
    query = f"SELECT {names}, {sums} FROM usage {where} GROUP BY {names} ORDER BY {names}"
    check_usage_file(path)
    if not path.exists():
        raise _file_error(path, "does not exist")
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", timeout=BUSY_S, uri=True)) as db:
            rows = db.execute(query, tuple(given.values())).fetchall()
    except sqlite3.Error as error:
        raise _file_error(path, f"cannot be read: {error}") from None
    return [(tuple(row[: len(by)]), Usage(*row[len(by) :])) for row in rows]


def write_csv(file: TextIO, by: Sequence[str], rows: Iterable[tuple[tuple[str, ...], Usage]]) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow((*by, *Usage._fields))
    writer.writerows((*group, *usage) for group, usage in rows)
