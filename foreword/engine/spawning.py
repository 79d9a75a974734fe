"""The client's side of the spawner. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from typing import Final

from foreword.engine.spawner import ENGINE_FD, STATUS, RUNNING
from foreword.errors import ConfigError

__all__ = ["ForkServer"]

# Torch's threads that spin take the cores from those they wait for; a spawner must have no threads at all.
CHILD_ENV: Final = {"OMP_WAIT_POLICY": "PASSIVE"}
SINGLE_THREAD_ENV: Final = {"OPENBLAS_NUM_THREADS": "1"}
FORK_TIMEOUT_S: Final = 10.0  # for a fork, once the spawner is known to have imported all it needs


class ForkServer:
    """Starts engines, and knows how they ended. The process behind it is started with the first one, and again if it dies.

    entry  module whose main(fd) an engine runs
    """

    def __init__(self, entry_module: str) -> None:
        self._entry_module = entry_module
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_warm = False
        self._pending_pid: asyncio.Future[int] | None = None
        self._exits: dict[int, asyncio.Future[int | None]] = {}

    async def spawn(self, engine_fd: int) -> int:
        """Start an engine at this end of a socket; returns its pid. Raises ConfigError or OSError if that cannot be done."""
        for _ in range(2):
            if self._control is None:
                await self._reap()
                self._start()
            fresh = not self._is_warm
            with contextlib.suppress(OSError, TimeoutError):  # it is gone, or does not answer
                return await self._request_fork(engine_fd, None if fresh else FORK_TIMEOUT_S)
            self._disconnect()
            if fresh:
                break
        raise ConfigError("the engine process ended before it could load; its last words are above")

    async def exit_code(self, pid: int, timeout_s: float) -> int | None:
        """How an engine ended, once it has, negative for a signal; None if that is not to be learnt within `timeout_s`."""
        ended = self._exits.get(pid)
        if ended is None:
            return None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                code = await asyncio.shield(ended)
                self._exits.pop(pid, None)
                return code
        return None

    def reset(self) -> None:
        """It does not say what it should: the next engine is started by another one."""
        self._disconnect()

    async def close(self) -> None:
        """End the spawner; engines that it started are not its business."""
        self._disconnect()
        await self._reap()

    async def _reap(self) -> None:
        """It has nothing to lose."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait)

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        command = [sys.executable, "-m", "foreword.engine.spawner", str(theirs.fileno()), self._entry_module]
        environment = {**CHILD_ENV, **os.environ, **SINGLE_THREAD_ENV}
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, process_group=0, env=environment
                )
        except OSError:
            self._disconnect()
            raise
        asyncio.get_running_loop().add_reader(self._control, self._on_readable)

    async def _request_fork(self, engine_fd: int, timeout_s: float | None) -> int:
        assert self._control is not None
        self._pending_pid = asyncio.get_running_loop().create_future()
        socket.send_fds(self._control, [ENGINE_FD], [engine_fd])
        async with asyncio.timeout(timeout_s):
            pid = await self._pending_pid
        self._is_warm = True
        return pid

    def _on_readable(self) -> None:
        """News from the spawner."""
        assert self._control is not None
        try:
            news = self._control.recv(STATUS.size)
        except BlockingIOError:
            return
        except OSError:
            news = b""
        if news:
            self._on_status(*STATUS.unpack(news))
        else:
            self._disconnect()

    def _on_status(self, pid: int, code: int) -> None:
        if code == RUNNING:
            self._exits[pid] = asyncio.get_running_loop().create_future()
            if self._pending_pid is not None and not self._pending_pid.done():
                self._pending_pid.set_result(pid)
        elif not self._exits[pid].done():
            self._exits[pid].set_result(code)

    def _disconnect(self) -> None:
        """The spawner is gone, or is to go: nothing more is learnt from it."""
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
        self._is_warm = False
        if self._pending_pid is not None and not self._pending_pid.done():
            self._pending_pid.set_exception(ConnectionResetError())
        for ended in self._exits.values():
            if not ended.done():
                ended.set_result(None)
