"""The intake of requests: what a request may cost before the engine has it.

Small bodies are read on the event loop. Larger ones, chat templates, and the schemas of tools and answers are
work for processes that can be ended: each has a limit of CPU time and memory in proportion to its bytes.
Threads wait for them, which keys share fairly; none of the server's own work waits behind that of requests.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute

from foreword.errors import InvalidRequest, OverBudget
from foreword.server.apis.body import StrictModel
from foreword.server.fair_threads import FairThreads
from foreword.utils.threads import run_in_own_thread
from foreword.workers.pool import JobFailed, JobLimits, WorkerPool, load_reply

T = TypeVar("T")

_body_classes: dict[type[StrictModel], None] = {}  # of all routes; workers know them from their start
WORKER = "foreword.server.intake_worker"
INLINE_BYTES = 64 * 1024  # largest body that is read on the event loop
INLINE_WORK_BYTES = 16 * 1024  # largest body whose text is tokenized there
NUM_WORKERS = 3  # processes and threads for each kind of work; a key holds all but one of them at most
QUEUE_TIMEOUT_S = 30.0
CPU_S, CPU_S_PER_MB = 1.0, 0.5  # for a body; the dearest JSON, of small objects, takes a fifth
WORKER_BYTES = 256 << 20  # memory of a worker beside that in proportion to the largest body
MEMORY_FACTOR = 48  # JSON of empty lists takes 38 times its bytes
REPLY_FACTOR = 16  # most bytes of a pickled body, in bytes of its JSON


class Intake:
    """Threads and worker processes for requests that the engine does not have yet. Shared by all models."""

    def __init__(self, max_body_bytes: int, on_refusal: Callable[[str], None]) -> None:
        """`on_refusal` is called with "intake" for work that exceeds its limit, or waits too long."""
        limits = JobLimits(
            cpu_s=CPU_S + CPU_S_PER_MB * max_body_bytes / 1e6,
            wall_s=60.0,
            num_bytes=WORKER_BYTES + MEMORY_FACTOR * max_body_bytes,
            queue_timeout_s=QUEUE_TIMEOUT_S,
        )
        self._pool = WorkerPool(WORKER, "read", lambda: tuple(_body_classes), limits, NUM_WORKERS)
        self._on_refusal = on_refusal
        self._readers = FairThreads("bodies", NUM_WORKERS, QUEUE_TIMEOUT_S, on_refusal)
        self._renderers = FairThreads("prompts", NUM_WORKERS, QUEUE_TIMEOUT_S, on_refusal)
        self._compilers = FairThreads("schemas", NUM_WORKERS, QUEUE_TIMEOUT_S, on_refusal)

    async def read_body(
        self, request: Request, body_class: type[StrictModel], max_parts: int | None
    ) -> StrictModel:
        """The validated body, read by a worker.

        max_parts  most messages, parts, calls and ids; None: not known yet
        Raises InvalidRequest, Overloaded.
        """
        work = partial(self._read, body_class, await request.body(), max_parts)
        return await self._run(self._readers, request, work)

    def _read(self, body_class: type[StrictModel], data: bytes, max_parts: int | None) -> StrictModel:
        cpu_s = CPU_S + CPU_S_PER_MB * len(data) / 1e6
        try:
            with self._pool.worker("the body") as worker:
                worker.send(pickle.dumps((body_class, max_parts, cpu_s)))
                worker.send(data)
                reply = worker.receive(WORKER_BYTES + REPLY_FACTOR * len(data))
        except JobFailed as error:
            raise OverBudget(f"the body of {len(data)} bytes cannot be read: {error}") from None
        body: StrictModel | InvalidRequest = load_reply(reply, (StrictModel, InvalidRequest))
        if isinstance(body, InvalidRequest):
            raise body
        return body

    async def render(self, request: Request, work: Callable[[], T]) -> T:
        """Run work that makes a prompt: its chat template, in a process, and tokenization."""
        return await self._run(self._renderers, request, work)

    async def render_if_large(
        self, request: Request, work: Callable[[], T], num_bytes: int | None = None
    ) -> T:
        """As render(), for work without a template: of few bytes (default: the body's) it is done at once."""
        if (request.state.body_bytes if num_bytes is None else num_bytes) <= INLINE_WORK_BYTES:
            return work()
        return await self.render(request, work)

    async def compile(self, request: Request, work: Callable[[], T]) -> T:
        """Run work on schemas and grammars, which waits for a process."""
        return await self._run(self._compilers, request, work)

    async def _run(self, threads: FairThreads, request: Request, work: Callable[[], T]) -> T:
        try:
            return await threads.run(request.state.access.fairness_key, work)
        except OverBudget:
            self._on_refusal("intake")
            raise

    async def close(self) -> None:
        """End the worker processes."""
        await run_in_own_thread(self._pool.close)


class IntakeRoute(APIRoute):
    """A route whose large bodies a worker reads; FastAPI takes a validated body as it is."""

    @property
    def body_class(self) -> type[StrictModel] | None:
        annotation = None if self.body_field is None else self.body_field.field_info.annotation
        return annotation if isinstance(annotation, type) and issubclass(annotation, StrictModel) else None

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer, body_class = super().get_route_handler(), self.body_class
        if body_class is not None:
            _body_classes[body_class] = None

        async def read_and_answer(request: Request) -> Response:
            if body_class is not None and request.state.body_bytes > INLINE_BYTES and _is_json(request):
                models = request.app.state.models
                # Starlette's cache of request.json().
                request._json = await models.intake.read_body(request, body_class, models.max_model_len)
            return await answer(request)

        return read_and_answer


def _is_json(request: Request) -> bool:
    """Whether FastAPI reads such a body; it refuses others."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    main, _, subtype = media_type.partition("/")
    return main == "application" and (subtype == "json" or subtype.endswith("+json"))
