"""The side of a worker process: limits its memory and CPU time, then handles jobs until the pool hangs up."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

READY: Final = b"ready"
STATM: Final = "/proc/self/statm"


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The first message to a worker."""

    value: Any  # passed to `start`
    cpu_s: float
    num_bytes: int
    stack_bytes: int


def serve(fd: int, start: Callable[[Any], Callable[[Connection], None]]) -> int:
    """Serve the pool at the other end of `fd`; returns the exit code.

    `start(setup)` must load all that jobs need: no file can be opened after it. It returns the job handler,
    which reads a job from the connection and sends the reply.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool decides when to stop
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    connection = Connection(fd)
    try:
        setup: WorkerSetup = connection.recv()
    except (EOFError, OSError):
        return 0
    threading.stack_size(setup.stack_bytes)
    thread = threading.Thread(target=_serve_jobs, args=(connection, setup, start))
    thread.start()
    thread.join()
    return 0


def _serve_jobs(
    connection: Connection, setup: WorkerSetup, start: Callable[[Any], Callable[[Connection], None]]
) -> None:
    handle = start(setup.value)
    try:
        _confine(setup.num_bytes)
        connection.send_bytes(READY)
        while True:
            limit_cpu(setup.cpu_s)  # stands still in recv()
            handle(connection)
    except (EOFError, OSError):
        return  # the pool is gone


def limit_cpu(cpu_s: float) -> None:
    """Limit the CPU time of this job from now on; a handler calls it once it knows the job."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _confine(num_bytes: int) -> None:
    """Limit memory to `num_bytes` more; forbid core dumps, new files and sockets; discard stderr."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        with open(STATM, encoding="ascii") as file:
            num_bytes += int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        pass  # no /proc: the limit is absolute
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
