"""Constraints are written and compiled in a worker process first: one that crashes it fails alone."""

from __future__ import annotations

import hashlib
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, Generic, TypeVar

from foreword.core.structured_output import ConstraintScope, StructuredOutput, Vocabulary
from foreword.errors import InvalidRequest, OverBudget
from foreword.grammar import limits
from foreword.grammar.tool_calls import ConstraintTask, ToolConstraint
from foreword.workers.pool import JobFailed, JobLimits, WorkerPool, load_reply

T = TypeVar("T")
WORKER: Final = "foreword.grammar.check_worker"
REPLIES: Final = (ToolConstraint, StructuredOutput, ConstraintScope, InvalidRequest)
MAX_REPLY_BYTES: Final = 64 << 20  # a pickled constraint of tools, with the names of what it drops


class GrammarChecker:
    """Writes constraints, and decides whether they can be served. Thread-safe; calls wait for a worker."""

    def __init__(
        self, load_vocabulary: Callable[[], Vocabulary], num_workers: int = limits.NUM_WORKERS
    ) -> None:
        job_limits = JobLimits(
            cpu_s=limits.COMPILE_CPU_S,
            cpu_s_per_mb=limits.COMPILE_CPU_S_PER_MB,
            wall_s=limits.COMPILE_WALL_S,
            num_bytes=limits.WORKER_BYTES,
            queue_timeout_s=limits.QUEUE_TIMEOUT_S,
            stack_bytes=limits.WORKER_STACK_BYTES,
        )
        self._pool = WorkerPool(WORKER, "compile", load_vocabulary, job_limits, num_workers)
        self._verdicts: _SharedResults[InvalidRequest | None] = _SharedResults(limits.MAX_CACHED_VERDICTS)
        self._constraints: _SharedResults[ToolConstraint] = _SharedResults(limits.MAX_CACHED_CONSTRAINTS)

    def constrain(self, task: ConstraintTask) -> ToolConstraint:
        """The constraint of an answer, not checked yet.

        Raises InvalidRequest for a schema that cannot be enforced, Overloaded if no worker is free in time.
        """
        return self._constraints.get(task, partial(self._constrain, task))

    def check(self, structured: StructuredOutput) -> None:
        """Raises InvalidRequest, which names field and reason; Overloaded if no worker is free in time."""
        verdict = self._verdicts.get(_cache_key(structured), partial(self._check, structured))
        if verdict is not None:
            raise type(verdict)(f"{structured.field}: {verdict.message}", structured.field)

    def close(self) -> None:
        """End the workers; waiting calls raise ShuttingDown."""
        self._pool.close()

    def _constrain(self, task: ConstraintTask) -> ToolConstraint:
        try:
            constraint: ToolConstraint = self._run_job(task)
        except JobFailed as error:
            raise OverBudget(f"{task.field}: {error}", task.field) from None
        return constraint

    def _check(self, structured: StructuredOutput) -> InvalidRequest | None:
        """The error without the name of the field."""
        try:
            reason = self._run_job(structured)
        except JobFailed as error:
            return OverBudget(str(error))
        return InvalidRequest(reason) if reason else None

    def _run_job(self, job: StructuredOutput | ConstraintTask) -> Any:
        """Raises the worker's InvalidRequest, or JobFailed."""
        with self._pool.worker(job.field) as worker:
            worker.send(pickle.dumps(job))
            reply = load_reply(worker.receive(MAX_REPLY_BYTES), REPLIES)
        if isinstance(reply, InvalidRequest):
            raise reply
        return reply


class _SharedResults(Generic[T]):
    """Results by key, the latest ones kept. Threads that ask for the same one wait for one computation."""

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, T] = OrderedDict()
        self._pending: dict[Hashable, Future[T]] = {}

    def get(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Raises the error of `compute`, which is not kept."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            pending = self._pending.get(key)
            if pending is None:
                own = self._pending[key] = Future[T]()
        if pending is not None:
            return pending.result()
        try:
            own.set_result(compute())
        except BaseException as error:
            own.set_exception(error)
        with self._lock:
            del self._pending[key]
            if own.exception() is None:
                self._kept[key] = own.result()
                while len(self._kept) > self._max_size:
                    self._kept.popitem(last=False)
        return own.result()


def _cache_key(structured: StructuredOutput) -> bytes:
    """A digest, equal for constraints of the same grammar."""
    text = f"{structured.constraint_type} {structured.whitespace} {structured.text}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=20).digest()
