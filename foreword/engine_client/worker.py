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

from foreword.core.request import Request
from foreword.core.structured import Vocabulary
from foreword.engine.engine import Engine
from foreword.engine.loader import load
from foreword.engine_client.heartbeat import HeartbeatPage
from foreword.engine_client.messages import (
    HEARTBEAT_FD,
    AddImage,
    DropImage,
    EngineReady,
    EngineStartFailed,
    Init,
    LoadProgress,
    RemoveRequest,
)
from foreword.errors import ForewordError
from foreword.utils.logging import set_up_logging

__all__ = ["main"]

logger = logging.getLogger(__name__)

IDLE_CHECK_S = 1.0  # without a request for so long, the engine checks its own bookkeeping


def _noop(engine: Engine) -> None:
    """Tests prepare engines for faults."""


def main(fd: int, prepare: Callable[[Engine], None] = _noop) -> int:
    """Serve the client at the other end of `fd`; returns the exit code. `prepare` sees the engine before its first step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client decides when to stop
    faulthandler.enable()  # a crash in native code says where
    try:
        with _receive_heartbeat_page(fd) as board, Connection(fd) as connection:
            return _run(connection, board, prepare)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0  # the client is gone, and with it the reason to be
    except Exception:
        logger.exception("the engine ends: after this error its state is not to be trusted")
        return 1


def _receive_heartbeat_page(fd: int) -> HeartbeatPage:
    """The client sends it before anything else."""
    with socket.socket(fileno=fd) as ours:
        try:
            message, fds, _, _ = socket.recv_fds(ours, len(HEARTBEAT_FD), 1)
        finally:
            ours.detach()
    if not message:
        raise EOFError
    return HeartbeatPage(fds[0])


def _run(connection: Connection, heartbeat: HeartbeatPage, prepare: Callable[[Engine], None]) -> int:
    heartbeat.start()
    start: Init = connection.recv()
    set_up_logging(start.config.log_level, "%(levelname)s %(name)s: %(message)s")

    def progress(done: int, total: int) -> None:
        connection.send(LoadProgress(done, total))

    try:
        engine = load(start.config, start.never_sampled_ids, start.resolved, progress, start.timings)
    except ForewordError as error:
        connection.send(EngineStartFailed(error))
        return 1
    prepare(engine)
    engine.on_batch = heartbeat.set_requests
    heartbeat.set_idle()
    connection.send(EngineReady(engine.info, engine.proposer.timings))
    try:
        _serve(engine, connection, heartbeat)
    finally:
        engine.close()


def _serve(engine: Engine, connection: Connection, heartbeat: HeartbeatPage) -> NoReturn:
    """Step while there is work, listen while there is none, until the client hangs up."""
    while True:
        if engine.idle:
            _wait_for_message(engine, connection, heartbeat)
        while connection.poll():
            _handle(engine, connection.recv(), heartbeat)
        heartbeat.begin_step()
        connection.send(engine.step())


def _wait_for_message(engine: Engine, connection: Connection, heartbeat: HeartbeatPage) -> None:
    """Wait for a message."""
    heartbeat.set_idle()
    if not connection.poll(IDLE_CHECK_S):
        engine.check()
        connection.poll(None)


def _handle(
    engine: Engine,
    message: Request | RemoveRequest | Vocabulary | AddImage | DropImage,
    heartbeat: HeartbeatPage,
) -> None:
    if isinstance(message, Request):
        heartbeat.set_busy((engine.num_submitted,))
        engine.submit(message)
    elif isinstance(message, Vocabulary):
        heartbeat.set_busy((engine.num_submitted,))  # the request that needs it follows
        engine.set_vocabulary(message)
    elif isinstance(message, AddImage):
        heartbeat.set_busy((engine.num_submitted,))  # likewise
        engine.encoder.add_pixels(message.digest, message.pixels)
    elif isinstance(message, DropImage):
        heartbeat.set_busy(())
        engine.encoder.drop_pixels(message.digest)
    else:
        heartbeat.set_busy(())
        engine.remove(message.request_id, message.num_tokens)
