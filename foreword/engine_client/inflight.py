"""Open requests, through the deaths of engines. Pure bookkeeping: no processes, no clocks.

Whose fault the death of an engine may be, and how many deaths are borne.

Which pictures open requests have, and which of them the engine that lives now was shown. Pure bookkeeping.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from foreword.core.outputs import EmbeddingEvent, ErrorEvent, Event, StepStats, TokenEvent, drop_prefix
from foreword.core.request import Request, check_deadline
from foreword.engine_client.messages import AddImage, DropImage
from foreword.errors import ForewordError, RequestFailed

__all__ = [
    "CrashResult",
    "CrashSuspects",
    "ImageRefs",
    "InflightRequest",
    "InflightRequests",
    "RestartPolicy",
]

logger = logging.getLogger(__name__)

CRASHES_TO_SUSPECT: Final = 2  # deaths in a row without a token between them that make a request suspect
CRASHES_TO_REFUSE: Final = 2  # deaths that are its own fault beyond doubt
MAX_IDLE_CRASHES: Final = 5
MAX_START_ATTEMPTS: Final = 3
HEALTHY_S: Final = 60.0  # an engine that was well for so long was no failure, whatever it did not do
CRASHES_TO_PROBE: Final = (
    2  # deaths in a row without a token to anybody, after which a replacement has to prove itself
)


class CrashSuspects:
    """Requests that may kill the engine.

    A request is suspect if it was worked on at two deaths in a row and gained no token between them. Suspects run alone, one
    after the other, each until it gains a token or ends; who dies alone twice is condemned.
    """

    __slots__ = ("_num_crashes", "_num_solo_crashes")

    def __init__(self) -> None:
        self._num_crashes: dict[str, int] = {}
        self._num_solo_crashes: dict[str, int] = {}  # how often each died alone, in the order of their turns

    @property
    def quarantined(self) -> str | None:
        """The request that nobody may run beside; None: there is no suspect."""
        return next(iter(self._num_solo_crashes), None)

    def on_crash(self, busy_ids: Sequence[str]) -> str | None:
        """An engine died while it worked on these, all of them still open. Returns the request that is condemned."""
        alone = self.quarantined
        if alone is None:
            self._count_crash(busy_ids)
        elif alone in busy_ids:
            self._num_solo_crashes[alone] += 1
            if self._num_solo_crashes[alone] >= CRASHES_TO_REFUSE:
                self.clear(alone)
                return alone
        return None

    def clear(self, request_id: str) -> None:
        """It gained a token, or has ended."""
        self._num_crashes.pop(request_id, None)
        self._num_solo_crashes.pop(request_id, None)

    def _count_crash(self, busy_ids: Sequence[str]) -> None:
        if busy_ids:  # who died idle, or while it was loading, says nothing about anybody
            self._num_crashes = {
                request_id: self._num_crashes.get(request_id, 0) + 1 for request_id in busy_ids
            }
            self._num_solo_crashes = {
                request_id: 0
                for request_id, strikes in self._num_crashes.items()
                if strikes >= CRASHES_TO_SUSPECT
            }


class RestartPolicy:
    """How much is borne before an engine is given up for good.

    Requests that kill engines are refused in the end, so deaths in the midst of their work never lead to giving up, however
    many there are. What does: engines that do not start, and such that die of nothing. Who is in doubt gets work that kills
    nobody, so that one that is broken altogether dies of nothing too.
    """

    __slots__ = ("_failed_starts", "_fruitless_crashes", "_idle_crashes")

    def __init__(self) -> None:
        self._fruitless_crashes = 0
        self._idle_crashes = 0
        self._failed_starts = 0

    @property
    def needs_probe(self) -> bool:
        """Whether the next engine is to prove itself before it gets a request."""
        return self._fruitless_crashes >= CRASHES_TO_PROBE

    def on_crash(self, healthy_s: float, had_requests: bool) -> bool:
        """An engine died. Returns whether it is worth to start another.

        well_s  seconds from its readiness to the last step that it ended, or its last sign of life where it had none to do
        blamed  it worked on somebody's request
        """
        self._fruitless_crashes += 1
        if healthy_s >= HEALTHY_S:
            self._idle_crashes = 0
        self._idle_crashes += not had_requests
        return self._idle_crashes < MAX_IDLE_CRASHES

    def on_start_failed(self) -> bool:
        """Returns whether it is worth to try again."""
        self._failed_starts += 1
        return self._failed_starts < MAX_START_ATTEMPTS

    def on_started(self) -> None:
        self._failed_starts = 0

    def record_progress(self) -> None:
        """Somebody gained something: it was not in vain."""
        self._fruitless_crashes = self._idle_crashes = 0


class ImageRefs:
    """Pixels go to an engine once, however many requests have a picture, and stay there until the last of these has ended."""

    __slots__ = ("_ref_counts", "_released", "_sent")

    def __init__(self) -> None:
        self._ref_counts: Counter[bytes] = Counter()
        self._sent: set[bytes] = set()
        self._released: list[bytes] = []

    def add(self, request: Request) -> None:
        """A request is open."""
        self._ref_counts.update({picture.digest for picture in request.images})

    def remove(self, request: Request) -> None:
        """It is open no more."""
        for digest in {picture.digest for picture in request.images}:
            self._ref_counts[digest] -= 1
            if not self._ref_counts[digest]:
                del self._ref_counts[digest]
                if digest in self._sent:
                    self._sent.remove(digest)
                    self._released.append(digest)

    def reset(self) -> None:
        """The next engine has seen nothing."""
        self._sent.clear()
        self._released.clear()

    def to_messages(self, request: Request) -> list[AddImage | Request]:
        """How a request is handed over: pictures that are new to the engine, and then itself without any pixels."""
        if not request.images:
            return [request]
        new = {
            one.digest: one.pixels
            for one in request.images
            if one.pixels is not None and one.digest not in self._sent
        }
        self._sent.update(new)
        shows = [AddImage(digest, pixels) for digest, pixels in new.items()]
        return [
            *shows,
            replace(request, images=tuple(picture.without_pixels() for picture in request.images)),
        ]

    def pop_released(self) -> list[DropImage]:
        """What the engine is to forget, told once, and before anything else is handed over."""
        forgotten, self._released = self._released, []
        return [DropImage(digest) for digest in forgotten]


REPLAY_CHECK_TOKENS: Final = (
    4  # tokens before a death that are sampled again after it, to see that they are the same
)


class InflightRequest:
    """A request and what was delivered of its answer.

    |<- request.delivered_ids ->|<- delivered ---------------->|
                                |<- resumed with ->|<- checked ->|<- new ...

    number   the engine's name for it: how many requests it was sent before; None: it has not got it
    has_run  an engine, dead by now, worked on it
    """

    __slots__ = ("_first_timing", "arrival", "delivered_ids", "has_run", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.arrival: int | None = None
        self.has_run = False
        self.delivered_ids: list[int] = []
        self._first_timing: tuple[int, float] | None = (
            None  # num_cached and scheduled_s, as they were told first
        )

    @property
    def num_output(self) -> int:
        return len(self.request.resume_output_ids) + len(self.delivered_ids)

    def make_resume_request(self) -> Request:
        """What an engine is sent: all that was delivered but the last few tokens is output already."""
        if not self.delivered_ids:
            return replace(self.request, queue_deadline_s=None) if self.has_run else self.request
        before = self.request.resume_output_ids
        kept = self.delivered_ids[: max(len(self.delivered_ids) - REPLAY_CHECK_TOKENS, 0)]
        params = self.request.params
        if params.prompt_logprobs is not None:  # they came with the first token
            params = replace(params, prompt_logprobs=None)
        return replace(
            self.request,
            params=params,
            resume_output_ids=(*before, *kept),
            queue_deadline_s=None,
            is_resumed=True,
        )

    def on_event(self, event: TokenEvent) -> Event | None:
        """What is new of an event; None if nothing is, Failed if it is not what was delivered before."""
        start = event.index - len(self.request.resume_output_ids)
        count = min(len(self.delivered_ids) - start, len(event.token_ids))
        if (
            start < 0
            or count < 0
            or tuple(self.delivered_ids[start : start + count]) != event.token_ids[:count]
        ):
            return self._fail_mismatch(event)
        if count:
            event = drop_prefix(event, count)
        if not event.token_ids and event.finish_reason is None:
            return None
        self.delivered_ids += event.token_ids
        return self._keep_first_timing(event)

    def _keep_first_timing(self, event: TokenEvent) -> TokenEvent:
        """What was said of its beginning stays as it is."""
        if self._first_timing is None:
            self._first_timing = event.num_cached, event.scheduled_s
        if self._first_timing != (event.num_cached, event.scheduled_s):
            event = replace(event, num_cached=self._first_timing[0], scheduled_s=self._first_timing[1])
        return event

    def _fail_mismatch(self, event: TokenEvent) -> ErrorEvent:
        logger.error(
            "request %s would go on differently from token %d on; it is ended", event.request_id, event.index
        )
        error = RequestFailed(
            "the engine was replaced, and the replacement does not say the same tokens again; nothing was mixed"
        )
        return ErrorEvent(event.request_id, error)


@dataclass(frozen=True, slots=True)
class CrashResult:
    """What a death means.

    failed  who is not tried again
    blamed  a caller's request was worked on, which may be gone by now
    """

    failed: list[ErrorEvent]
    had_requests: bool


class InflightRequests:
    """Every open request, in order of arrival, and who of them may be sent to the engine that lives now.

    An engine that is to prove itself first gets a request of ours, and nothing else until it answers.

    gallery  of their pictures
    """

    __slots__ = ("_num_sent", "_probe", "_requests", "_suspects", "_unsent", "image_refs")

    def __init__(self) -> None:
        self.image_refs = ImageRefs()
        self._requests: dict[str, InflightRequest] = {}
        self._unsent: dict[str, InflightRequest] = {}
        self._suspects = CrashSuspects()
        self._probe: InflightRequest | None = None
        self._num_sent = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    @property
    def quarantined(self) -> str | None:
        """The suspect that runs alone just now."""
        return self._suspects.quarantined

    def add(self, request: Request) -> None:
        self._requests[request.id] = self._unsent[request.id] = InflightRequest(request)
        self.image_refs.add(request)

    def remove(self, request_id: str) -> None:
        """It ended, or nobody wants it any more; it may have ended before."""
        live = self._requests.pop(request_id, None)
        if live is not None:
            self.image_refs.remove(live.request)
        self._unsent.pop(request_id, None)
        self._suspects.clear(request_id)

    def pop_pending(self) -> list[Request]:
        """Those that the engine has not got and may have now; it has got them after this."""
        if self._probe is not None:
            return [self._send(self._probe)] if self._probe.arrival is None else []
        alone = self._suspects.quarantined
        if alone is None:
            due, self._unsent = self._unsent, {}
            return [self._send(live) for live in due.values()]
        live = self._unsent.pop(alone, None)
        return [] if live is None else [self._send(live)]

    def set_probe(self, request: Request) -> None:
        """The next engine is to answer this first; what it says is for nobody."""
        self._probe = InflightRequest(request)

    def _send(self, inflight: InflightRequest) -> Request:
        inflight.arrival = self._num_sent
        self._num_sent += 1
        return inflight.make_resume_request()

    def on_event(self, event: Event) -> Event | None:
        """What is new of what the engine says; None if nothing is, or if nobody listens any more."""
        live = self._requests.get(event.request_id)
        if live is None:
            self._check_probe(event)
            return None
        new = live.on_event(event) if isinstance(event, TokenEvent) else event
        if isinstance(new, ErrorEvent | EmbeddingEvent) or (
            new is not None and new.finish_reason is not None
        ):
            self.remove(event.request_id)
        elif new is not None:
            self._suspects.clear(event.request_id)
        return new

    def _check_probe(self, event: Event) -> None:
        """Any answer is good enough: an error is one."""
        if self._probe is not None and event.request_id == self._probe.request.id:
            self._probe = None

    def on_crash(self, busy_arrivals: Collection[int]) -> CrashResult:
        """The engine died while it worked on the requests of these numbers."""
        wanted = frozenset(busy_arrivals)
        blamed = bool(wanted - {self._probe.arrival} if self._probe is not None else wanted)
        at_work = [request_id for request_id, live in self._requests.items() if live.arrival in wanted]
        condemned = self._suspects.on_crash(at_work)
        failed = [] if condemned is None else [ErrorEvent(condemned, _crash_error())]
        for one in failed:
            self.remove(one.request_id)
        self._reset_sent(wanted)
        return CrashResult(failed, blamed)

    def _reset_sent(self, busy_arrivals: Collection[int]) -> None:
        """No engine has got any of them."""
        for live in self._requests.values():
            live.has_run = live.has_run or live.arrival in busy_arrivals
            live.arrival = None
        self._probe = None
        self.image_refs.reset()
        self._unsent = dict(self._requests)
        self._num_sent = 0

    def expire(self, now_s: float, is_responsive: bool, busy_arrivals: Collection[int]) -> list[ErrorEvent]:
        """End those whose time is over, at time.monotonic() `now_s`.

        answers  the engine says itself who of those that it has got should have begun by now
        at_work  numbers of those that it works on
        """
        failed = []
        for request_id, live in self._requests.items():
            has_run = (
                live.has_run
                or live.arrival in busy_arrivals
                or bool(live.delivered_ids)
                or (is_responsive and live.arrival is not None)
            )
            error = check_deadline(live.request, now_s, has_run)
            if error is not None:
                failed.append(ErrorEvent(request_id, error))
        for one in failed:
            self.remove(one.request_id)
        return failed

    def stats(self, now_s: float, last_stats: StepStats, is_running: bool) -> StepStats:
        """What is to be told while an engine says nothing, after it told `last`; `running`: it has got requests."""
        count = min(last_stats.requests_running, len(self._requests)) if is_running else 0
        return replace(
            last_stats,
            requests_running=count,
            requests_waiting=len(self._requests) - count,
            longest_running_tokens=max((live.num_output for live in self._requests.values()), default=0),
            oldest_running_seconds=max(
                (now_s - live.request.arrival_s for live in self._requests.values()), default=0.0
            ),
        )

    def fail_all(self, error: ForewordError) -> list[ErrorEvent]:
        """End all of them."""
        failed = [ErrorEvent(request_id, error) for request_id in self._requests]
        for one in failed:
            self.remove(one.request_id)
        return failed


def _crash_error() -> RequestFailed:
    return RequestFailed(
        f"the engine died {CRASHES_TO_REFUSE} times while it worked on this request alone; it is not tried again"
    )
