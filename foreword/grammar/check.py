"""Compiles each new grammar in a worker process first: if it crashes the compiler, only its request fails."""

from __future__ import annotations

import asyncio
import hashlib
import pickle
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from foreword.core.structured_output import StructuredOutput, Vocabulary
from foreword.errors import InvalidRequest
from foreword.grammar import limits
from foreword.workers.pool import JobFailed, JobLimits, WorkerPool

WORKER: Final = "foreword.grammar.check_worker"
MAX_REPLY_BYTES: Final = 1 << 16


class GrammarChecker:
    """Decides whether a constraint can be served. Thread-safe, for any number of event loops."""

    def __init__(
        self, load_vocabulary: Callable[[], Vocabulary], num_workers: int = limits.NUM_WORKERS
    ) -> None:
        job_limits = JobLimits(
            cpu_s=limits.COMPILE_CPU_S,
            wall_s=limits.COMPILE_WALL_S,
            num_bytes=limits.WORKER_BYTES,
            queue_timeout_s=limits.QUEUE_TIMEOUT_S,
            stack_bytes=limits.WORKER_STACK_BYTES,
        )
        self._pool = WorkerPool(WORKER, "compile", load_vocabulary, job_limits, num_workers)
        self._executor = ThreadPoolExecutor(num_workers, "grammar-check")
        self._lock = threading.Lock()
        self._verdict_cache: OrderedDict[bytes, str] = OrderedDict()
        self._pending: dict[bytes, Future[str]] = {}

    async def check(self, structured: StructuredOutput) -> None:
        """Raises InvalidRequest, which names field and reason; Overloaded if no worker is free in time."""
        _raise_if_rejected(structured, await asyncio.shield(asyncio.wrap_future(self._submit(structured))))

    def check_sync(self, structured: StructuredOutput) -> None:
        """`check` without an event loop."""
        _raise_if_rejected(structured, self._submit(structured).result())

    def close(self) -> None:
        """End the workers; waiting checks are cancelled."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._pool.close()
        self._executor.shutdown()

    def _submit(self, structured: StructuredOutput) -> Future[str]:
        """The reason to reject a constraint, or "". Equal constraints share one compilation."""
        key = _cache_key(structured)
        with self._lock:
            if key in self._verdict_cache:
                self._verdict_cache.move_to_end(key)
                cached: Future[str] = Future()
                cached.set_result(self._verdict_cache[key])
                return cached
            if key not in self._pending:
                deadline = time.monotonic() + self._pool.limits.queue_timeout_s
                self._pending[key] = self._executor.submit(self._run, key, structured, deadline)
            return self._pending[key]

    def _run(self, key: bytes, structured: StructuredOutput, deadline: float) -> str:
        try:
            if time.monotonic() > deadline:
                raise self._pool.queue_timeout_error(structured.field)
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
        try:
            with self._pool.worker(structured.field) as worker:
                worker.send(pickle.dumps(structured))
                return worker.receive(MAX_REPLY_BYTES).decode()
        except JobFailed as error:
            return str(error)


def _raise_if_rejected(structured: StructuredOutput, verdict: str) -> None:
    if verdict:
        raise InvalidRequest(f"{structured.field}: {verdict}", structured.field)


def _cache_key(structured: StructuredOutput) -> bytes:
    """A digest, equal for constraints of the same grammar."""
    text = f"{structured.constraint_type} {structured.whitespace} {structured.text}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=20).digest()
