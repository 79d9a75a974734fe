"""Constraints are written and compiled in a worker process first: one that crashes it fails alone."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from foreword.core.structured_output import ConstraintScope, StructuredOutput, Vocabulary
from foreword.errors import InvalidRequest, OverBudget
from foreword.grammar import limits
from foreword.grammar.compiler import SharedResults
from foreword.grammar.tool_calls import ConstraintTask, ToolConstraint
from foreword.workers.pool import JobFailed, JobLimits, WorkerPool, load_reply

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
        self._verdicts: SharedResults[InvalidRequest | None] = SharedResults(limits.MAX_CACHED_VERDICTS)
        self._constraints: SharedResults[ToolConstraint] = SharedResults(limits.MAX_CACHED_CONSTRAINTS)

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


def _cache_key(structured: StructuredOutput) -> bytes:
    """A digest, equal for constraints of the same grammar."""
    text = f"{structured.constraint_type} {structured.whitespace} {structured.text}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=20).digest()
