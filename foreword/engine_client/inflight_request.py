"""An open request and the delivered part of its answer, from which another engine can go on."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final

from foreword.core.outputs import ErrorEvent, Event, TokenEvent, drop_prefix
from foreword.core.request import Request
from foreword.errors import RequestFailed

logger = logging.getLogger(__name__)

REPLAY_CHECK_TOKENS: Final = 4  # delivered tokens that a restart samples again and compares


class InflightRequest:
    """A request and the delivered part of its answer.

    |<- request.resume_output_ids ->|<- delivered_ids ----------------------------->|
                                    |<- output of a resumed request ->|<- checked ->|<- new ...
    """

    __slots__ = ("_first_timing", "delivered_ids", "has_run", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.has_run = False  # an engine before ran it
        self.delivered_ids: list[int] = []
        self._first_timing: tuple[int, float] | None = None  # num_cached and scheduled_s of the first event

    @property
    def num_output(self) -> int:
        return len(self.request.resume_output_ids) + len(self.delivered_ids)

    @property
    def has_started(self) -> bool:
        """Whether it ran in an engine before, or gained a token."""
        return self.has_run or bool(self.delivered_ids)

    def make_resume_request(self, request_id: str) -> Request:
        """The request for a new engine: delivered tokens are output already, except the last few.

        request_id  another one for each engine, so that late events are of no open request
        """
        if not self.delivered_ids:
            deadline_s = None if self.has_run else self.request.queue_deadline_s
            return replace(self.request, id=request_id, queue_deadline_s=deadline_s)
        kept = self.delivered_ids[: max(len(self.delivered_ids) - REPLAY_CHECK_TOKENS, 0)]
        params = self.request.params
        if params.prompt_logprobs is not None:  # delivered with the first token
            params = replace(params, prompt_logprobs=None)
        return replace(
            self.request,
            id=request_id,
            params=params,
            resume_output_ids=(*self.request.resume_output_ids, *kept),
            queue_deadline_s=None,
            is_resumed=True,
        )

    def on_event(self, event: TokenEvent) -> Event | None:
        """The part of an event that was not delivered, with the request's own id.

        None if there is none; an ErrorEvent if delivered tokens differ.
        """
        start = event.index - len(self.request.resume_output_ids)
        count = min(len(self.delivered_ids) - start, len(event.token_ids))
        delivered = tuple(self.delivered_ids[start : start + count])
        if start < 0 or count < 0 or delivered != event.token_ids[:count]:
            logger.error(
                "client: request %s differs after the restart at token %d; ending it",
                self.request.id,
                event.index,
            )
            error = "the engine was restarted and does not sample the same tokens again; the answer ends here"
            return ErrorEvent(self.request.id, RequestFailed(error))
        if count:
            event = drop_prefix(event, count)
        if not event.token_ids and event.finish_reason is None:
            return None
        self.delivered_ids += event.token_ids
        timing = event.num_cached, event.scheduled_s
        first = self._first_timing = self._first_timing or timing
        if first != timing or event.request_id != self.request.id:
            event = event._replace(request_id=self.request.id, num_cached=first[0], scheduled_s=first[1])
        return event
