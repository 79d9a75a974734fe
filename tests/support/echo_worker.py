"""A worker for tests of the pool: a job names what it does."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from foreword.workers.worker import serve


def start(greeting: bytes) -> Callable[[Connection], None]:
    def handle(connection: Connection) -> None:
        job = connection.recv_bytes()
        if job == b"abort":
            os.abort()
        elif job == b"burn CPU":
            while True:
                pass
        elif job == b"take memory":
            bytearray(1 << 30)
        elif job == b"sleep":
            time.sleep(60)
        elif job == b"make lists":
            job = b"collected %d times" % _num_collections(100_000)
        connection.send_bytes(greeting + job)

    return handle


def _num_collections(num_lists: int) -> int:
    """Garbage collections during the creation of lists that all stay alive."""

    def num_runs() -> int:
        return sum(generation["collections"] for generation in gc.get_stats())

    before = num_runs()
    lists = [[] for _ in range(num_lists)]
    assert len(lists) == num_lists
    return num_runs() - before


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1]), start))
