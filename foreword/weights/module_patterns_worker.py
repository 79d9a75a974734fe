"""The worker process of `weights.module_patterns`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

from foreword.weights.module_patterns import NamePattern, match_first
from foreword.workers.worker import serve


def start(_: None) -> Callable[[Connection], None]:
    """Returns the handler, which replies with the first pattern of each name."""

    def handle(connection: Connection) -> None:
        patterns, names = json.loads(connection.recv_bytes())
        found = match_first([NamePattern(*pattern) for pattern in patterns], names)
        connection.send_bytes(json.dumps(found).encode())

    return handle


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1]), start))
