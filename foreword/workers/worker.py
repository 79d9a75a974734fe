"""The side of a worker process: limits its memory and CPU time, then handles jobs until the pool hangs up."""

from __future__ import annotations

import gc
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
# Objects that jobs may leave before a garbage collection, which runs between jobs: what a job makes is alive
# while it runs, and Python's collections took half of the CPU time of a long conversation.
GC_THRESHOLD: Final = 100_000

_cpu_s = _cpu_s_per_mb = 0.0  # limits given by the setup


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The first message to a worker."""

    value: Any  # passed to `start`
    cpu_s: float
    cpu_s_per_mb: float
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
    global _cpu_s, _cpu_s_per_mb
    _cpu_s, _cpu_s_per_mb = setup.cpu_s, setup.cpu_s_per_mb
    handle = start(setup.value)
    gc.freeze()
    gc.disable()
    try:
        _confine(setup.num_bytes)
        connection.send_bytes(READY)
        while True:
            signal.setitimer(signal.ITIMER_PROF, setup.cpu_s)  # CPU time: stands still in recv()
            handle(connection)
            if gc.get_count()[0] > GC_THRESHOLD:
                signal.setitimer(signal.ITIMER_PROF, 0.0)  # the reply is sent: this is no job's time
                gc.collect()
    except (EOFError, OSError):
        return  # the pool is gone


def receive_job(connection: Connection) -> bytes:
    """A job, which from now on may take CPU time in proportion to its bytes: JobLimits.cpu_s_per_mb."""
    data = connection.recv_bytes()
    signal.setitimer(signal.ITIMER_PROF, _cpu_s + _cpu_s_per_mb * len(data) / 1e6)
    return data


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
