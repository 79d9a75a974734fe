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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any, Final

from foreword.engine.board import Board
from foreword.engine.messages import BOARD
from foreword.engine.spawning import Spawner
from foreword.engine.watch import stat_of
from foreword.errors import ConfigError

__all__ = ["Child", "Unsaid"]

logger = logging.getLogger(__name__)

END_S: Final = 10.0  # for a process to be gone
TOLD_S: Final = 1.0  # for its exit code to be told
LOOK_S: Final = 0.05
SILENT_S: Final = 1.0  # without a sign of life: it would not hear that it is to go


@dataclass(frozen=True, slots=True)
class Unsaid:
    """Received instead of an answer: what could not be said to the engine, and why. Nothing that would follow is said."""

    message: Any
    error: Exception


class Child:
    """Talks to one engine over a socket pair. One thread reads, another writes: neither ever holds up the event loop.

    ended     set when it has hung up; all that it said has been handed over by then
    received  called in the event loop with this child and each message
    ready_s   time.monotonic() from which on it took requests; infinite: it does not yet
    """

    def __init__(self, pid: int, ours: socket.socket, board: Board, received: Callable[[Child, Any], None]) -> None:
        self.pid = pid
        self.board = board
        self.ended = asyncio.Event()
        self.ready_s = float("inf")
        self.knows_vocabulary = False
        self._why: str | None = None
        self._buried = self._gone = False
        self._received = received
        self._connection = Connection(ours.detach())
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        loop = asyncio.get_running_loop()
        self._threads = [
            threading.Thread(target=self._read, args=(loop,), name="engine-read", daemon=True),
            threading.Thread(target=self._write, args=(loop,), name="engine-write", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    async def launch(cls, spawner: Spawner, received: Callable[[Child, Any], None]) -> Child:
        """Start a process. Raises ConfigError if that cannot be done."""
        with contextlib.ExitStack() as stack:
            try:
                ours, theirs = map(stack.enter_context, socket.socketpair())
                board = stack.enter_context(Board.create())
                socket.send_fds(ours, [BOARD], [board.fd])
                pid = await spawner.spawn(theirs.fileno())
            except OSError as error:
                raise ConfigError(f"the engine process could not be started: {error}") from error
            theirs.close()
            stack.pop_all()
        return cls(pid, ours, board, received)

    @property
    def why(self) -> str | None:
        """Why it ended, as far as that is known before it is buried."""
        return self._why

    def send(self, message: Any, first: Callable[[], Any] | None = None) -> None:
        """Never waits. `first` is called in the thread that writes, and its result sent before the message."""
        self._outbox.put((message, first))

    def kill(self, why: str) -> None:
        """End it and all that it started, whatever they do."""
        if self.ended.is_set():
            return
        self._why = self._why or why
        self._kill()
        self._hang_up()  # a process that cannot die, for its device does not answer, is left behind

    def hurry(self) -> None:
        """It is on its way out, and is not to be waited for."""
        if not self._gone:
            self._kill()

    async def bury(self, spawner: Spawner, patience_s: float = TOLD_S) -> str:
        """Wait until the process, which hung up, is gone and nothing is left of it but the board; returns why, in words."""
        if self._why is not None and self._buried:
            return self._why
        self._buried = True
        self._outbox.put(None)
        code = await spawner.exit_code(self.pid, patience_s)
        if code is None:
            self._kill()
            code = await self._killed(spawner)
        self._gone = True
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        self._connection.close()
        self.board.close()
        self._why = self._why or _in_words(code)
        return self._why

    async def _killed(self, spawner: Spawner) -> int | None:
        """How it ended, once it has. What holds much memory needs a while; a spawner that is stopped is not waited for."""
        for _ in range(int(END_S / LOOK_S)):
            if _is_gone(self.pid):
                code = await spawner.exit_code(self.pid, TOLD_S)
                if code is None:
                    spawner.distrust()
                return code
            await asyncio.sleep(LOOK_S)
        return None

    async def close(self, spawner: Spawner, at_once: bool = False) -> None:
        """Make an end: it is asked to go, and killed if it does not, or would not hear it."""
        if at_once or self.is_silent():
            self.kill("it was to end, and did not answer")
        self._hang_up()
        await self.ended.wait()
        await self.bury(spawner, END_S)

    def is_silent(self) -> bool:
        """Whether it gave signs of life and does not any more."""
        seen_s = self.board.glance().sign_of_life_s
        return bool(seen_s) and time.monotonic() - seen_s >= SILENT_S

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            ours = socket.socket(fileno=self._connection.fileno())  # not another descriptor: there may be no more to be had
            try:
                ours.shutdown(socket.SHUT_RDWR)
            finally:
                ours.detach()

    # Threads

    def _write(self, loop: asyncio.AbstractEventLoop) -> None:
        while (item := self._outbox.get()) is not None:
            try:
                said = [ForkingPickler.dumps(message) for message in _in_full(*item)]
            except Exception as error:
                logger.exception("a message to the engine cannot be said")
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._received, self, Unsaid(item[0], error))
                return
            try:
                for one in said:
                    self._connection.send_bytes(one)
            except OSError:
                return  # a dead engine is noticed by the reader

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


def _in_full(message: Any, first: Callable[[], Any] | None) -> Sequence[Any]:
    return (message,) if first is None else (first(), message)


def _is_gone(pid: int) -> bool:
    """Nothing is left of a process, or only what its parent has not asked for yet."""
    try:
        os.kill(pid, 0)
        return stat_of(pid)[0] == "Z"
    except OSError:
        return True


def _in_words(code: int | None) -> str:
    if code is None:
        return "it is gone"
    if code >= 0:
        return f"it ended with exit code {code}; its last words are above"
    name = signal.strsignal(-code) or "a signal"
    return f"it ended by signal {-code} ({name})" + ("; was memory short?" if -code == signal.SIGKILL else "")
