"""Starts engines at once: a process that has imported all they need, has one thread, and forks.

    client -- the engine's end of its socket --> spawner -- fork --> engine
    client <-- pid; later pid and exit code ---- spawner

Started as `python -m foreword.engine_client.forkserver FD ENTRY`; ENTRY names the module whose main(fd) an engine runs. It ends
when the client hangs up, and leaves the engines alone: they end by themselves when their client does.

The client's side of the spawner. No torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

from foreword.errors import ConfigError

__all__ = ["ENGINE_FD", "RUNNING", "STATUS", "ForkServer", "main"]

STATUS: Final = struct.Struct("ii")  # pid; exit code, negative for a signal
RUNNING: Final = 1 << 30  # in place of an exit code
ENGINE_FD: Final = b"e"  # goes along with the file descriptor
THREADS_DIR = Path("/proc/self/task")


def main(fd: int, entry_module: str) -> int:
    """Serve the client at the other end of `fd`; returns the exit code of whichever process this has become."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client decides when to stop
    module = importlib.import_module(entry_module)
    gc.collect()
    gc.freeze()  # what is imported stays: engines share these pages, and never look for garbage in them
    whole = _num_threads() == 1  # a fork has no other thread than the one that forked
    with socket.socket(fileno=fd) as control:
        engine = _ForkLoop(control).serve()
    if engine is None:
        return 0
    run: Callable[[int], int] = module.main if whole else partial(_exec_interpreter, entry_module)
    return run(engine)


class _ForkLoop:
    """Forks on demand, and tells how the forks end."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._pids: set[int] = set()

    def serve(self) -> int | None:
        """Returns in each engine, with the file descriptor of its socket, and with None when the client is gone."""
        with _sigchld_socket() as wakened, selectors.DefaultSelector() as selector:
            for source in (self._control, wakened):
                selector.register(source, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if wakened in ready:
                    wakened.recv(4096)
                    self._reap()
                if self._control in ready:
                    message, fds, _, _ = socket.recv_fds(self._control, len(ENGINE_FD), 1)
                    if not message:
                        return None
                    if self._fork(fds[0]):
                        return fds[0]

    def _fork(self, fd: int) -> bool:
        """True in the engine."""
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            return True
        with contextlib.suppress(OSError):  # it has done so itself, or is gone already
            os.setpgid(pid, pid)
        os.close(fd)
        self._pids.add(pid)
        self._send_status(pid, RUNNING)
        return False

    def _reap(self) -> None:
        for pid in tuple(self._pids):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._pids.discard(pid)
                self._send_status(pid, os.waitstatus_to_exitcode(status))

    def _send_status(self, pid: int, code: int) -> None:
        with contextlib.suppress(ConnectionError):  # that the client is gone is seen where it is listened to
            self._control.send(STATUS.pack(pid, code))


@contextlib.contextmanager
def _sigchld_socket() -> Iterator[socket.socket]:
    """A socket on which something arrives whenever a child has ended."""
    receiver, sender = socket.socketpair()
    with receiver, sender:
        sender.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        try:
            yield receiver
        finally:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _num_threads() -> int | None:
    """Of this process; None where the system does not tell."""
    return len(os.listdir(THREADS_DIR)) if THREADS_DIR.is_dir() else None


def _exec_interpreter(entry_module: str, fd: int) -> NoReturn:
    """Become a new interpreter: slower, but whole whatever threads there were."""
    os.set_inheritable(fd, True)
    code = f"import sys, {entry_module} as entry; sys.exit(entry.main({fd}))"
    os.execv(sys.executable, [sys.executable, "-c", code])


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))


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
        command = [
            sys.executable,
            "-m",
            "foreword.engine_client.forkserver",
            str(theirs.fileno()),
            self._entry_module,
        ]
        environment = {**CHILD_ENV, **os.environ, **SINGLE_THREAD_ENV}
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    process_group=0,
                    env=environment,
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
