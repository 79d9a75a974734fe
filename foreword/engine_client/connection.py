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

from foreword.engine_client.forkserver import ForkServer
from foreword.engine_client.heartbeat import HeartbeatPage, read_proc_stat
from foreword.engine_client.messages import HEARTBEAT_FD
from foreword.errors import ConfigError

__all__ = ["EngineProcess", "SendFailed"]

logger = logging.getLogger(__name__)

EXIT_TIMEOUT_S: Final = 10.0  # for a process to be gone
EXIT_CODE_TIMEOUT_S: Final = 1.0  # for its exit code to be told
POLL_S: Final = 0.05
NO_HEARTBEAT_S: Final = 1.0  # without a sign of life: it would not hear that it is to go


@dataclass(frozen=True, slots=True)
class SendFailed:
    """Received instead of an answer: what could not be said to the engine, and why. Nothing that would follow is said."""

    message: Any
    error: Exception


class EngineProcess:
    """Talks to one engine over a socket pair. One thread reads, another writes: neither ever holds up the event loop.

    ended     set when it has hung up; all that it said has been handed over by then
    received  called in the event loop with this child and each message
    ready_s   time.monotonic() from which on it took requests; infinite: it does not yet
    """

    def __init__(
        self,
        pid: int,
        sock: socket.socket,
        heartbeat: HeartbeatPage,
        on_message: Callable[[EngineProcess, Any], None],
    ) -> None:
        self.pid = pid
        self.heartbeat = heartbeat
        self.exited = asyncio.Event()
        self.ready_s = float("inf")
        self.has_vocabulary = False
        self._exit_reason: str | None = None
        self._is_reaping = self._is_reaped = False
        self._on_message = on_message
        self._connection = Connection(sock.detach())
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        loop = asyncio.get_running_loop()
        self._threads = [
            threading.Thread(target=self._read, args=(loop,), name="engine-read", daemon=True),
            threading.Thread(target=self._write, args=(loop,), name="engine-write", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    async def launch(
        cls, fork_server: ForkServer, on_message: Callable[[EngineProcess, Any], None]
    ) -> EngineProcess:
        """Start a process. Raises ConfigError if that cannot be done."""
        with contextlib.ExitStack() as stack:
            try:
                ours, theirs = map(stack.enter_context, socket.socketpair())
                board = stack.enter_context(HeartbeatPage.create())
                socket.send_fds(ours, [HEARTBEAT_FD], [board.fd])
                pid = await fork_server.spawn(theirs.fileno())
            except OSError as error:
                raise ConfigError(f"the engine process could not be started: {error}") from error
            theirs.close()
            stack.pop_all()
        return cls(pid, ours, board, on_message)

    @property
    def exit_reason(self) -> str | None:
        """Why it ended, as far as that is known before it is buried."""
        return self._exit_reason

    def send(self, message: Any, make_first: Callable[[], Any] | None = None) -> None:
        """Never waits. `first` is called in the thread that writes, and its result sent before the message."""
        self._outbox.put((message, make_first))

    def kill(self, reason: str) -> None:
        """End it and all that it started, whatever they do."""
        if self.exited.is_set():
            return
        self._exit_reason = self._exit_reason or reason
        self._kill()
        self._disconnect()  # a process that cannot die, for its device does not answer, is left behind

    def skip_wait(self) -> None:
        """It is on its way out, and is not to be waited for."""
        if not self._is_reaped:
            self._kill()

    async def reap(self, fork_server: ForkServer, timeout_s: float = EXIT_CODE_TIMEOUT_S) -> str:
        """Wait until the process, which hung up, is gone and nothing is left of it but the board; returns why, in words."""
        if self._exit_reason is not None and self._is_reaping:
            return self._exit_reason
        self._is_reaping = True
        self._outbox.put(None)
        code = await fork_server.exit_code(self.pid, timeout_s)
        if code is None:
            self._kill()
            code = await self._wait_killed(fork_server)
        self._is_reaped = True
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        self._connection.close()
        self.heartbeat.close()
        self._exit_reason = self._exit_reason or _describe_exit(code)
        return self._exit_reason

    async def _wait_killed(self, fork_server: ForkServer) -> int | None:
        """How it ended, once it has. What holds much memory needs a while; a spawner that is stopped is not waited for."""
        for _ in range(int(EXIT_TIMEOUT_S / POLL_S)):
            if _has_exited(self.pid):
                code = await fork_server.exit_code(self.pid, EXIT_CODE_TIMEOUT_S)
                if code is None:
                    fork_server.reset()
                return code
            await asyncio.sleep(POLL_S)
        return None

    async def close(self, fork_server: ForkServer, force: bool = False) -> None:
        """Make an end: it is asked to go, and killed if it does not, or would not hear it."""
        if force or self.is_unresponsive():
            self.kill("it was to end, and did not answer")
        self._disconnect()
        await self.exited.wait()
        await self.reap(fork_server, EXIT_TIMEOUT_S)

    def is_unresponsive(self) -> bool:
        """Whether it gave signs of life and does not any more."""
        seen_s = self.heartbeat.read().heartbeat_s
        return bool(seen_s) and time.monotonic() - seen_s >= NO_HEARTBEAT_S

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _disconnect(self) -> None:
        with contextlib.suppress(OSError):
            ours = socket.socket(
                fileno=self._connection.fileno()
            )  # not another descriptor: there may be no more to be had
            try:
                ours.shutdown(socket.SHUT_RDWR)
            finally:
                ours.detach()

    # Threads

    def _write(self, loop: asyncio.AbstractEventLoop) -> None:
        while (item := self._outbox.get()) is not None:
            try:
                said = [ForkingPickler.dumps(message) for message in _with_first(*item)]
            except Exception as error:
                logger.exception("a message to the engine cannot be said")
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._on_message, self, SendFailed(item[0], error))
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
                    loop.call_soon_threadsafe(self._on_message, self, self._connection.recv())
            except (EOFError, OSError):
                pass  # perhaps in the middle of a message
            except Exception:
                logger.exception("what the engine says cannot be read")
            loop.call_soon_threadsafe(self.exited.set)


def _with_first(message: Any, make_first: Callable[[], Any] | None) -> Sequence[Any]:
    return (message,) if make_first is None else (make_first(), message)


def _has_exited(pid: int) -> bool:
    """Nothing is left of a process, or only what its parent has not asked for yet."""
    try:
        os.kill(pid, 0)
        return read_proc_stat(pid)[0] == "Z"
    except OSError:
        return True


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "it is gone"
    if code >= 0:
        return f"it ended with exit code {code}; its last words are above"
    name = signal.strsignal(-code) or "a signal"
    return f"it ended by signal {-code} ({name})" + ("; was memory short?" if -code == signal.SIGKILL else "")
