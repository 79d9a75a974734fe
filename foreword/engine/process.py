"""The engine as a process: requests come in over a pipe, one report a step goes out.

Started by `engine.client` as `python -m foreword.engine.process FD`. It ends when its client does.
"""

from __future__ import annotations

import logging
import signal
import sys
from multiprocessing.connection import Connection
from typing import NoReturn

from foreword.core.request import Request
from foreword.core.vocabulary import Vocabulary
from foreword.engine.engine import Engine
from foreword.engine.load import load
from foreword.engine.messages import Loading, Ready, Refused, Remove, Start
from foreword.errors import ForewordError

__all__ = ["main"]

QUIET_S = 1.0  # without a request for so long, the engine checks its own bookkeeping


def main(fd: int) -> int:
    """Serve the client at the other end of `fd`; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client decides when to stop
    connection = Connection(fd)
    try:
        return _run(connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0  # the client is gone, and with it the reason to be


def _run(connection: Connection) -> int:
    start: Start = connection.recv()
    logging.basicConfig(level=start.config.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    try:
        engine = load(start.config, start.unused_ids, start.resolved, lambda done, total: connection.send(Loading(done, total)))
    except ForewordError as error:
        connection.send(Refused(error))
        return 1
    connection.send(Ready(engine.info))
    try:
        return _serve(engine, connection)
    finally:
        engine.close()


def _serve(engine: Engine, connection: Connection) -> NoReturn:
    """Step while there is work, listen while there is none, until the client hangs up."""
    while True:
        if engine.idle and not connection.poll(QUIET_S):
            engine.check()
            connection.poll(None)
        while connection.poll():
            _handle(engine, connection.recv())
        connection.send(engine.step())


def _handle(engine: Engine, message: Request | Remove | Vocabulary) -> None:
    if isinstance(message, Request):
        engine.submit(message)
    elif isinstance(message, Vocabulary):
        engine.know(message)
    else:
        engine.remove(message.request_id, message.num_tokens)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
