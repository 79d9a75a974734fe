"""What one key may take: requests and tokens by the minute, and open requests; and what it has taken."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from foreword.errors import RateLimited

__all__ = ["NO_LIMITS", "KeyLimits", "TokenBucket", "UsageMeter"]

MINUTE_S = 60.0
EPSILON = 1e-6  # who waits as long as told is not to miss by the last bit of a difference of times


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """None: without. Concurrency counts open choices and texts."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrency: int | None = None


NO_LIMITS = KeyLimits()


class TokenBucket:
    """A minute's worth that fills itself again, evenly. It may be overdrawn: then it is in debt until that is paid.

    per_minute  also how much it holds
    """

    __slots__ = ("_level", "_updated_s", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._updated_s = now

    def level(self, now: float) -> float:
        grown = (now - self._updated_s) * self.per_minute / MINUTE_S
        self._level, self._updated_s = min(self._level + grown, float(self.per_minute)), now
        return self._level

    def consume(self, amount: float, now: float) -> None:
        self._level = self.level(now) - amount

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until it holds as much as is wanted, which is at most a minute's worth."""
        missing = amount - self.level(now)
        return missing * MINUTE_S / self.per_minute if missing > EPSILON else 0.0

    def resize(self, per_minute: int, now: float) -> None:
        """What was taken stays taken."""
        taken = self.per_minute - self.level(now)
        self.per_minute, self._level = per_minute, per_minute - taken


class UsageMeter:
    """What one account takes, within its limits. Used from one thread.

    clock     monotonic seconds
    on_refusal  is told why: one of the catalog's REJECTIONS
    open      choices and texts under way
    requests, prompt_tokens, generated_tokens, refused  since the server began
    """

    __slots__ = (
        "_clock",
        "_limits",
        "_on_refusal",
        "_requests",
        "_tokens",
        "generated_tokens",
        "open",
        "prompt_tokens",
        "refused",
        "requests",
    )

    def __init__(
        self,
        limits: KeyLimits = NO_LIMITS,
        clock: Callable[[], float] = time.monotonic,
        on_refusal: Callable[[str], None] | None = None,
    ) -> None:
        self._clock = clock
        self._on_refusal = on_refusal
        self._limits = NO_LIMITS
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self.open = 0
        self.requests = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.refused = 0
        self.limits = limits

    @property
    def limits(self) -> KeyLimits:
        return self._limits

    @limits.setter
    def limits(self, limits: KeyLimits) -> None:
        """Others from now on; what was taken stays taken."""
        now = self._clock()
        self._limits = limits
        self._requests = _resize_bucket(self._requests, limits.requests_per_minute, now)
        self._tokens = _resize_bucket(self._tokens, limits.tokens_per_minute, now)

    def check_request(self) -> None:
        """A request came, whatever becomes of it. Raises RateLimited if it is one too many, or while tokens are owed."""
        now = self._clock()
        if self._requests is not None and (wait_s := self._requests.wait_s(1, now)) > 0:
            raise self._reject(
                f"this key may send {self._requests.per_minute} requests a minute", wait_s, "rate_requests"
            )
        self.check_tokens()
        if self._requests is not None:
            self._requests.consume(1, now)
        self.requests += 1

    def check_tokens(self) -> None:
        """Raises RateLimited unless at least a token is left of this minute's: what a prompt needs is not known before."""
        if self._tokens is not None and (wait_s := self._tokens.wait_s(1, self._clock())) > 0:
            raise self._reject(
                f"this key may use {self._tokens.per_minute} tokens a minute, of prompts and answers",
                wait_s,
                "rate_tokens",
            )

    def check_concurrency(self, count: int, wait_s: float) -> None:
        """Raises RateLimited if so many more would be too many; `wait_s` is when another try has a chance."""
        limit = self._limits.max_concurrency
        if limit is not None and self.open + count > limit:
            raise self._reject(
                f"this key may have {limit} requests open, and has {self.open}", wait_s, "concurrency"
            )

    def charge(self, prompt_tokens: int = 0, generated_tokens: int = 0) -> None:
        """Tokens that were read or delivered; more than is left becomes a debt."""
        self.prompt_tokens += prompt_tokens
        self.generated_tokens += generated_tokens
        if self._tokens is not None:
            self._tokens.consume(prompt_tokens + generated_tokens, self._clock())

    def headers(self) -> dict[str, str]:
        """What is left, as OpenAI's clients read it; nothing without limits by the minute."""
        now = self._clock()
        return {
            **_rate_limit_headers("requests", self._requests, now),
            **_rate_limit_headers("tokens", self._tokens, now),
        }

    def usage(self) -> Mapping[str, int]:
        names = ("open", "requests", "prompt_tokens", "generated_tokens", "refused")
        return {name: getattr(self, name) for name in names}

    def _reject(self, message: str, wait_s: float, reason: str) -> RateLimited:
        self.refused += 1
        if self._on_refusal is not None:
            self._on_refusal(reason)
        return RateLimited(f"{message}; try again in {math.ceil(wait_s)} s", retry_after_s=wait_s)


def _resize_bucket(bucket: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    if per_minute is None or bucket is None:
        return None if per_minute is None else TokenBucket(per_minute, now)
    bucket.resize(per_minute, now)
    return bucket


def _rate_limit_headers(name: str, bucket: TokenBucket | None, now: float) -> dict[str, str]:
    if bucket is None:
        return {}
    return {
        f"x-ratelimit-limit-{name}": str(bucket.per_minute),
        f"x-ratelimit-remaining-{name}": str(max(math.floor(bucket.level(now)), 0)),
        f"x-ratelimit-reset-{name}": _format_duration(bucket.wait_s(bucket.per_minute, now)),
    }


def _format_duration(seconds: float) -> str:
    """As OpenAI writes it: 850ms, 12s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    return f"{whole}s" if whole < MINUTE_S else f"{whole // 60}m{whole % 60}s"
