"""Open requests, through the deaths of engines. Pure bookkeeping: no processes, no clocks."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from typing import Final

from foreword.core.events import Embedded, Event, Failed, Tokens, without_first
from foreword.core.request import Request
from foreword.engine.suspects import ALONE, Suspects
from foreword.errors import ForewordError, RequestFailed

__all__ = ["LiveRequest", "LiveRequests"]

logger = logging.getLogger(__name__)

CHECKED: Final = 4  # tokens before a death that are sampled again after it, to see that they are the same


class LiveRequest:
    """A request and what was delivered of its answer.

    |<- request.delivered_ids ->|<- delivered ---------------->|
                                |<- resumed with ->|<- checked ->|<- new ...

    number  the engine's name for it: how many requests it was sent before; None: it has not got it
    """

    __slots__ = ("_began", "delivered", "number", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.number: int | None = None
        self.delivered: list[int] = []
        self._began: tuple[int, float] | None = None  # num_cached and scheduled_s, as they were told first

    def resumed(self) -> Request:
        """What an engine is sent: all that was delivered but the last few tokens is output already."""
        if not self.delivered:
            return self.request
        before = self.request.delivered_ids
        kept = self.delivered[: max(len(self.delivered) - CHECKED, 0)]
        params = self.request.params
        if params.prompt_logprobs is not None:  # they came with the first token
            params = replace(params, prompt_logprobs=None)
        return replace(self.request, params=params, delivered_ids=(*before, *kept), start_by_s=None)

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


class LiveRequests:
    """Every open request, in order of arrival, and who of them may be sent to the engine that lives now."""

    __slots__ = ("_live", "_num_sent", "_suspects", "_unsent")

    def __init__(self) -> None:
        self._live: dict[str, LiveRequest] = {}
        self._unsent: dict[str, LiveRequest] = {}
        self._suspects = Suspects()
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

    def remove(self, request_id: str) -> None:
        """It ended, or nobody wants it any more; it may have ended before."""
        self._live.pop(request_id, None)
        self._unsent.pop(request_id, None)
        self._suspects.clear(request_id)

    def due(self) -> list[Request]:
        """Those that the engine has not got and may have now; it has got them after this."""
        alone = self._suspects.alone
        if alone is None:
            due, self._unsent = self._unsent, {}
            return [self._sent(live) for live in due.values()]
        live = self._unsent.pop(alone, None)
        return [] if live is None else [self._sent(live)]

    def _sent(self, live: LiveRequest) -> Request:
        live.number = self._num_sent
        self._num_sent += 1
        return live.resumed()

    def take(self, event: Event) -> Event | None:
        """What is new of what the engine says; None if nothing is, or if nobody listens any more."""
        live = self._live.get(event.request_id)
        if live is None:
            return None
        new = live.take(event) if isinstance(event, Tokens) else event
        if isinstance(new, Failed | Embedded) or (new is not None and new.finish_reason is not None):
            self.remove(event.request_id)
        elif new is not None:
            self._suspects.clear(event.request_id)
        return new

    def died(self, numbers: Collection[int]) -> list[Failed]:
        """The engine died while it worked on the requests of these numbers. Returns who is not tried again."""
        wanted = frozenset(numbers)
        at_work = [request_id for request_id, live in self._live.items() if live.number in wanted]
        condemned = self._suspects.died(at_work)
        failed = [] if condemned is None else [Failed(condemned, _condemned())]
        for one in failed:
            self.remove(one.request_id)
        for live in self._live.values():
            live.number = None
        self._unsent = dict(self._live)
        self._num_sent = 0
        return failed

    def fail(self, error: ForewordError) -> list[Failed]:
        """End all of them."""
        failed = [Failed(request_id, error) for request_id in self._live]
        for one in failed:
            self.remove(one.request_id)
        return failed


def _condemned() -> RequestFailed:
    return RequestFailed(f"the engine died {ALONE} times while it worked on this request alone; it is not tried again")
