"""Open requests across engine restarts: resume state, crash blame, restart policy, images.

Pure bookkeeping: no processes, no clocks.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from foreword.core.outputs import ErrorEvent, Event, StepStats, TokenEvent, drop_prefix
from foreword.core.request import Request, check_deadline
from foreword.engine_client.messages import AddImage, DropImage
from foreword.errors import ForewordError, RequestFailed

logger = logging.getLogger(__name__)

CRASHES_TO_SUSPECT: Final = 2  # crashes in a row without a new token of a request, until it runs alone
CRASHES_TO_REFUSE: Final = 2  # crashes while it runs alone, until it is refused
CRASHES_TO_PROBE: Final = 2  # crashes in a row without any new token, until a new engine gets a probe request
MAX_IDLE_CRASHES: Final = 5
MAX_START_ATTEMPTS: Final = 3
HEALTHY_S: Final = 60.0  # uptime after which a crash resets the count of idle crashes
REPLAY_CHECK_TOKENS: Final = 4  # delivered tokens that a restart samples again and compares


class CrashSuspects:
    """Finds requests that crash the engine.

    A request in the batch at two crashes in a row, without a new token between them, is a suspect. Suspects
    run alone, one after another, until they gain a token or end; two crashes while alone mean refusal.
    With replicas, the crashes may be of different engines.
    """

    __slots__ = ("_num_crashes", "_num_solo_crashes")

    def __init__(self) -> None:
        self._num_crashes: dict[str, int] = {}
        self._num_solo_crashes: dict[str, int] = {}  # of suspects, in the order in which they run

    @property
    def quarantined(self) -> str | None:
        """The suspect that runs alone now."""
        return next(iter(self._num_solo_crashes), None)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._num_solo_crashes

    def on_crash(self, busy_ids: Sequence[str], idle_ids: Iterable[str] = ()) -> str | None:
        """An engine crashed with these open requests in the batch. Returns the request to refuse.

        idle_ids  its other open requests, which are innocent
        """
        suspect = self.quarantined
        if suspect is not None and suspect in busy_ids:
            self._num_solo_crashes[suspect] += 1
            if self._num_solo_crashes[suspect] >= CRASHES_TO_REFUSE:
                self.clear(suspect)
                return suspect
        elif busy_ids:  # a crash while idle or loading has no suspects
            for request_id in idle_ids:
                self._num_crashes.pop(request_id, None)
            for request_id in busy_ids:
                count = self._num_crashes[request_id] = self._num_crashes.get(request_id, 0) + 1
                if count >= CRASHES_TO_SUSPECT:
                    self._num_solo_crashes.setdefault(request_id, 0)
        return None

    def clear(self, request_id: str) -> None:
        """The request gained a token, or ended."""
        self._num_crashes.pop(request_id, None)
        self._num_solo_crashes.pop(request_id, None)


class RestartPolicy:
    """Decides when to give up on the engine.

    Crashes during requests never lead to that: such requests are refused in the end. Failed starts do, and
    crashes without requests. A probe request turns crashes of a broken engine into crashes without requests.
    """

    __slots__ = ("_failed_starts", "_fruitless_crashes", "_idle_crashes")

    def __init__(self) -> None:
        self._fruitless_crashes = 0  # since the last new token
        self._idle_crashes = 0
        self._failed_starts = 0

    @property
    def needs_probe(self) -> bool:
        """Whether the next engine has to answer a probe request first."""
        return self._fruitless_crashes >= CRASHES_TO_PROBE

    def on_crash(self, healthy_s: float, had_requests: bool) -> bool:
        """The engine crashed; returns whether to restart it.

        healthy_s     seconds from readiness to the last step, or to the last heartbeat if idle
        had_requests  a user's request was in the batch
        """
        self._fruitless_crashes += 1
        if healthy_s >= HEALTHY_S:
            self._idle_crashes = 0
        self._idle_crashes += not had_requests
        return self._idle_crashes < MAX_IDLE_CRASHES

    def on_start_failed(self) -> bool:
        """Returns whether to try again."""
        self._failed_starts += 1
        return self._failed_starts < MAX_START_ATTEMPTS

    def on_started(self) -> None:
        self._failed_starts = 0

    def record_progress(self) -> None:
        """A request gained a token or ended."""
        self._fruitless_crashes = self._idle_crashes = 0


class ImageRefs:
    """Images of open requests: the engine gets each image once, and keeps it until its last request ends."""

    __slots__ = ("_ref_counts", "_released", "_sent")

    def __init__(self) -> None:
        self._ref_counts: Counter[bytes] = Counter()
        self._sent: set[bytes] = set()  # digests that the engine has
        self._released: list[bytes] = []

    def add(self, request: Request) -> None:
        self._ref_counts.update({image.digest for image in request.images})

    def remove(self, request: Request) -> None:
        for digest in {image.digest for image in request.images}:
            self._ref_counts[digest] -= 1
            if not self._ref_counts[digest]:
                del self._ref_counts[digest]
                if digest in self._sent:
                    self._sent.remove(digest)
                    self._released.append(digest)

    def reset(self) -> None:
        """A new engine has no images."""
        self._sent.clear()
        self._released.clear()

    def to_messages(self, request: Request) -> list[AddImage | Request]:
        """Images that the engine lacks, then the request without pixels."""
        if not request.images:
            return [request]
        new = {
            image.digest: image.pixels
            for image in request.images
            if image.pixels is not None and image.digest not in self._sent
        }
        self._sent.update(new)
        bare = replace(request, images=tuple(image.without_pixels() for image in request.images))
        return [*(AddImage(digest, pixels) for digest, pixels in new.items()), bare]

    def pop_released(self) -> list[DropImage]:
        """Images to drop, sent before anything else."""
        released, self._released = self._released, []
        return [DropImage(digest) for digest in released]


class InflightRequest:
    """A request and the delivered part of its answer.

    |<- request.resume_output_ids ->|<- delivered_ids ----------------------------->|
                                    |<- output of a resumed request ->|<- checked ->|<- new ...
    """

    __slots__ = ("_first_timing", "arrival", "delivered_ids", "has_run", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.arrival: int | None = None  # index among the requests sent to this engine; None: not sent
        self.has_run = False  # in an engine that crashed
        self.delivered_ids: list[int] = []
        self._first_timing: tuple[int, float] | None = None  # num_cached and scheduled_s of the first event

    @property
    def num_output(self) -> int:
        return len(self.request.resume_output_ids) + len(self.delivered_ids)

    def make_resume_request(self) -> Request:
        """The request for a new engine: delivered tokens are output already, except the last few."""
        if not self.delivered_ids:
            return replace(self.request, queue_deadline_s=None) if self.has_run else self.request
        kept = self.delivered_ids[: max(len(self.delivered_ids) - REPLAY_CHECK_TOKENS, 0)]
        params = self.request.params
        if params.prompt_logprobs is not None:  # delivered with the first token
            params = replace(params, prompt_logprobs=None)
        return replace(
            self.request,
            params=params,
            resume_output_ids=(*self.request.resume_output_ids, *kept),
            queue_deadline_s=None,
            is_resumed=True,
        )

    def on_event(self, event: TokenEvent) -> Event | None:
        """The part of an event that was not delivered; an ErrorEvent if delivered tokens differ."""
        start = event.index - len(self.request.resume_output_ids)
        count = min(len(self.delivered_ids) - start, len(event.token_ids))
        delivered = tuple(self.delivered_ids[start : start + count])
        if start < 0 or count < 0 or delivered != event.token_ids[:count]:
            logger.error(
                "client: request %s differs after the restart at token %d; ending it",
                event.request_id,
                event.index,
            )
            error = "the engine was restarted and does not sample the same tokens again; the answer ends here"
            return ErrorEvent(event.request_id, RequestFailed(error))
        if count:
            event = drop_prefix(event, count)
        if not event.token_ids and event.finish_reason is None:
            return None
        self.delivered_ids += event.token_ids
        timing = event.num_cached, event.scheduled_s
        self._first_timing = self._first_timing or timing
        if self._first_timing != timing:
            event = event._replace(num_cached=self._first_timing[0], scheduled_s=self._first_timing[1])
        return event


@dataclass(frozen=True, slots=True)
class CrashResult:
    """Effect of a crash on the open requests."""

    failed: list[ErrorEvent]  # refused requests
    had_requests: bool  # a user's request was in the batch, perhaps closed by now


class InflightRequests:
    """All open requests in order of arrival, and which of them the current engine may get."""

    __slots__ = ("_num_sent", "_probe", "_requests", "_suspects", "_unsent", "image_refs")

    def __init__(self) -> None:
        self.image_refs = ImageRefs()
        self._requests: dict[str, InflightRequest] = {}
        self._unsent: dict[str, InflightRequest] = {}
        self._suspects = CrashSuspects()
        self._probe: InflightRequest | None = None  # the engine gets nothing else before it answered
        self._num_sent = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    @property
    def quarantined(self) -> str | None:
        """The suspect that runs alone now."""
        return self._suspects.quarantined

    def uses_adapter(self, digest: str) -> bool:
        """Whether an open request uses this adapter."""
        return any(inflight.request.adapter == digest for inflight in self._requests.values())

    def add(self, request: Request) -> None:
        self._requests[request.id] = self._unsent[request.id] = InflightRequest(request)
        self.image_refs.add(request)

    def remove(self, request_id: str) -> None:
        """Does nothing for a request that is not open."""
        inflight = self._requests.pop(request_id, None)
        if inflight is not None:
            self.image_refs.remove(inflight.request)
        self._unsent.pop(request_id, None)
        self._suspects.clear(request_id)

    def pop_pending(self) -> list[Request]:
        """Requests to send to the engine now."""
        if self._probe is not None:
            return [self._send(self._probe)] if self._probe.arrival is None else []
        suspect = self._suspects.quarantined
        if suspect is None:
            pending, self._unsent = self._unsent, {}
            return [self._send(inflight) for inflight in pending.values()]
        inflight = self._unsent.pop(suspect, None)
        return [] if inflight is None else [self._send(inflight)]

    def set_probe(self, request: Request) -> None:
        """Set the first request of the next engine; its events are dropped."""
        self._probe = InflightRequest(request)

    def _send(self, inflight: InflightRequest) -> Request:
        inflight.arrival = self._num_sent
        self._num_sent += 1
        return inflight.make_resume_request()

    def on_event(self, event: Event) -> Event | None:
        """The new part of an event; None if there is none, or the request is not open."""
        inflight = self._requests.get(event.request_id)
        if inflight is None:
            if self._probe is not None and event.request_id == self._probe.request.id:
                self._probe = None  # any answer will do, also an error
            return None
        new = inflight.on_event(event) if isinstance(event, TokenEvent) else event
        if new is None:
            return None
        if not isinstance(new, TokenEvent) or new.finish_reason is not None:
            self.remove(event.request_id)
        else:
            self._suspects.clear(event.request_id)
        return new

    def in_batch(self, busy_arrivals: Collection[int]) -> list[str]:
        """Ids of the open requests with these arrival numbers."""
        return [request_id for request_id, each in self._requests.items() if each.arrival in busy_arrivals]

    def on_crash(self, busy_arrivals: Collection[int]) -> CrashResult:
        """The engine crashed with these arrival numbers in its batch: all requests are unsent again."""
        busy = frozenset(busy_arrivals)
        had_requests = bool(busy - {self._probe.arrival} if self._probe is not None else busy)
        in_batch = self.in_batch(busy)
        refused = self._suspects.on_crash(in_batch, self._requests.keys() - set(in_batch))
        failed = [] if refused is None else [ErrorEvent(refused, crash_error())]
        for event in failed:
            self.remove(event.request_id)
        for inflight in self._requests.values():
            inflight.has_run = inflight.has_run or inflight.arrival in busy
            inflight.arrival = None
        self._probe = None
        self.image_refs.reset()
        self._unsent = dict(self._requests)
        self._num_sent = 0
        return CrashResult(failed, had_requests)

    def expire(self, now_s: float, is_responsive: bool, busy_arrivals: Collection[int]) -> list[ErrorEvent]:
        """End requests beyond their deadlines at time.monotonic() `now_s`.

        is_responsive  the engine enforces queue deadlines of the requests it has
        busy_arrivals  arrival numbers in its batch
        """
        failed = []
        for request_id, inflight in self._requests.items():
            has_run = (
                inflight.has_run
                or inflight.arrival in busy_arrivals
                or bool(inflight.delivered_ids)
                or (is_responsive and inflight.arrival is not None)
            )
            error = check_deadline(inflight.request, now_s, has_run)
            if error is not None:
                failed.append(ErrorEvent(request_id, error))
        for event in failed:
            self.remove(event.request_id)
        return failed

    def stats(self, now_s: float, last_stats: StepStats, is_running: bool) -> StepStats:
        """Stats while the engine is unresponsive; is_running: it has requests."""
        inflight = self._requests.values()
        running = min(last_stats.requests_running, len(inflight)) if is_running else 0
        return replace(
            last_stats,
            requests_running=running,
            requests_waiting=len(inflight) - running,
            longest_running_tokens=max((each.num_output for each in inflight), default=0),
            oldest_running_seconds=max((now_s - each.request.arrival_s for each in inflight), default=0.0),
        )

    def fail_all(self, error: ForewordError) -> list[ErrorEvent]:
        failed = [ErrorEvent(request_id, error) for request_id in self._requests]
        for event in failed:
            self.remove(event.request_id)
        return failed


def crash_error() -> RequestFailed:
    return RequestFailed(
        f"the engine died {CRASHES_TO_REFUSE} times while it ran this request alone; it is not retried"
    )
