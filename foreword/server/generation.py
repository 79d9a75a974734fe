"""The choices of one HTTP request while the engine works on them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

from foreword.core.outputs import ErrorEvent, Event, TokenEvent, truncate
from foreword.core.request import Request
from foreword.errors import ForewordError, Overloaded, RequestFailed
from foreword.metrics.spec_stats import SpecDecodeStats
from foreword.server.admission import AdmissionTicket
from foreword.server.auth.rate_limit import UsageMeter
from foreword.server.context import ServerContext
from foreword.server.delta_queue import DeltaQueue
from foreword.tokenizer.output_processor import ChoiceOutput, OutputDelta

__all__ = ["Generation"]

logger = logging.getLogger("foreword.serve")


class Generation:
    """Submits requests, merges their events, and frees everything when it is closed.

    requests     one per choice; choice i is `answers[i]`
    prompt_only  the answers are wanted with no token: only the prompt is scored
    predicted    what the drafts out of the caller's prediction were worth, of all choices together
    held         what is given back when it is closed
    """

    __slots__ = (
        "_delta_queue",
        "_failed",
        "_meter",
        "_prompt_only",
        "_resources",
        "_server",
        "_tasks",
        "_ticket",
        "outputs",
        "prediction_stats",
    )

    def __init__(
        self,
        server: ServerContext,
        requests: Sequence[Request],
        prompt_only: bool = False,
        meter: UsageMeter | None = None,
        resources: ExitStack | None = None,
    ) -> None:
        self.outputs = [
            ChoiceOutput(server.tokenizer, request) for request in _only_first_may_expire(requests)
        ]
        self.prediction_stats = SpecDecodeStats()
        self._server = server
        self._prompt_only = prompt_only
        self._delta_queue = DeltaQueue()
        self._tasks: list[asyncio.Task[None]] = []
        self._failed: set[str] = set()
        self._meter = meter or UsageMeter()
        self._ticket: AdmissionTicket | None = None
        self._resources = resources or ExitStack()

    def start(self) -> None:
        """Submit everything. Raises Overloaded, or EngineDead; then nothing is left behind."""
        try:
            self._server.info()
            self._ticket = self._admit()
            for index, answer in enumerate(self.outputs):
                events = self._server.client.submit(answer.request)
                self._server.recorder.on_submit(answer.request)
                self._server.generations[answer.request.id] = self
                self._tasks.append(asyncio.create_task(self._consume_events(index, answer, events)))
        except BaseException:
            self.close()
            raise

    def _admit(self) -> AdmissionTicket:
        requests = [answer.request for answer in self.outputs]
        read = {
            request.id.rpartition("-")[0]: len(request.prompt_ids) for request in requests
        }  # choices "X-0", "X-1" share one
        tokens = sum(len(request.prompt_ids) for request in requests)
        return self._server.admission.admit(len(requests), tokens, self._meter, sum(read.values()))

    async def deltas(self) -> AsyncIterator[tuple[int, OutputDelta | ForewordError]]:
        """(choice, what is new) as it comes, until each choice has ended with a finish reason or an error."""
        running = len(self.outputs)
        while running:
            index, item = await self._delta_queue.get()
            running -= isinstance(item, ForewordError) or item.finish_reason is not None
            yield index, item

    async def collect(self) -> None:
        """Wait for all answers. Raises the first error: fewer choices than asked for are none."""
        async for _, item in self.deltas():
            if isinstance(item, ForewordError):
                raise item

    def close(self) -> None:
        """Free at once whatever still runs; closing twice is allowed."""
        self._resources.close()
        if self._ticket is None:
            return
        self._ticket.release()
        self._ticket = None
        for task in self._tasks:
            task.cancel()
        for answer in self.outputs:
            self._server.generations.pop(answer.request.id, None)
            if not answer.finished and answer.request.id not in self._failed:
                self._server.client.abort(answer.request.id)
                self._server.recorder.on_abort(answer.request)

    def abort(self, request_id: str, error: ForewordError) -> None:
        """End one choice with an error, of which its caller is told; one that has ended stays as it is."""
        index = next(index for index, answer in enumerate(self.outputs) if answer.request.id == request_id)
        answer = self.outputs[index]
        if answer.finished or request_id in self._failed:
            return
        self._tasks[index].cancel()
        self._server.client.abort(request_id)
        self._fail(index, answer.request, error)

    async def _consume_events(self, index: int, output: ChoiceOutput, events: AsyncIterator[Event]) -> None:
        """Hand on the events of one choice; whatever happens, its last item ends it."""
        request = output.request
        try:
            async for event in events:
                if isinstance(event, ErrorEvent):
                    raise event.error
                assert isinstance(event, TokenEvent)
                self._delta_queue.put(index, self._process_event(output, event))
                if output.finished:
                    return
            raise RequestFailed("the engine ended the request without an answer")
        except Overloaded as error:
            self._on_queue_timeout(index, request, error)
        except ForewordError as error:
            self._fail(index, request, error)
        except Exception:
            logger.exception("request %s failed", request.id)
            self._server.client.abort(request.id)
            self._fail(index, request, RequestFailed("the server failed on this request"))

    def _process_event(self, output: ChoiceOutput, event: TokenEvent) -> OutputDelta:
        if self._prompt_only:
            event = truncate(event, 0, "length")
        delta = output.feed(event)
        if delta.hit_stop_string or self._prompt_only:
            self._server.client.finish(output.request.id, output.num_tokens)
        self._server.recorder.on_tokens(output.request, delta.event, time.monotonic())
        if self._ticket is not None:
            self._ticket.charge_generated(len(delta.event.token_ids))
        self._count_prediction(delta.event)
        return delta

    def _count_prediction(self, event: TokenEvent) -> None:
        use = event.draft
        if use is not None and use.drafter == "prediction":
            self.prediction_stats.add(use.num_drafted, use.num_accepted, len(event.token_ids))

    def _on_queue_timeout(self, index: int, request: Request, error: Overloaded) -> None:
        """It waited too long for its first step, and all that came with it."""
        self._server.recorder.on_reject("queue_timeout")
        self._fail(index, request, error)
        for answer in self.outputs:
            if not answer.token_ids:
                self.abort(answer.request.id, error)

    def _fail(self, index: int, request: Request, error: ForewordError) -> None:
        self._failed.add(request.id)
        self._server.recorder.on_error(request, error)
        self._delta_queue.put(index, error)


def _only_first_may_expire(requests: Sequence[Request]) -> list[Request]:
    """Only the first may be late to begin: once it runs, the others wait for nobody but their own."""
    return [requests[0], *(replace(request, queue_deadline_s=None) for request in requests[1:])]
