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

from foreword.core.structured import StructuredOutput
from foreword.core.vocabulary import Vocabulary
from foreword.errors import InvalidRequest, Overloaded, RequestFailed
from foreword.grammar import limits
from foreword.grammar.worker import READY

__all__ = ["GrammarChecker"]

WORKER: Final = ("-m", "foreword.grammar.worker")
TOO_SLOW: Final = f"it takes more than {limits.COMPILE_CPU_S:g} s to compile"
TOO_LARGE: Final = "it is too large or nested too deep to be compiled"
MAX_REPLY: Final = 1 << 16


class GrammarChecker:
    """Says whether a constraint can be served. May be used from any thread and any event loop.

    vocabulary  called once, in a thread, when the first constraint comes
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], num_workers: int = limits.NUM_WORKERS) -> None:
        self._threads = ThreadPoolExecutor(num_workers, "grammar-check")
        self._all = [_Worker(vocabulary) for _ in range(num_workers)]
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._all:
            self._idle.put(worker)
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._pending: dict[bytes, Future[str]] = {}

    async def check(self, structured: StructuredOutput) -> None:
        """Raises InvalidRequest, which names the field and says why; Overloaded if too many wait for a worker."""
        _refuse(structured, await asyncio.shield(asyncio.wrap_future(self._ask(structured))))

    def check_now(self, structured: StructuredOutput) -> None:
        """The same where there is no event loop."""
        _refuse(structured, self._ask(structured).result())

    def close(self) -> None:
        """End the workers; checks that wait are cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._all:
            worker.kill()
        self._threads.shutdown()
        for worker in self._all:
            worker.close()

    def _ask(self, structured: StructuredOutput) -> Future[str]:
        """The reason against it, empty if there is none; asked once of a worker, whoever waits for it."""
        key = _key(structured)
        with self._lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
                known: Future[str] = Future()
                known.set_result(self._verdicts[key])
                return known
            if key not in self._pending:
                self._pending[key] = self._threads.submit(self._run, key, structured, time.monotonic() + limits.QUEUE_S)
            return self._pending[key]

    def _run(self, key: bytes, structured: StructuredOutput, deadline: float) -> str:
        try:
            if time.monotonic() > deadline:
                raise Overloaded(f"{structured.field}: too many grammars wait to be compiled", structured.field)
            verdict = self._check(structured)
            with self._lock:
                self._verdicts[key] = verdict
                while len(self._verdicts) > limits.MAX_VERDICTS:
                    self._verdicts.popitem(last=False)
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

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def check(self, structured: StructuredOutput) -> str:
        """The reason against a constraint, empty if there is none.

        Raises RequestFailed if no worker can be had, Overloaded where the worker's end says nothing about the constraint.
        """
        connection = self._connected()
        try:
            connection.send(structured)
            if connection.poll(limits.COMPILE_WALL_S):
                return connection.recv_bytes(MAX_REPLY).decode()
        except (EOFError, OSError):
            return _verdict(structured, self._reap())
        return _verdict(structured, self._reap(kill=True))

    def kill(self) -> None:
        """Let whoever waits for it go on; from any thread."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        if self._connection is not None:
            self._reap(kill=True)

    def _connected(self) -> Connection:
        """To a process that is alive: one that ended while nobody needed it is replaced."""
        if self._connection is not None and self._process is not None and self._process.poll() is not None:
            self._reap()
        return self._connection or self._start()

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        command = [sys.executable, *WORKER, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, process_group=0
            )
        self._connection = Connection(ours.detach())
        try:
            self._connection.send(self._vocabulary())
            if self._connection.poll(limits.START_WALL_S) and self._connection.recv_bytes(MAX_REPLY) == READY:
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


def _verdict(structured: StructuredOutput, code: int) -> str:
    """What a worker died of. Only its own limits speak against the constraint."""
    if code == -signal.SIGPROF:
        return TOO_SLOW
    if code == -signal.SIGKILL:  # by us, who waited long enough, or by a machine without memory
        raise Overloaded(f"{structured.field}: the machine is too busy to compile it; try again later", structured.field)
    return TOO_LARGE


def _refuse(structured: StructuredOutput, verdict: str) -> None:
    if verdict:
        raise InvalidRequest(f"{structured.field}: {verdict}", structured.field)


def _key(structured: StructuredOutput) -> bytes:
    """Equal for constraints that mean the same grammar; short, whatever their size."""
    text = f"{structured.kind} {structured.whitespace} {structured.text}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=20).digest()
