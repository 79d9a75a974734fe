"""Constraints are tried out before they reach the engine: in a process that may fall, at most once each.

The API process never compiles a grammar. It asks workers, each under limits of time, memory and stack; a worker that dies
of a grammar takes nobody along, and its grammar is a 400.
"""

from __future__ import annotations

import asyncio
import hashlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Final

from foreword.core.structured import StructuredOutput, Vocabulary
from foreword.errors import InvalidRequest, Overloaded, RequestFailed
from foreword.grammar import limits
from foreword.grammar.check_worker import READY

__all__ = ["GrammarChecker"]

WORKER: Final = ("-m", "foreword.grammar.check_worker")
TOO_SLOW: Final = f"it takes more than {limits.COMPILE_CPU_S:g} s to compile"
TOO_LARGE: Final = "it is too large or nested too deep to be compiled"
MAX_REPLY_BYTES: Final = 1 << 16


class GrammarChecker:
    """Says whether a constraint can be served. May be used from any thread and any event loop.

    vocabulary  called once, in a thread, when the first constraint comes
    """

    def __init__(
        self, load_vocabulary: Callable[[], Vocabulary], num_workers: int = limits.NUM_WORKERS
    ) -> None:
        self._executor = ThreadPoolExecutor(num_workers, "grammar-check")
        self._workers = [_Worker(load_vocabulary) for _ in range(num_workers)]
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._lock = threading.Lock()
        self._verdict_cache: OrderedDict[bytes, str] = OrderedDict()
        self._pending: dict[bytes, Future[str]] = {}

    async def check(self, structured: StructuredOutput) -> None:
        """Raises InvalidRequest, which names the field and says why; Overloaded if too many wait for a worker."""
        _raise_if_rejected(structured, await asyncio.shield(asyncio.wrap_future(self._submit(structured))))

    def check_sync(self, structured: StructuredOutput) -> None:
        """The same where there is no event loop."""
        _raise_if_rejected(structured, self._submit(structured).result())

    def close(self) -> None:
        """End the workers; checks that wait are cancelled."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()
        self._executor.shutdown()
        for worker in self._workers:
            worker.close()

    def _submit(self, structured: StructuredOutput) -> Future[str]:
        """The reason against it, empty if there is none; asked once of a worker, whoever waits for it."""
        key = _cache_key(structured)
        with self._lock:
            if key in self._verdict_cache:
                self._verdict_cache.move_to_end(key)
                known: Future[str] = Future()
                known.set_result(self._verdict_cache[key])
                return known
            if key not in self._pending:
                self._pending[key] = self._executor.submit(
                    self._run, key, structured, time.monotonic() + limits.QUEUE_TIMEOUT_S
                )
            return self._pending[key]

    def _run(self, key: bytes, structured: StructuredOutput, deadline: float) -> str:
        try:
            if time.monotonic() > deadline:
                raise Overloaded(
                    f"{structured.field}: too many grammars wait to be compiled", structured.field
                )
            verdict = self._check(structured)
            with self._lock:
                self._verdict_cache[key] = verdict
                while len(self._verdict_cache) > limits.MAX_CACHED_VERDICTS:
                    self._verdict_cache.popitem(last=False)
            return verdict
        finally:
            with self._lock:
                del self._pending[key]

    def _check(self, structured: StructuredOutput) -> str:
        worker = self._idle.get()  # there are as many as threads
        try:
            return worker.check(structured)
        finally:
            self._idle.put(worker)


class _Worker:
    """One worker process, started when it is needed. One thread at a time uses it."""

    def __init__(self, load_vocabulary: Callable[[], Vocabulary]) -> None:
        self._load_vocabulary = load_vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def check(self, structured: StructuredOutput) -> str:
        """The reason against a constraint, empty if there is none.

        Raises RequestFailed if no worker can be had, Overloaded where the worker's end says nothing about the constraint.
        """
        connection = self._connect()
        try:
            connection.send(structured)
            if connection.poll(limits.COMPILE_WALL_S):
                return connection.recv_bytes(MAX_REPLY_BYTES).decode()
        except (EOFError, OSError):
            return _exit_reason(structured, self._reap())
        return _exit_reason(structured, self._reap(kill=True))

    def kill(self) -> None:
        """Let whoever waits for it go on; from any thread."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        if self._connection is not None:
            self._reap(kill=True)

    def _connect(self) -> Connection:
        """To a process that is alive: one that ended while nobody needed it is replaced."""
        if self._connection is not None and self._process is not None and self._process.poll() is not None:
            self._reap()
        return self._connection or self._start()

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        command = [sys.executable, *WORKER, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,
            )
        self._connection = Connection(ours.detach())
        try:
            self._connection.send(self._load_vocabulary())
            if (
                self._connection.poll(limits.START_WALL_S)
                and self._connection.recv_bytes(MAX_REPLY_BYTES) == READY
            ):
                return self._connection
        except (EOFError, OSError):
            pass
        self._reap(kill=True)
        raise RequestFailed("the process that checks grammars does not start; its last words are above")

    def _reap(self, kill: bool = False) -> int:
        """Clear away a process that is of no use any more; returns its exit code."""
        assert self._process is not None and self._connection is not None
        self._connection.close()
        self._connection = None
        if kill:
            self._process.kill()
        return self._process.wait()


def _exit_reason(structured: StructuredOutput, code: int) -> str:
    """What a worker died of. Only its own limits speak against the constraint."""
    if code == -signal.SIGPROF:
        return TOO_SLOW
    if code == -signal.SIGKILL:  # by us, who waited long enough, or by a machine without memory
        raise Overloaded(
            f"{structured.field}: the machine is too busy to compile it; try again later", structured.field
        )
    return TOO_LARGE


def _raise_if_rejected(structured: StructuredOutput, verdict: str) -> None:
    if verdict:
        raise InvalidRequest(f"{structured.field}: {verdict}", structured.field)


def _cache_key(structured: StructuredOutput) -> bytes:
    """Equal for constraints that mean the same grammar; short, whatever their size."""
    text = f"{structured.constraint_type} {structured.whitespace} {structured.text}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=20).digest()
