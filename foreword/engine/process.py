"""The engine as a process: requests come in over a pipe, one report a step goes out.

Forked by `engine.spawner` for `engine.client`. It ends when its client does. What it is doing stands on a board.
"""

from __future__ import annotations

import faulthandler
import logging
import signal
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NoReturn

from foreword.core.logs import set_up_logging
from foreword.core.request import Request
from foreword.core.vocabulary import Vocabulary
from foreword.engine.board import Board
from foreword.engine.engine import Engine
from foreword.engine.load import load
from foreword.engine.messages import BOARD, Forget, Loading, Ready, Refused, Remove, Show, Start
from foreword.errors import ForewordError

__all__ = ["main"]

logger = logging.getLogger(__name__)

QUIET_S = 1.0  # without a request for so long, the engine checks its own bookkeeping


def _as_it_is(engine: Engine) -> None:
    """Tests prepare engines for faults."""


def main(fd: int, prepare: Callable[[Engine], None] = _as_it_is) -> int:
    """Serve the client at the other end of `fd`; returns the exit code. `prepare` sees the engine before its first step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client decides when to stop
    faulthandler.enable()  # a crash in native code says where
    try:
        with _board(fd) as board, Connection(fd) as connection:
            return _run(connection, board, prepare)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0  # the client is gone, and with it the reason to be
    except Exception:
        logger.exception("the engine ends: after this error its state is not to be trusted")
        return 1


def _board(fd: int) -> Board:
    """The client sends it before anything else."""
    with socket.socket(fileno=fd) as ours:
        try:
            message, fds, _, _ = socket.recv_fds(ours, len(BOARD), 1)
        finally:
            ours.detach()
    if not message:
        raise EOFError
    return Board(fds[0])


def _run(connection: Connection, board: Board, prepare: Callable[[Engine], None]) -> int:
    board.beat()
    start: Start = connection.recv()
    set_up_logging(start.config.log_level, "%(levelname)s %(name)s: %(message)s")

    def progress(done: int, total: int) -> None:
        connection.send(Loading(done, total))

    try:
        engine = load(start.config, start.unused_ids, start.resolved, progress, start.timings)
    except ForewordError as error:
        connection.send(Refused(error))
        return 1
    prepare(engine)
    engine.at_work = board.note
    board.rest()
    connection.send(Ready(engine.info, engine.drafting.timings))
    try:
        _serve(engine, connection, board)
    finally:
        engine.close()


def _serve(engine: Engine, connection: Connection, board: Board) -> NoReturn:
    """Step while there is work, listen while there is none, until the client hangs up."""
    while True:
        if engine.idle:
            _rest(engine, connection, board)
        while connection.poll():
            _handle(engine, connection.recv(), board)
        board.step()
        connection.send(engine.step())


def _rest(engine: Engine, connection: Connection, board: Board) -> None:
    """Wait for a message."""
    board.rest()
    if not connection.poll(QUIET_S):
        engine.check()
        connection.poll(None)


def _handle(engine: Engine, message: Request | Remove | Vocabulary | Show | Forget, board: Board) -> None:
    if isinstance(message, Request):
        board.work((engine.num_arrived,))
        engine.submit(message)
    elif isinstance(message, Vocabulary):
        board.work((engine.num_arrived,))  # the request that needs it follows
        engine.know(message)
    elif isinstance(message, Show):
        board.work((engine.num_arrived,))  # likewise
        engine.encoder.show(message.digest, message.pixels)
    elif isinstance(message, Forget):
        board.work(())
        engine.encoder.forget(message.digest)
    else:
        board.work(())
        engine.remove(message.request_id, message.num_tokens)
