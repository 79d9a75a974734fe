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
            lists = [[] for _ in range(300_000)]
            job = b"collected %d times beside %d" % (_num_collections(), len(lists))
        elif job == b"make cycles":
            for _ in range(300_000):
                cycle: list[object] = []
                cycle.append(cycle)
        elif job == b"count collections":
            job = b"collected %d times" % _num_collections()
        connection.send_bytes(greeting + job)

    return handle


def _num_collections() -> int:
    """Garbage collections of this process."""
    return sum(generation["collections"] for generation in gc.get_stats())


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1]), start))
