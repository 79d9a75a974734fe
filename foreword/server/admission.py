"""How much may be open at once: requests, and the tokens of their prompts. Who comes beyond that is told when to come again.

Refusing at the door, before anything is read, what could not be served now; and telling limited keys what they have left.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreword.errors import ForewordError, InvalidRequest, Overloaded
from foreword.server.auth.keys import KeyPermissions
from foreword.server.auth.rate_limit import UsageMeter
from foreword.server.errors import error_response

__all__ = ["Admission", "AdmissionMiddleware", "AdmissionTicket", "DrainRateEstimator"]

RATE_WINDOW_S = 15.0  # what was freed longer ago than this says little of what will be
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0


class DrainRateEstimator:
    """How fast something becomes free, over the last seconds in which any of it was taken."""

    __slots__ = ("_busy_s", "_freed", "_promised_until_s", "_updated_s")

    def __init__(self, now: float) -> None:
        self._updated_s = now
        self._busy_s = 0.0
        self._freed = 0.0
        self._promised_until_s = now

    def advance(self, now: float, busy: bool) -> None:
        """Up to now any was taken, or none: idle time says nothing of the speed."""
        if busy:
            kept = math.exp((self._updated_s - now) / RATE_WINDOW_S)
            self._freed *= kept
            self._busy_s = self._busy_s * kept + RATE_WINDOW_S * (1 - kept)
        self._updated_s = now

    def record_freed(self, amount: int) -> None:
        self._freed += amount

    def retry_after_s(self, amount: int, now: float) -> float:
        """Seconds after which so much should be free, for one who comes behind all that were told so before."""
        if not self._freed or not self._busy_s:
            return MIN_RETRY_S
        free_s = max(self._promised_until_s, now) + amount * self._busy_s / self._freed
        self._promised_until_s = min(free_s, now + MAX_RETRY_S)
        return min(max(free_s - now, MIN_RETRY_S), MAX_RETRY_S)


class Admission:
    """Counts what is open against two limits, and against those of each key.

    open         engine requests, one for each choice, and texts to embed or pairs to score
    open_tokens  of their prompts
    on_refusal   is told why: one of the catalog's REJECTIONS
    """

    __slots__ = (
        "_clock",
        "_max_requests",
        "_max_tokens",
        "_on_refusal",
        "_request_rate",
        "_token_rate",
        "num_open",
        "num_open_tokens",
    )

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        on_refusal: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._on_refusal = on_refusal
        self._clock = clock
        self._request_rate = DrainRateEstimator(clock())
        self._token_rate = DrainRateEstimator(clock())
        self.num_open = 0
        self.num_open_tokens = 0

    def check(self, count: int, meter: UsageMeter) -> None:
        """Refuse what needs no reading of the prompt to be refused.

        Raises InvalidRequest for more choices than could ever be open, Overloaded for more than can be now, RateLimited for
        more than this caller may have.
        """
        if count > self._max_requests:
            raise InvalidRequest(
                f"prompts times n is {count}; this server takes at most {self._max_requests} at once", "n"
            )
        if self.num_open + count > self._max_requests:
            wait_s = self._retry_after_s(self._request_rate, count)
            self._on_refusal("queue")
            raise Overloaded(
                f"{self.num_open} requests are open of at most {self._max_requests}; {_retry_hint(wait_s)}",
                None,
                wait_s,
            )
        meter.check_concurrency(count, MIN_RETRY_S)

    @contextmanager
    def reserve(self, count: int, meter: UsageMeter) -> Iterator[None]:
        """Room for so many choices while their prompt is read, which may take long. They take() their own behind it.

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
        self, count: int, tokens: int, meter: UsageMeter, charged_tokens: int | None = None
    ) -> AdmissionTicket:
        """Let in so many choices; the caller gives the ticket back, whatever happens.

        tokens       of their prompts, each choice for itself
        read_tokens  what `meter` is charged: a prompt counts once, however many choices it has; None: all
        Raises what check() does, and the same for the tokens.
        """
        self.check(count, meter)
        meter.check_tokens()
        self._check_tokens(tokens)
        self._advance()
        self.num_open += count
        self.num_open_tokens += tokens
        meter.open += count
        meter.charge(tokens if charged_tokens is None else charged_tokens)
        return AdmissionTicket(self, count, tokens, meter)

    def _check_tokens(self, tokens: int) -> None:
        if tokens > self._max_tokens:
            raise InvalidRequest(
                f"the prompts of all choices hold {tokens} tokens; this server takes at most {self._max_tokens} at once",
                "prompt",
            )
        if self.num_open_tokens + tokens > self._max_tokens:
            wait_s = self._retry_after_s(self._token_rate, tokens)
            self._on_refusal("queue_tokens")
            raise Overloaded(
                f"the prompts that are open hold {self.num_open_tokens} tokens of at most {self._max_tokens}; {_retry_hint(wait_s)}",
                None,
                wait_s,
            )

    def _retry_after_s(self, drain_rate: DrainRateEstimator, amount: int) -> float:
        self._advance()
        return drain_rate.retry_after_s(amount, self._clock())

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
        assert self.num_open >= 0 <= self.num_open_tokens, "a place was given back twice"


class AdmissionTicket:
    """The places of one HTTP request, until they are given back."""

    __slots__ = ("_admission", "_count", "_meter", "_tokens")

    def __init__(self, admission: Admission, count: int, tokens: int, meter: UsageMeter) -> None:
        self._admission: Admission | None = admission
        self._count = count
        self._tokens = tokens
        self._meter = meter

    def charge_generated(self, num_tokens: int) -> None:
        """Tokens of an answer reached the caller."""
        self._meter.charge(generated_tokens=num_tokens)

    def release(self) -> None:
        """Give the places back; doing so twice is allowed."""
        if self._admission is None:
            return
        self._admission._release(self._count, self._tokens)
        self._admission = None
        self._meter.open -= self._count
        assert self._meter.open >= 0, "a choice ended twice"


def _retry_hint(wait_s: float) -> str:
    return f"try again in {math.ceil(wait_s)} s"


NO_ENGINE_PATHS = frozenset({"/tokenize", "/detokenize"})  # the engine is not asked


class AdmissionMiddleware:
    """Counts every POST but those of operators: each costs something. Refused here, one costs next to nothing."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"].startswith("/admin/"):
            return await self._app(scope, receive, send)
        access: KeyPermissions | None = scope.get("state", {}).get("access")
        if access is None:  # a path that is open to everybody, and takes no POST
            return await self._app(scope, receive, send)
        try:
            if scope["path"] not in NO_ENGINE_PATHS:
                self._admission.check(1, access.meter)
            access.meter.check_request()
        except ForewordError as error:
            return await error_response(error)(scope, receive, _with_rate_limit_headers(send, access.meter))
        await self._app(scope, receive, _with_rate_limit_headers(send, access.meter))


def _with_rate_limit_headers(send: Send, meter: UsageMeter) -> Send:
    """`send`, with what is left of the key's limits in the head of the answer."""

    async def send_telling(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in meter.headers().items():
                headers[name] = value
        await send(message)

    return send_telling
