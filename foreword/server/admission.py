"""Bounds on open requests, tokens of prompts and parameters, and log-probabilities of answers."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from foreword.errors import ForewordError, InvalidRequest, Overloaded
from foreword.server.auth.keys import KeyPermissions
from foreword.server.auth.rate_limit import UsageMeter
from foreword.server.http.errors import error_response

LOGPROB_TOKENS = 4  # tokens of --max-waiting-tokens that a log-probability counts
RATE_WINDOW_S = 15.0  # time constant of the drain rate
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
# Paths that need no engine slot.
NO_ENGINE_PATHS = frozenset(
    {
        *("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens"),
        *("/models/load", "/models/unload"),
    }
)


class DrainRateEstimator:
    """How fast a resource is freed: a moving average over the time in which it was in use."""

    __slots__ = ("_busy_s", "_capacity", "_freed", "_promised_until_s", "_updated_s")

    def __init__(self, capacity: int, now: float) -> None:
        self._capacity = capacity  # amount in all
        self._updated_s = now
        self._busy_s = 0.0
        self._freed = 0.0
        self._promised_until_s = now

    def advance(self, now: float, busy: bool) -> None:
        """Account for the time up to `now`; idle time does not change the rate."""
        if busy:
            decay = math.exp((self._updated_s - now) / RATE_WINDOW_S)
            self._freed *= decay
            self._busy_s = self._busy_s * decay + RATE_WINDOW_S * (1 - decay)
        self._updated_s = now

    def record_freed(self, amount: int) -> None:
        self._freed += amount

    def retry_after_s(self, amount: int, now: float) -> float:
        """Estimated seconds until `amount` is free, after all earlier estimates.

        At most the time to free everything: clients that return too early would add estimates without end.
        """
        if not self._freed or not self._busy_s:
            return MIN_RETRY_S
        seconds_each = self._busy_s / self._freed
        longest_s = min(self._capacity * seconds_each, MAX_RETRY_S)
        free_s = max(self._promised_until_s, now) + amount * seconds_each
        self._promised_until_s = min(free_s, now + longest_s)
        return max(self._promised_until_s - now, MIN_RETRY_S)


class LogprobHolder(Protocol):
    """An answer that keeps log-probabilities until its end, or until a slow client has read them."""

    def end(self, error: ForewordError) -> bool:
        """End it with an error, also where only its client is late, and drop its log-probabilities.

        False if it has ended, or is being written as a whole.
        """


class HeldLogprobs:
    """Bounds the log-probabilities of all answers: a request of 100 bytes may ask for gigabytes of them."""

    def __init__(self, max_num: int) -> None:
        self._max_num = max_num
        self._num_of: Counter[LogprobHolder] = Counter()
        self.num_held = 0

    def add(self, holder: LogprobHolder, num: int) -> None:
        """Count `num` more. Where all answers have too many, the one with the most ends."""
        if not num:
            return
        self._num_of[holder] += num
        self.num_held += num
        if self.num_held <= self._max_num:
            return
        for largest, held in self._num_of.most_common():
            if largest.end(self._error(held)):
                return self.free(largest)

    def free(self, holder: LogprobHolder, num: float = math.inf) -> None:
        freed = int(min(num, self._num_of[holder]))
        self._num_of[holder] -= freed
        self.num_held -= freed
        if not self._num_of[holder]:
            del self._num_of[holder]

    def _error(self, held: int) -> ForewordError:
        if held > self._max_num:
            return InvalidRequest(
                f"the answer holds more than {self._max_num} log-probabilities; "
                "a stream of chat or completions that is read may have more",
                "logprobs",
            )
        state = f"open answers hold {self.num_held} log-probabilities of at most {self._max_num}"
        hint = "a stream of chat or completions that is read holds none"
        return Overloaded(f"{state}, this one {held}; {hint}", "logprobs", MIN_RETRY_S)


class Admission:
    """Bounds open requests, their tokens and log-probabilities, over all keys and per key."""

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        on_refusal: Callable[[str], None],  # called with one of the catalog's REJECTIONS
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._on_refusal = on_refusal
        self._clock = clock
        self._request_rate = DrainRateEstimator(max_requests, clock())
        self._token_rate = DrainRateEstimator(max_tokens, clock())
        self.held_logprobs = HeldLogprobs(max_tokens // LOGPROB_TOKENS)
        self.num_open = 0  # choices, texts to embed and pairs to score
        self.num_open_tokens = 0  # tokens of their prompts and parameters

    def check(self, count: int, meter: UsageMeter) -> None:
        """Refuse `count` choices before their prompt is tokenized.

        Raises InvalidRequest above the limit, Overloaded above its free part, RateLimited above the key's.
        """
        if count > self._max_requests:
            raise InvalidRequest(
                f"prompts times n is {count}; this server takes at most {self._max_requests} at once", "n"
            )
        if self.num_open + count > self._max_requests:
            state = f"{self.num_open} requests are open of at most {self._max_requests}"
            raise self._overloaded("queue", state, self._request_rate, count)
        meter.check_concurrency(count, MIN_RETRY_S)

    @contextmanager
    def reserve(self, count: int, meter: UsageMeter) -> Iterator[None]:
        """Hold `count` choices while their prompt and images are read; admit() comes after it.

        Raises as check().
        """
        self.check(count, meter)
        self._advance()
        self.num_open += count
        meter.open += count
        try:
            yield
        finally:
            self._advance()
            self.num_open -= count
            meter.open -= count

    def admit(
        self,
        count: int,
        tokens: int,
        meter: UsageMeter,
        charged_tokens: int | None = None,
        field: str = "prompt",
    ) -> AdmissionTicket:
        """Open `count` choices with `tokens` in prompts and parameters; the caller must release the ticket.

        `charged_tokens` are charged to the key (default: all): choices of one prompt are charged once.
        `field` of the request is named in an error.
        Raises as check(), and the same errors for tokens.
        """
        self.check(count, meter)
        meter.check_tokens()
        if tokens > self._max_tokens:
            parts = "prompts with log-probabilities" if field == "prompt_logprobs" else "prompts"
            raise InvalidRequest(
                f"{parts} and parameters of all choices hold {tokens} tokens; "
                f"this server takes at most {self._max_tokens} at once",
                field,
            )
        if self.num_open_tokens + tokens > self._max_tokens:
            state = f"open requests hold {self.num_open_tokens} tokens of at most {self._max_tokens}"
            raise self._overloaded("queue_tokens", state, self._token_rate, tokens)
        self._advance()
        self.num_open += count
        self.num_open_tokens += tokens
        meter.open += count
        meter.charge(tokens if charged_tokens is None else charged_tokens)
        return AdmissionTicket(self, count, tokens, meter)

    def _overloaded(self, reason: str, state: str, drain_rate: DrainRateEstimator, amount: int) -> Overloaded:
        self._advance()
        wait_s = drain_rate.retry_after_s(amount, self._clock())
        self._on_refusal(reason)
        return Overloaded(f"{state}; try again in {math.ceil(wait_s)} s", None, wait_s)

    def _advance(self) -> None:
        now, busy = self._clock(), self.num_open > 0
        self._request_rate.advance(now, busy)
        self._token_rate.advance(now, busy)

    def _release(self, count: int, tokens: int) -> None:
        self._advance()
        self._request_rate.record_freed(count)
        self._token_rate.record_freed(tokens)
        self.num_open -= count
        self.num_open_tokens -= tokens
        assert self.num_open >= 0 <= self.num_open_tokens, "admission: a choice was released twice"


class AdmissionTicket:
    """The admitted choices of one HTTP request, until release()."""

    __slots__ = ("_admission", "_count", "_meter", "_tokens")

    def __init__(self, admission: Admission, count: int, tokens: int, meter: UsageMeter) -> None:
        self._admission: Admission | None = admission
        self._count = count
        self._tokens = tokens
        self._meter = meter

    def charge_generated(self, num_tokens: int) -> None:
        self._meter.charge(generated_tokens=num_tokens)

    def release(self) -> None:
        """Free the choices and tokens; may be called twice."""
        if self._admission is None:
            return
        self._admission._release(self._count, self._tokens)
        self._admission = None
        self._meter.open -= self._count
        assert self._meter.open >= 0, "meter: a choice was released twice"


class AdmissionMiddleware:
    """Refuses a POST before its body is read, where that is cheapest; counts all but operators' POSTs."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"].startswith("/admin/"):
            return await self._app(scope, receive, send)
        access: KeyPermissions | None = scope.get("state", {}).get("access")
        if access is None:  # a public path, which takes no POST
            return await self._app(scope, receive, send)
        scope["state"]["meter"] = access.meter  # whose headers the response gets
        try:
            if scope["path"] not in NO_ENGINE_PATHS:
                self._admission.check(1, access.meter)
            access.meter.check_request()
        except ForewordError as error:
            return await error_response(error, scope)(scope, receive, send)
        await self._app(scope, receive, send)
