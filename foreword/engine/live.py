"""Open requests, through the deaths of engines. Pure bookkeeping: no processes, no clocks."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from foreword.core.deadlines import overdue
from foreword.core.events import Embedded, Event, Failed, StepStats, Tokens, without_first
from foreword.core.request import Request
from foreword.engine.gallery import Gallery
from foreword.engine.suspects import ALONE, Suspects
from foreword.errors import ForewordError, RequestFailed

__all__ = ["Aftermath", "LiveRequest", "LiveRequests"]

logger = logging.getLogger(__name__)

CHECKED: Final = 4  # tokens before a death that are sampled again after it, to see that they are the same


class LiveRequest:
    """A request and what was delivered of its answer.

    |<- request.delivered_ids ->|<- delivered ---------------->|
                                |<- resumed with ->|<- checked ->|<- new ...

    number   the engine's name for it: how many requests it was sent before; None: it has not got it
    has_run  an engine, dead by now, worked on it
    """

    __slots__ = ("_began", "delivered", "has_run", "number", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.number: int | None = None
        self.has_run = False
        self.delivered: list[int] = []
        self._began: tuple[int, float] | None = None  # num_cached and scheduled_s, as they were told first

    @property
    def num_output(self) -> int:
        return len(self.request.delivered_ids) + len(self.delivered)

    def resumed(self) -> Request:
        """What an engine is sent: all that was delivered but the last few tokens is output already."""
        if not self.delivered:
            return replace(self.request, start_by_s=None) if self.has_run else self.request
        before = self.request.delivered_ids
        kept = self.delivered[: max(len(self.delivered) - CHECKED, 0)]
        params = self.request.params
        if params.prompt_logprobs is not None:  # they came with the first token
            params = replace(params, prompt_logprobs=None)
        return replace(self.request, params=params, delivered_ids=(*before, *kept), start_by_s=None, resumed=True)

    def take(self, event: Tokens) -> Event | None:
        """What is new of an event; None if nothing is, Failed if it is not what was delivered before."""
        start = event.index - len(self.request.delivered_ids)
        count = min(len(self.delivered) - start, len(event.token_ids))
        if start < 0 or count < 0 or tuple(self.delivered[start : start + count]) != event.token_ids[:count]:
            return self._changed(event)
        if count:
            event = without_first(event, count)
        if not event.token_ids and event.finish_reason is None:
            return None
        self.delivered += event.token_ids
        return self._as_told(event)

    def _as_told(self, event: Tokens) -> Tokens:
        """What was said of its beginning stays as it is."""
        if self._began is None:
            self._began = event.num_cached, event.scheduled_s
        if self._began != (event.num_cached, event.scheduled_s):
            event = replace(event, num_cached=self._began[0], scheduled_s=self._began[1])
        return event

    def _changed(self, event: Tokens) -> Failed:
        logger.error("request %s would go on differently from token %d on; it is ended", event.request_id, event.index)
        error = RequestFailed(
            "the engine was replaced, and the replacement does not say the same tokens again; nothing was mixed"
        )
        return Failed(event.request_id, error)


@dataclass(frozen=True, slots=True)
class Aftermath:
    """What a death means.

    failed  who is not tried again
    blamed  a caller's request was worked on, which may be gone by now
    """

    failed: list[Failed]
    blamed: bool


class LiveRequests:
    """Every open request, in order of arrival, and who of them may be sent to the engine that lives now.

    An engine that is to prove itself first gets a request of ours, and nothing else until it answers.

    gallery  of their pictures
    """

    __slots__ = ("_live", "_num_sent", "_proof", "_suspects", "_unsent", "gallery")

    def __init__(self) -> None:
        self.gallery = Gallery()
        self._live: dict[str, LiveRequest] = {}
        self._unsent: dict[str, LiveRequest] = {}
        self._suspects = Suspects()
        self._proof: LiveRequest | None = None
        self._num_sent = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._live

    @property
    def alone(self) -> str | None:
        """The suspect that runs alone just now."""
        return self._suspects.alone

    def add(self, request: Request) -> None:
        self._live[request.id] = self._unsent[request.id] = LiveRequest(request)
        self.gallery.add(request)

    def remove(self, request_id: str) -> None:
        """It ended, or nobody wants it any more; it may have ended before."""
        live = self._live.pop(request_id, None)
        if live is not None:
            self.gallery.remove(live.request)
        self._unsent.pop(request_id, None)
        self._suspects.clear(request_id)

    def due(self) -> list[Request]:
        """Those that the engine has not got and may have now; it has got them after this."""
        if self._proof is not None:
            return [self._sent(self._proof)] if self._proof.number is None else []
        alone = self._suspects.alone
        if alone is None:
            due, self._unsent = self._unsent, {}
            return [self._sent(live) for live in due.values()]
        live = self._unsent.pop(alone, None)
        return [] if live is None else [self._sent(live)]

    def prove(self, request: Request) -> None:
        """The next engine is to answer this first; what it says is for nobody."""
        self._proof = LiveRequest(request)

    def _sent(self, live: LiveRequest) -> Request:
        live.number = self._num_sent
        self._num_sent += 1
        return live.resumed()

    def take(self, event: Event) -> Event | None:
        """What is new of what the engine says; None if nothing is, or if nobody listens any more."""
        live = self._live.get(event.request_id)
        if live is None:
            self._proven(event)
            return None
        new = live.take(event) if isinstance(event, Tokens) else event
        if isinstance(new, Failed | Embedded) or (new is not None and new.finish_reason is not None):
            self.remove(event.request_id)
        elif new is not None:
            self._suspects.clear(event.request_id)
        return new

    def _proven(self, event: Event) -> None:
        """Any answer is good enough: an error is one."""
        if self._proof is not None and event.request_id == self._proof.request.id:
            self._proof = None

    def died(self, numbers: Collection[int]) -> Aftermath:
        """The engine died while it worked on the requests of these numbers."""
        wanted = frozenset(numbers)
        blamed = bool(wanted - {self._proof.number} if self._proof is not None else wanted)
        at_work = [request_id for request_id, live in self._live.items() if live.number in wanted]
        condemned = self._suspects.died(at_work)
        failed = [] if condemned is None else [Failed(condemned, _condemned())]
        for one in failed:
            self.remove(one.request_id)
        self._take_back(wanted)
        return Aftermath(failed, blamed)

    def _take_back(self, at_work: Collection[int]) -> None:
        """No engine has got any of them."""
        for live in self._live.values():
            live.has_run = live.has_run or live.number in at_work
            live.number = None
        self._proof = None
        self.gallery.died()
        self._unsent = dict(self._live)
        self._num_sent = 0

    def end_late(self, now_s: float, answers: bool, at_work: Collection[int]) -> list[Failed]:
        """End those whose time is over, at time.monotonic() `now_s`.

        answers  the engine says itself who of those that it has got should have begun by now
        at_work  numbers of those that it works on
        """
        failed = []
        for request_id, live in self._live.items():
            has_run = live.has_run or live.number in at_work or bool(live.delivered) or (answers and live.number is not None)
            error = overdue(live.request, now_s, has_run)
            if error is not None:
                failed.append(Failed(request_id, error))
        for one in failed:
            self.remove(one.request_id)
        return failed

    def stats(self, now_s: float, last: StepStats, running: bool) -> StepStats:
        """What is to be told while an engine says nothing, after it told `last`; `running`: it has got requests."""
        count = min(last.requests_running, len(self._live)) if running else 0
        return replace(
            last,
            requests_running=count,
            requests_waiting=len(self._live) - count,
            longest_running_tokens=max((live.num_output for live in self._live.values()), default=0),
            oldest_running_seconds=max((now_s - live.request.arrival_s for live in self._live.values()), default=0.0),
        )

    def fail(self, error: ForewordError) -> list[Failed]:
        """End all of them."""
        failed = [Failed(request_id, error) for request_id in self._live]
        for one in failed:
            self.remove(one.request_id)
        return failed


def _condemned() -> RequestFailed:
    return RequestFailed(f"the engine died {ALONE} times while it worked on this request alone; it is not tried again")
