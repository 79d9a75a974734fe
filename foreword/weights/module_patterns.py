"""Matches names of modules with patterns of a checkpoint or an adapter, which may take forever."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from multiprocessing.connection import Connection
from typing import Final

from foreword.errors import CheckpointError
from foreword.workers.pool import JobFailed, JobLimits, WorkerPool
from foreword.workers.worker import serve

WORKER: Final = "foreword.weights.module_patterns"  # run as a process, by find_first()
LIMITS: Final = JobLimits(cpu_s=5.0, wall_s=60.0, num_bytes=256 << 20, queue_timeout_s=60.0)
# Without a choice between ways to match: an optional beginning, and literals.
PLAIN: Final = re.compile(r"(?:\.\*)?(?:[\w-]|\\?\.)*\$?", re.ASCII)
MAX_CHARS, MAX_TESTS = 1000, 1 << 20  # limits of plain patterns: characters of a name, and tests in all
MAX_REPLY_CHARS: Final = 12  # characters for one name


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A regular expression of the start, the end (after a dot) or the whole of a name; or an exact name."""

    text: str
    place: str  # "start", "end", "whole" or "exact"

    def compile(self) -> Callable[[str], object]:
        """Raises re.error, RecursionError, OverflowError."""
        if self.place == "exact":
            return self.text.__eq__
        if self.place == "end":
            return re.compile(rf"(.*\.)?({self.text})$").match
        pattern = re.compile(self.text)
        return pattern.match if self.place == "start" else pattern.fullmatch

    @property
    def is_plain(self) -> bool:
        return self.place == "exact" or PLAIN.fullmatch(self.text) is not None


def find_first(patterns: Sequence[NamePattern], names: Sequence[str], source: str) -> list[int]:
    """Index of the first pattern that matches each name; -1 for none.

    Patterns that can backtrack are matched in a process with a limit of CPU time.
    Raises CheckpointError, which names `source`.
    """
    is_plain = all(pattern.is_plain for pattern in patterns) and max(map(len, names), default=0) <= MAX_CHARS
    if is_plain and len(patterns) * len(names) <= MAX_TESTS:
        return match_first(patterns, names)
    pool = WorkerPool(WORKER, "match", lambda: None, LIMITS, 1)
    try:
        with pool.worker(source) as worker:
            worker.send(json.dumps(([astuple(pattern) for pattern in patterns], names)).encode())
            found: list[int] = json.loads(worker.receive(MAX_REPLY_CHARS * (len(names) + 1)))
    except JobFailed as error:
        raise CheckpointError(f"{source}: patterns of modules' names: {error}") from None
    finally:
        pool.close()
    return found


def match_first(patterns: Sequence[NamePattern], names: Sequence[str]) -> list[int]:
    """See find_first(); without a limit."""
    tests = [pattern.compile() for pattern in patterns]
    return [next((index for index, test in enumerate(tests) if test(name)), -1) for name in names]


def start_worker(_: None) -> Callable[[Connection], None]:
    """Returns the handler of the worker process, which replies with the first pattern of each name."""

    def handle(connection: Connection) -> None:
        patterns, names = json.loads(connection.recv_bytes())
        found = match_first([NamePattern(*pattern) for pattern in patterns], names)
        connection.send_bytes(json.dumps(found).encode())

    return handle


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1]), start_worker))
