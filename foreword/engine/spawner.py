"""Starts engines at once: a process that has imported all they need, has one thread, and forks.

    client -- the engine's end of its socket --> spawner -- fork --> engine
    client <-- pid; later pid and exit code ---- spawner

Started as `python -m foreword.engine.spawner FD ENTRY`; ENTRY names the module whose main(fd) an engine runs. It ends
when the client hangs up, and leaves the engines alone: they end by themselves when their client does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

__all__ = ["ENGINE_FD", "STATUS", "RUNNING", "main"]

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
