"""The choices of one HTTP request while the engine works on them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

from foreword.core.events import Event, Failed, Tokens, cut
from foreword.core.request import Request
from foreword.errors import ForewordError, Overloaded, RequestFailed
from foreword.metrics.tally import DraftTally
from foreword.serve.admission import Ticket
from foreword.serve.backlog import Backlog
from foreword.serve.limits import Meter
from foreword.serve.state import Server
from foreword.text.answer import Answer, Delta

__all__ = ["Generation"]

logger = logging.getLogger("foreword.serve")


class Generation:
    """Submits requests, merges their events, and frees everything when it is closed.

    requests     one per choice; choice i is `answers[i]`
    prompt_only  the answers are wanted with no token: only the prompt is scored
    predicted    what the drafts out of the caller's prediction were worth, of all choices together
    held         what is given back when it is closed
    """

    __slots__ = ("_backlog", "_failed", "_held", "_meter", "_prompt_only", "_server", "_tasks", "_ticket", "answers", "predicted")

    def __init__(
        self,
        server: Server,
        requests: Sequence[Request],
        prompt_only: bool = False,
        meter: Meter | None = None,
        held: ExitStack | None = None,
    ) -> None:
        self.answers = [Answer(server.tokenizer, request) for request in _waiting_once(requests)]
        self.predicted = DraftTally()
        self._server = server
        self._prompt_only = prompt_only
        self._backlog = Backlog()
        self._tasks: list[asyncio.Task[None]] = []
        self._failed: set[str] = set()
        self._meter = meter or Meter()
        self._ticket: Ticket | None = None
        self._held = held or ExitStack()

    def start(self) -> None:
        """Submit everything. Raises Overloaded, or EngineDead; then nothing is left behind."""
        try:
            self._server.info()
            self._ticket = self._take_places()
            for index, answer in enumerate(self.answers):
                events = self._server.client.submit(answer.request)
                self._server.recorder.arrived(answer.request)
                self._server.generating[answer.request.id] = self
                self._tasks.append(asyncio.create_task(self._follow(index, answer, events)))
        except BaseException:
            self.close()
            raise

    def _take_places(self) -> Ticket:
        requests = [answer.request for answer in self.answers]
        read = {request.id.rpartition("-")[0]: len(request.prompt_ids) for request in requests}  # choices "X-0", "X-1" share one
        tokens = sum(len(request.prompt_ids) for request in requests)
        return self._server.admission.take(len(requests), tokens, self._meter, sum(read.values()))

    async def deltas(self) -> AsyncIterator[tuple[int, Delta | ForewordError]]:
        """(choice, what is new) as it comes, until each choice has ended with a finish reason or an error."""
        running = len(self.answers)
        while running:
            index, item = await self._backlog.take()
            running -= isinstance(item, ForewordError) or item.finish_reason is not None
            yield index, item

    async def collect(self) -> None:
        """Wait for all answers. Raises the first error: fewer choices than asked for are none."""
        async for _, item in self.deltas():
            if isinstance(item, ForewordError):
                raise item

    def close(self) -> None:
        """Free at once whatever still runs; closing twice is allowed."""
        self._held.close()
        if self._ticket is None:
            return
        self._ticket.release()
        self._ticket = None
        for task in self._tasks:
            task.cancel()
        for answer in self.answers:
            self._server.generating.pop(answer.request.id, None)
            if not answer.finished and answer.request.id not in self._failed:
                self._server.client.abort(answer.request.id)
                self._server.recorder.aborted(answer.request)

    def abort(self, request_id: str, error: ForewordError) -> None:
        """End one choice with an error, of which its caller is told; one that has ended stays as it is."""
        index = next(index for index, answer in enumerate(self.answers) if answer.request.id == request_id)
        answer = self.answers[index]
        if answer.finished or request_id in self._failed:
            return
        self._tasks[index].cancel()
        self._server.client.abort(request_id)
        self._fail(index, answer.request, error)

    async def _follow(self, index: int, answer: Answer, events: AsyncIterator[Event]) -> None:
        """Hand on the events of one choice; whatever happens, its last item ends it."""
        request = answer.request
        try:
            async for event in events:
                if isinstance(event, Failed):
                    raise event.error
                assert isinstance(event, Tokens)
                self._backlog.put(index, self._take(answer, event))
                if answer.finished:
                    return
            raise RequestFailed("the engine ended the request without an answer")
        except Overloaded as error:
            self._refused(index, request, error)
        except ForewordError as error:
            self._fail(index, request, error)
        except Exception:
            logger.exception("request %s failed", request.id)
            self._server.client.abort(request.id)
            self._fail(index, request, RequestFailed("the server failed on this request"))

    def _take(self, answer: Answer, event: Tokens) -> Delta:
        if self._prompt_only:
            event = cut(event, 0, "length")
        delta = answer.feed(event)
        if delta.stopped or self._prompt_only:
            self._server.client.finish(answer.request.id, answer.num_tokens)
        self._server.recorder.delivered(answer.request, delta.event, time.monotonic())
        if self._ticket is not None:
            self._ticket.delivered(len(delta.event.token_ids))
        self._count_prediction(delta.event)
        return delta

    def _count_prediction(self, event: Tokens) -> None:
        use = event.draft
        if use is not None and use.drafter == "prediction":
            self.predicted.add(use.drafted, use.accepted, len(event.token_ids))

    def _refused(self, index: int, request: Request, error: Overloaded) -> None:
        """It waited too long for its first step, and all that came with it."""
        self._server.recorder.rejected("queue_timeout")
        self._fail(index, request, error)
        for answer in self.answers:
            if not answer.token_ids:
                self.abort(answer.request.id, error)

    def _fail(self, index: int, request: Request, error: ForewordError) -> None:
        self._failed.add(request.id)
        self._server.recorder.failed(request, error)
        self._backlog.put(index, error)


def _waiting_once(requests: Sequence[Request]) -> list[Request]:
    """Only the first may be late to begin: once it runs, the others wait for nobody but their own."""
    return [requests[0], *(replace(request, start_by_s=None) for request in requests[1:])]
