"""How much may be open at once: requests, and the tokens of their prompts. Who comes beyond that is told when to come again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from foreword.errors import InvalidRequest, Overloaded
from foreword.serve.limits import Meter

__all__ = ["Admission", "Outflow", "Ticket"]

MEMORY_S = 15.0  # what was freed longer ago than this says little of what will be
SOONEST_S, LATEST_S = 1.0, 60.0


class Outflow:
    """How fast something becomes free, over the last seconds in which any of it was taken."""

    __slots__ = ("_busy_s", "_freed", "_promised_s", "_seen_s")

    def __init__(self, now: float) -> None:
        self._seen_s = now
        self._busy_s = 0.0
        self._freed = 0.0
        self._promised_s = now

    def pass_time(self, now: float, busy: bool) -> None:
        """Up to now any was taken, or none: idle time says nothing of the speed."""
        if busy:
            kept = math.exp((self._seen_s - now) / MEMORY_S)
            self._freed *= kept
            self._busy_s = self._busy_s * kept + MEMORY_S * (1 - kept)
        self._seen_s = now

    def free(self, amount: int) -> None:
        self._freed += amount

    def promise(self, amount: int, now: float) -> float:
        """Seconds after which so much should be free, for one who comes behind all that were told so before."""
        if not self._freed or not self._busy_s:
            return SOONEST_S
        free_s = max(self._promised_s, now) + amount * self._busy_s / self._freed
        self._promised_s = min(free_s, now + LATEST_S)
        return min(max(free_s - now, SOONEST_S), LATEST_S)


class Admission:
    """Counts what is open against two limits, and against those of each key.

    open         engine requests, one for each choice, and texts to embed or pairs to score
    open_tokens  of their prompts
    on_refusal   is told why: one of the catalog's REJECTIONS
    """

    __slots__ = ("_clock", "_max_requests", "_max_tokens", "_on_refusal", "_requests", "_tokens", "open", "open_tokens")

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
        self._requests = Outflow(clock())
        self._tokens = Outflow(clock())
        self.open = 0
        self.open_tokens = 0

    def check(self, count: int, meter: Meter) -> None:
        """Refuse what needs no reading of the prompt to be refused.

        Raises InvalidRequest for more choices than could ever be open, Overloaded for more than can be now, RateLimited for
        more than this caller may have.
        """
        if count > self._max_requests:
            raise InvalidRequest(f"prompts times n is {count}; this server takes at most {self._max_requests} at once", "n")
        if self.open + count > self._max_requests:
            wait_s = self._promise(self._requests, count)
            self._on_refusal("queue")
            raise Overloaded(f"{self.open} requests are open of at most {self._max_requests}; {_again(wait_s)}", None, wait_s)
        meter.check_open(count, SOONEST_S)

    @contextmanager
    def place(self, count: int, meter: Meter) -> Iterator[None]:
        """Room for so many choices while their prompt is read, which may take long. They take() their own behind it.

        Raises as check().
        """
        self.check(count, meter)
        self._pass_time()
        self.open += count
        meter.open += count
        try:
            yield
        finally:
            self._pass_time()
            self.open -= count
            meter.open -= count

    def take(self, count: int, tokens: int, meter: Meter, read_tokens: int | None = None) -> Ticket:
        """Let in so many choices; the caller gives the ticket back, whatever happens.

        tokens       of their prompts, each choice for itself
        read_tokens  what `meter` is charged: a prompt counts once, however many choices it has; None: all
        Raises what check() does, and the same for the tokens.
        """
        self.check(count, meter)
        meter.check_tokens()
        self._check_tokens(tokens)
        self._pass_time()
        self.open += count
        self.open_tokens += tokens
        meter.open += count
        meter.spend(tokens if read_tokens is None else read_tokens)
        return Ticket(self, count, tokens, meter)

    def _check_tokens(self, tokens: int) -> None:
        if tokens > self._max_tokens:
            raise InvalidRequest(
                f"the prompts of all choices hold {tokens} tokens; this server takes at most {self._max_tokens} at once", "prompt"
            )
        if self.open_tokens + tokens > self._max_tokens:
            wait_s = self._promise(self._tokens, tokens)
            self._on_refusal("queue_tokens")
            raise Overloaded(
                f"the prompts that are open hold {self.open_tokens} tokens of at most {self._max_tokens}; {_again(wait_s)}",
                None,
                wait_s,
            )

    def _promise(self, outflow: Outflow, amount: int) -> float:
        self._pass_time()
        return outflow.promise(amount, self._clock())

    def _pass_time(self) -> None:
        now, busy = self._clock(), self.open > 0
        self._requests.pass_time(now, busy)
        self._tokens.pass_time(now, busy)

    def _free(self, count: int, tokens: int) -> None:
        self._pass_time()
        self._requests.free(count)
        self._tokens.free(tokens)
        self.open -= count
        self.open_tokens -= tokens
        assert self.open >= 0 <= self.open_tokens, "a place was given back twice"


class Ticket:
    """The places of one HTTP request, until they are given back."""

    __slots__ = ("_admission", "_count", "_meter", "_tokens")

    def __init__(self, admission: Admission, count: int, tokens: int, meter: Meter) -> None:
        self._admission: Admission | None = admission
        self._count = count
        self._tokens = tokens
        self._meter = meter

    def delivered(self, num_tokens: int) -> None:
        """Tokens of an answer reached the caller."""
        self._meter.spend(generated_tokens=num_tokens)

    def release(self) -> None:
        """Give the places back; doing so twice is allowed."""
        if self._admission is None:
            return
        self._admission._free(self._count, self._tokens)
        self._admission = None
        self._meter.open -= self._count
        assert self._meter.open >= 0, "a choice ended twice"


def _again(wait_s: float) -> str:
    return f"try again in {math.ceil(wait_s)} s"
