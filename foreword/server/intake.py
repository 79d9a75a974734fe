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
INLINE_OBJECTS = 2048  # most objects in it: each takes 8 to 14 us
INLINE_WORK_BYTES = 16 * 1024  # largest body whose text is tokenized there
NUM_WORKERS = 3  # processes and threads for each kind of work; a key holds all but one of them at most
QUEUE_TIMEOUT_S = 30.0
CPU_S, CPU_S_PER_MB = 1.0, 2.0  # for a body; messages of one character take 0.6 s a MB
WALL_S = 120.0  # bounds stalls on an overloaded machine
WORKER_BYTES = 256 << 20  # memory of a worker beside that in proportion to the largest body
MEMORY_FACTOR = 48  # JSON of empty lists takes 38 times its bytes
REPLY_FACTOR = 24  # most bytes of a pickled body, in bytes of its JSON: of empty objects 21


class Intake:
    """Threads and worker processes for requests that the engine does not have yet. Shared by all models."""

    def __init__(self, max_body_bytes: int, on_refusal: Callable[[str], None]) -> None:
        """`on_refusal` is called with "over_budget" or "intake_queue" for each refusal."""
        limits = JobLimits(
            cpu_s=CPU_S,
            wall_s=WALL_S,
            num_bytes=WORKER_BYTES + MEMORY_FACTOR * max_body_bytes,
            queue_timeout_s=QUEUE_TIMEOUT_S,
            cpu_s_per_mb=CPU_S_PER_MB,
        )
        self._pool = WorkerPool(WORKER, "read", lambda: tuple(_body_classes), limits, NUM_WORKERS)
        self._on_refusal = on_refusal
        self._readers = FairThreads("bodies", NUM_WORKERS, QUEUE_TIMEOUT_S, on_refusal)
        self._renderers = FairThreads("prompts", NUM_WORKERS, QUEUE_TIMEOUT_S, on_refusal)
        self._compilers = FairThreads("schemas", NUM_WORKERS, QUEUE_TIMEOUT_S, on_refusal)
        self._savers = FairThreads("saved conversations", NUM_WORKERS, QUEUE_TIMEOUT_S, on_refusal)

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
        try:
            with self._pool.worker("the body") as worker:
                worker.send(pickle.dumps((body_class, max_parts)))
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

    async def offload_if_large(
        self, request: Request, work: Callable[[], T], num_bytes: int | None = None
    ) -> T:
        """Run work without a template beside prompts; at once for few bytes (default: the body's)."""
        if (request.state.body_bytes if num_bytes is None else num_bytes) <= INLINE_WORK_BYTES:
            return work()
        return await self.render(request, work)

    async def compile(self, request: Request, work: Callable[[], T]) -> T:
        """Run work on schemas and grammars, which waits for a process."""
        return await self._run(self._compilers, request, work)

    async def access_saved(self, request: Request, work: Callable[[], T]) -> T:
        """Run work on files of saved conversations."""
        return await self._run(self._savers, request, work)

    async def _run(self, threads: FairThreads, request: Request, work: Callable[[], T]) -> T:
        try:
            return await threads.run(request.state.access.fairness_key, work)
        except OverBudget:
            self._on_refusal("over_budget")
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
            if body_class is not None and _is_json(request) and await _is_large(request):
                models = request.app.state.models
                # Starlette's cache of request.json().
                request._json = await models.intake.read_body(request, body_class, models.max_model_len)
            return await answer(request)

        return read_and_answer


async def _is_large(request: Request) -> bool:
    """Whether the body takes so long to read that the event loop must go on meanwhile."""
    if request.state.body_bytes > INLINE_BYTES:
        return True
    return (await request.body()).count(b"{") > INLINE_OBJECTS


def _is_json(request: Request) -> bool:
    """Whether FastAPI reads such a body; it refuses others."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    main, _, subtype = media_type.partition("/")
    return main == "application" and (subtype == "json" or subtype.endswith("+json"))
