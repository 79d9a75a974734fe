"""A pool of subprocesses for work that a user's input may crash or stall: grammars, images, chat templates.

A worker runs `python -m MODULE FD`, where MODULE calls `workers.worker.serve`. It handles one job at a time.
"""

from __future__ import annotations

import gc
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from multiprocessing.connection import Connection
from typing import Any

from foreword.errors import ForewordError, Overloaded, RequestFailed, ShuttingDown
from foreword.workers.worker import READY, WorkerSetup

EXIT_TIMEOUT_S = 5.0  # longest time between a worker's hang-up and its exit


class JobFailed(Exception):
    """The job ended its worker: it exceeded the CPU time, or it crashed. The text is the reason."""


@dataclass(frozen=True, slots=True)
class JobLimits:
    """Limits of each job of a pool."""

    cpu_s: float  # CPU time; above it the kernel ends the worker with SIGPROF
    wall_s: float  # wait for a reply: bounds stalls on an overloaded machine
    num_bytes: int  # address space beyond that of the started worker
    queue_timeout_s: float  # wait for an idle worker
    cpu_s_per_mb: float = 0.0  # CPU time beside cpu_s, for jobs that the worker reads by receive_job()
    start_timeout_s: float = 60.0
    stack_bytes: int = 0  # stack of the thread that runs the jobs; 0: the platform's default


def load_reply(data: bytes, bases: tuple[type, ...]) -> Any:
    """A worker's pickled reply of plain values and instances of `bases`, which this process has imported.

    A worker reads untrusted input: a compromised one must not run code in this process.
    Raises UnpicklingError for anything else.
    """
    with _pause_gc:
        return _ReplyUnpickler(data, bases).load()


class _GCPause:
    """No garbage collection in any thread meanwhile: each run visits all that is made, which is all alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        with self._lock:
            if self._num_users == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._num_users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0 and self._was_enabled:
                gc.enable()


_pause_gc = _GCPause()


class _ReplyUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, bases: tuple[type, ...]) -> None:
        super().__init__(BytesIO(data))
        self._bases = bases

    def find_class(self, module: str, name: str) -> type:
        found = getattr(sys.modules.get(module), name, None)
        if isinstance(found, type) and issubclass(found, self._bases):
            return found
        raise pickle.UnpicklingError(f"a worker replied with {module}.{name}")


class WorkerPool:
    """Up to `num_workers` processes, started on demand and replaced when they die. Thread-safe."""

    def __init__(
        self, module: str, verb: str, load: Callable[[], Any], limits: JobLimits, num_workers: int
    ) -> None:
        self.module = module
        self.verb = verb  # names the job in error messages: "decode", "compile"
        self.load = load  # returns the picklable setup of a worker; called at each start
        self.limits = limits
        self.closed = False
        self.workers = [Worker(self) for _ in range(num_workers)]
        self._idle: queue.LifoQueue[Worker] = queue.LifoQueue()  # a worker that runs comes first
        for worker in self.workers:
            self._idle.put(worker)

    @contextmanager
    def worker(self, field: str) -> Iterator[Worker]:
        """A worker for one job; `field` of the request is named in errors.

        An exception inside the block kills the worker, because its reply must not reach the next job.
        Raises JobFailed; Overloaded if no worker is free in time, or the worker was killed by no fault of the
        job; RequestFailed if no worker starts; ShuttingDown after `close`.
        """
        try:
            worker = self._idle.get(timeout=self.limits.queue_timeout_s)
        except queue.Empty:
            raise self.queue_timeout_error(field) from None
        try:
            with worker.lock:
                worker.connect()
                worker.job_bytes = 0
                try:
                    yield worker
                except TimeoutError:
                    raise self._exit_error(field, worker.reap(kill=True), worker.job_bytes) from None
                except (EOFError, OSError):
                    raise self._exit_error(field, worker.reap(), worker.job_bytes) from None
                except BaseException:
                    worker.reap(kill=True)
                    raise
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Kill the workers and wait for their exit; unfinished jobs raise ShuttingDown."""
        self.closed = True
        for worker in self.workers:
            worker.close()

    def queue_timeout_error(self, field: str) -> Overloaded:
        timeout_s = self.limits.queue_timeout_s
        message = f"{field}: no worker was free to {self.verb} it within {timeout_s:g} s; try again later"
        return Overloaded(message, field)

    def _exit_error(self, field: str, exit_code: int, job_bytes: int) -> JobFailed | ForewordError:
        if self.closed:
            return ShuttingDown("the server shuts down")
        if exit_code == -signal.SIGPROF:
            cpu_s = self.limits.cpu_s + self.limits.cpu_s_per_mb * job_bytes / 1e6
            return JobFailed(f"it takes more than {cpu_s:.3g} s of CPU time to {self.verb}")
        if exit_code == -signal.SIGKILL:  # the wall-time limit, or the kernel's OOM killer
            return Overloaded(f"{field}: the machine is too busy to {self.verb} it; try again later", field)
        return JobFailed(f"the worker crashed or ran out of memory when it tried to {self.verb} it")


class Worker:
    """One process of a pool. Used by one thread at a time, except `close`."""

    def __init__(self, pool: WorkerPool) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.job_bytes = 0  # sent for the job that runs
        self._connection: Connection | None = None
        self._pool = pool

    def send(self, data: bytes) -> None:
        assert self._connection is not None
        self.job_bytes = max(self.job_bytes, len(data))  # beside the job, a message is short
        self._connection.send_bytes(data)

    def receive(self, max_bytes: int) -> bytes:
        """The next message. Raises TimeoutError, or EOFError or OSError if the worker died."""
        assert self._connection is not None
        if not self._connection.poll(self._pool.limits.wall_s):
            raise TimeoutError
        return self._connection.recv_bytes(max_bytes)

    def connect(self) -> None:
        """Start the process if it does not run."""
        if self._pool.closed:
            raise ShuttingDown("the server shuts down")
        if self._connection is not None:
            assert self.process is not None
            if self.process.poll() is None:
                return
            self.reap()
        limits = self._pool.limits
        setup = WorkerSetup(
            self._pool.load(), limits.cpu_s, limits.cpu_s_per_mb, limits.num_bytes, limits.stack_bytes
        )
        try:
            self.process, connection = spawn(self._pool.module, stdout=subprocess.DEVNULL)
        except OSError as error:  # no processes or files left
            raise RequestFailed(f"the worker {self._pool.module} does not start: {error}") from None
        self._connection = Connection(connection.detach())
        try:
            if self._pool.closed:  # since close() killed the process before this one
                raise EOFError
            self._connection.send(setup)
            if self._connection.poll(limits.start_timeout_s):
                self._connection.recv_bytes(len(READY))
                return
        except (EOFError, OSError):
            pass
        except BaseException:  # an interrupt: READY must not reach the first job
            self.reap(kill=True)
            raise
        self.reap(kill=True)
        if self._pool.closed:
            raise ShuttingDown("the server shuts down")
        raise RequestFailed(f"the worker {self._pool.module} does not start; see its log above")

    def reap(self, kill: bool = False) -> int:
        """Wait for the process to end; returns its exit code."""
        assert self.process is not None and self._connection is not None
        self._connection.close()
        self._connection = None
        if not kill:
            try:
                return self.process.wait(EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                pass
        self.process.kill()
        return self.process.wait()

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()  # not under the lock: unblocks the thread that waits for a reply
        with self.lock:
            if self._connection is not None:
                self.reap(kill=True)


def spawn(
    module: str, stdout: int | None = None, environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start `python -m MODULE FD` in a process group of its own; returns our end of the socket FD too.

    `environment` holds defaults: variables of this process come first.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            process_group=0,
            env={**(environment or {}), **os.environ},
        )
    return process, ours
