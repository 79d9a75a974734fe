"""The intake of requests: what a request may cost before the engine has it.

Small bodies are read on the event loop. Larger ones, chat templates, and the schemas of tools and answers are
work for processes that can be ended: each has a limit of CPU time and memory in proportion to its bytes.
Threads wait for them, which keys share fairly; none of the server's own work waits behind that of requests.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute

from foreword.errors import InvalidRequest, OverBudget, Overloaded
from foreword.server.apis.body import StrictModel
from foreword.utils.threads import run_in_own_thread
from foreword.workers.pool import JobFailed, JobLimits, WorkerPool, load_reply

T = TypeVar("T")

_body_classes: dict[type[StrictModel], None] = {}  # bodies of all routes; workers know them from their start
WORKER = "foreword.server.intake_worker"
INLINE_BYTES = 64 * 1024  # largest body that is read on the event loop
INLINE_OBJECTS = 2048  # most objects in it: each takes 8 to 14 us
INLINE_WORK_BYTES = 16 * 1024  # largest body whose text is tokenized there
NUM_WORKERS = 3  # processes and threads for each kind of work; a key holds all but one of them at most
QUEUE_TIMEOUT_S, RETRY_AFTER_S = 30.0, 5.0
CPU_S, CPU_S_PER_MB = 1.0, 2.0  # for a body; messages of one character take 0.6 s a MB
WALL_S = 120.0  # bounds stalls on an overloaded machine
WORKER_BYTES = 256 << 20  # memory of a worker beside that in proportion to the largest body
MEMORY_FACTOR = 48  # JSON of empty lists takes 38 times its bytes
REPLY_FACTOR = 24  # most bytes of a pickled body, in bytes of its JSON: of empty objects 21


class FairSemaphore:
    """A semaphore that serves keys round-robin, and in order within a key. Used from one event loop.

    One permit is kept from a key that holds all others: another key's first work begins at once.
    """

    __slots__ = ("_held", "_max_per_key", "_waiting", "num_free")

    def __init__(self, num_permits: int) -> None:
        self.num_free = num_permits
        self._max_per_key = max(num_permits - 1, 1)
        self._held: Counter[str] = Counter()  # permits by key
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by key; the first key is served next

    @property
    def num_waiting(self) -> int:
        return sum(len(queue) for queue in self._waiting.values())

    @asynccontextmanager
    async def hold(self, fairness_key: str, timeout_s: float) -> AsyncIterator[None]:
        """Hold one permit. Raises TimeoutError if none is free in time."""
        await self.acquire(fairness_key, timeout_s)
        try:
            yield
        finally:
            self.release(fairness_key)

    async def acquire(self, fairness_key: str, timeout_s: float) -> None:
        """Take a permit, until release(). Raises TimeoutError if none is free in time."""
        if fairness_key not in self._waiting and self._may_take(fairness_key):
            return self._take(fairness_key)
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(fairness_key, deque()).append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except (TimeoutError, asyncio.CancelledError):
            if waiter.cancelled():
                self._cancel_wait(fairness_key, waiter)
            else:  # the permit came just before the cancel
                self.release(fairness_key)
            raise

    def release(self, fairness_key: str) -> None:
        """Give a permit back; the next key that may have it takes it."""
        self.num_free += 1
        self._held[fairness_key] -= 1
        if not self._held[fairness_key]:
            del self._held[fairness_key]
        while (key := next(filter(self._may_take, self._waiting), None)) is not None:
            queue = self._waiting.pop(key)
            waiter = queue.popleft()
            if queue:
                self._waiting[key] = queue  # at the end of the line
            if not waiter.done():  # a done waiter was cancelled
                self._take(key)
                waiter.set_result(None)

    def _may_take(self, fairness_key: str) -> bool:
        return self.num_free > 0 and self._held[fairness_key] < self._max_per_key

    def _take(self, fairness_key: str) -> None:
        self.num_free -= 1
        self._held[fairness_key] += 1

    def _cancel_wait(self, fairness_key: str, waiter: asyncio.Future[None]) -> None:
        queue = self._waiting.get(fairness_key)
        if queue is not None and waiter in queue:
            queue.remove(waiter)
            if not queue:
                del self._waiting[fairness_key]


class FairThreads:
    """A bounded number of threads for one kind of work, which keys share fairly. Used from one event loop."""

    def __init__(
        self, name: str, num_threads: int, queue_timeout_s: float, on_refusal: Callable[[str], None]
    ) -> None:
        """
        name             of the work, in errors: "chat templates"
        queue_timeout_s  longest wait for a thread
        on_refusal       called with "intake_queue" for work that has waited as long
        """
        self._name = name
        self._queue_timeout_s = queue_timeout_s
        self._on_refusal = on_refusal
        self._permits = FairSemaphore(num_threads)

    async def run(self, fairness_key: str, work: Callable[[], T]) -> T:
        """The result of `work`, which a cancel does not stop: its thread is free when it ends.

        Raises Overloaded if no thread is free in time.
        """
        try:
            await self._permits.acquire(fairness_key, self._queue_timeout_s)
        except TimeoutError:
            self._on_refusal("intake_queue")
            raise Overloaded(
                f"the request waited {self._queue_timeout_s:g} s for the {self._name} of other requests; "
                f"try again in {RETRY_AFTER_S:g} s",
                None,
                RETRY_AFTER_S,
            ) from None
        task = asyncio.ensure_future(run_in_own_thread(work))

        def on_done(task: asyncio.Task[T]) -> None:
            self._permits.release(fairness_key)
            if not task.cancelled():
                task.exception()  # read also if nobody waits any more

        task.add_done_callback(on_done)
        return await asyncio.shield(task)


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
