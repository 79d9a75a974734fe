"""A fork server: it imports everything once, has one thread, and forks an engine in milliseconds.

    client -- socket of the engine --> fork server -- fork --> engine
    client <-- (pid, RUNNING); later (pid, exit code) -- fork server

Started as `python -m foreword.engine_client.forkserver FD ENTRY_MODULE`; engines run ENTRY_MODULE.main(fd).
The fork server exits when the client hangs up, an engine when its own client does. Importing torch takes
a second: `foreword serve` imports its own libraries meanwhile, and a restarted engine is a fork.
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
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final

from foreword.errors import ConfigError
from foreword.utils.threads import run_in_own_thread

ENTRY_MODULE: Final = "foreword.engine_client.engine_main"
STATUS: Final = struct.Struct("ii")  # pid; exit code, negative for a signal
RUNNING: Final = 1 << 30  # instead of an exit code
ENGINE_FD: Final = b"e"  # sent along with a file descriptor
THREADS_DIR: Final = Path("/proc/self/task")
# OMP_WAIT_POLICY: spinning torch threads take cores from the threads they wait for.
CHILD_ENV: Final = {"OMP_WAIT_POLICY": "PASSIVE"}
SINGLE_THREAD_ENV: Final = {"OPENBLAS_NUM_THREADS": "1"}  # numpy would start threads at import
FORK_TIMEOUT_S: Final = 10.0  # limits a fork, once all imports are done


def main(fd: int, entry_module: str) -> int:
    """Serve the client at the other end of `fd`; returns the exit code, also in each forked engine."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client decides when to stop
    gc.disable()  # imports make little garbage: its collection took a seventh of their time
    module = importlib.import_module(entry_module)
    gc.freeze()  # engines share the pages of imported objects: no garbage collection may touch them
    gc.enable()
    # A fork copies one thread only: with more, start a new interpreter, which is slower.
    can_fork = THREADS_DIR.is_dir() and len(os.listdir(THREADS_DIR)) == 1
    with socket.socket(fileno=fd) as control:
        engine_fd = _ForkLoop(control).serve()
    if engine_fd is None:
        return 0
    if not can_fork:
        os.set_inheritable(engine_fd, True)
        code = f"import sys, {entry_module} as entry; sys.exit(entry.main({engine_fd}))"
        os.execv(sys.executable, [sys.executable, "-c", code])
    exit_code: int = module.main(engine_fd)
    return exit_code


class _ForkLoop:
    """Forks on request and reports exits."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._pids: set[int] = set()

    def serve(self) -> int | None:
        """Returns the socket in each engine, and None in the fork server once the client hung up."""
        with _sigchld_socket() as sigchld, selectors.DefaultSelector() as selector:
            for source in (self._control, sigchld):
                selector.register(source, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if sigchld in ready:
                    sigchld.recv(4096)
                    self._reap()
                if self._control in ready:
                    message, fds, _, _ = socket.recv_fds(self._control, len(ENGINE_FD), 1)
                    if not message:
                        return None
                    if self._fork(fds[0]):
                        return fds[0]

    def _fork(self, engine_fd: int) -> bool:
        """True in the engine."""
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            return True
        with contextlib.suppress(OSError):  # the engine was faster, or is gone
            os.setpgid(pid, pid)
        os.close(engine_fd)
        self._pids.add(pid)
        self._send_status(pid, RUNNING)
        return False

    def _reap(self) -> None:
        for pid in tuple(self._pids):
            exited, status = os.waitpid(pid, os.WNOHANG)
            if exited:
                self._pids.discard(pid)
                self._send_status(pid, os.waitstatus_to_exitcode(status))

    def _send_status(self, pid: int, code: int) -> None:
        with contextlib.suppress(ConnectionError):  # serve() notices that the client is gone
            self._control.send(STATUS.pack(pid, code))


@contextlib.contextmanager
def _sigchld_socket() -> Iterator[socket.socket]:
    """A socket that becomes readable when a child exits."""
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


class ForkServer:
    """The client's side. The process starts with start() or the first engine, and again after it died."""

    def __init__(self, entry_module: str = ENTRY_MODULE) -> None:
        self._entry_module = entry_module  # its main(fd) is an engine
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_warm = False  # all imports are done
        self._spawn_lock = asyncio.Lock()  # clients may share the process
        self._pending_pid: asyncio.Future[int] | None = None
        self._exit_codes: dict[int, asyncio.Future[int | None]] = {}

    def start(self) -> None:
        """Start the process, also before there is an event loop. Raises OSError."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        module = "foreword.engine_client.forkserver"
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, str(theirs.fileno()), self._entry_module],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    process_group=0,
                    env={**CHILD_ENV, **os.environ, **SINGLE_THREAD_ENV},
                )
        except OSError:
            self._control.close()
            self._control = None
            raise

    def __enter__(self) -> ForkServer:
        """Start the process; at the end kill it, unless close() did. Raises ConfigError."""
        try:
            self.start()
        except OSError as error:
            raise ConfigError(f"the engine process could not be started: {error}") from None
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._control is not None:
            self._control.close()

    async def spawn(self, engine_fd: int) -> int:
        """Start an engine on this end of a socket; returns its pid. Raises ConfigError or OSError."""
        async with self._spawn_lock:
            return await self._spawn(engine_fd)

    async def _spawn(self, engine_fd: int) -> int:
        for _ in range(2):
            if self._control is None:
                await self._kill()
                self.start()
            assert self._control is not None
            asyncio.get_running_loop().add_reader(self._control, self._on_readable)
            was_warm = self._is_warm
            with contextlib.suppress(OSError, TimeoutError):  # the fork server died, or hangs
                return await self._request_fork(engine_fd, FORK_TIMEOUT_S if was_warm else None)
            self.reset()
            if not was_warm:
                break
        raise ConfigError("the engine process ended before it could load; see its log above")

    async def exit_code(self, pid: int, timeout_s: float) -> int | None:
        """Wait for an engine's exit code, negative for a signal; None on timeout or if it is unknown."""
        exited = self._exit_codes.get(pid)
        if exited is None:
            return None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                code = await asyncio.shield(exited)
                self._exit_codes.pop(pid, None)
                return code
        return None

    def reset(self) -> None:
        """Disconnect: the next engine comes from a new fork server, and pending exit codes are unknown."""
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
        self._is_warm = False
        if self._pending_pid is not None and not self._pending_pid.done():
            self._pending_pid.set_exception(ConnectionResetError())
        for exited in self._exit_codes.values():
            if not exited.done():
                exited.set_result(None)

    async def close(self) -> None:
        """Stop the fork server; its engines go on."""
        self.reset()
        await self._kill()

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await run_in_own_thread(process.wait)

    async def _request_fork(self, engine_fd: int, timeout_s: float | None) -> int:
        assert self._control is not None
        self._pending_pid = asyncio.get_running_loop().create_future()
        socket.send_fds(self._control, [ENGINE_FD], [engine_fd])
        async with asyncio.timeout(timeout_s):
            pid = await self._pending_pid
        self._is_warm = True
        return pid

    def _on_readable(self) -> None:
        assert self._control is not None
        try:
            status = self._control.recv(STATUS.size)
        except BlockingIOError:
            return
        except OSError:
            status = b""
        if not status:
            self.reset()
            return
        pid, code = STATUS.unpack(status)
        if code == RUNNING:
            self._exit_codes[pid] = asyncio.get_running_loop().create_future()
            if self._pending_pid is not None and not self._pending_pid.done():
                self._pending_pid.set_result(pid)
        elif not self._exit_codes[pid].done():
            self._exit_codes[pid].set_result(code)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
