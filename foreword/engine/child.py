"""One engine process as its client sees it, from its start to its end. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Final

from foreword.engine.board import Board
from foreword.engine.messages import BOARD
from foreword.engine.spawning import Spawner

__all__ = ["Child"]

logger = logging.getLogger(__name__)

END_S: Final = 10.0  # for a process to be gone


class Child:
    """Talks to one engine over a socket pair. One thread reads, another writes: neither ever holds up the event loop.

    ended     set when it has hung up; all that it said has been handed over by then
    received  called in the event loop with this child and each message
    began_s   time.monotonic() of its start
    """

    def __init__(self, pid: int, ours: socket.socket, board: Board, received: Callable[[Child, Any], None]) -> None:
        self.pid = pid
        self.board = board
        self.ended = asyncio.Event()
        self.began_s = time.monotonic()
        self.knows_vocabulary = False
        self._why: str | None = None
        self._buried = False
        self._received = received
        self._connection = Connection(ours.detach())
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._read, args=(asyncio.get_running_loop(),), name="engine-read", daemon=True),
            threading.Thread(target=self._write, name="engine-write", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    async def launch(cls, spawner: Spawner, received: Callable[[Child, Any], None]) -> Child:
        """Start a process. Raises ConfigError if that cannot be done."""
        ours, theirs = socket.socketpair()
        board = Board.create()
        try:
            with theirs:
                socket.send_fds(ours, [BOARD], [board.fd])
                pid = await spawner.spawn(theirs.fileno())
        except BaseException:
            ours.close()
            board.close()
            raise
        return cls(pid, ours, board, received)

    def send(self, message: Any) -> None:
        """Never waits. What is callable is called in the thread that writes, and its result sent."""
        self._outbox.put(message)

    def kill(self, why: str) -> None:
        """End it and all that it started, whatever they do."""
        if self.ended.is_set():
            return
        self._why = self._why or why
        self._kill()
        self._hang_up()  # a process that cannot die, for its device does not answer, is left behind

    async def bury(self, spawner: Spawner, patience_s: float = 1.0) -> str:
        """Wait until the process, which hung up, is gone and nothing is left of it but the board; returns why, in words."""
        if self._why is not None and self._buried:
            return self._why
        self._buried = True
        self._outbox.put(None)
        code = await spawner.exit_code(self.pid, patience_s)
        if code is None:
            self._kill()
            code = await spawner.exit_code(self.pid, END_S)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        self._connection.close()
        self.board.close()
        self._why = self._why or _in_words(code)
        return self._why

    async def close(self, spawner: Spawner) -> None:
        """Make an end: it is asked to go, and killed if it does not."""
        self._hang_up()
        await self.ended.wait()
        await self.bury(spawner, END_S)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as ours:
            ours.shutdown(socket.SHUT_RDWR)

    # Threads

    def _write(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                self._connection.send(message() if callable(message) else message)
        except OSError:
            pass  # a dead engine is noticed by the reader
        except Exception:
            logger.exception("what is to be said to the engine cannot be said; all that would follow waits for it")
            self._hang_up()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            try:
                while True:
                    loop.call_soon_threadsafe(self._received, self, self._connection.recv())
            except (EOFError, OSError):
                pass  # perhaps in the middle of a message
            except Exception:
                logger.exception("what the engine says cannot be read")
            loop.call_soon_threadsafe(self.ended.set)


def _in_words(code: int | None) -> str:
    if code is None:
        return "it is gone"
    if code >= 0:
        return f"it ended with exit code {code}; its last words are above"
    name = signal.strsignal(-code) or "a signal"
    return f"it ended by signal {-code} ({name})" + ("; was memory short?" if -code == signal.SIGKILL else "")
