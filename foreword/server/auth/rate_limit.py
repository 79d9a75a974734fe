"""Per-key limits on requests, tokens and concurrency, and per-key usage counters."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from foreword.errors import QuotaExceeded, RateLimited
from foreword.server.auth.key_file import Key
from foreword.server.auth.usage_log import UsageLog

MINUTE_S = 60.0
EPSILON = 1e-6  # float tolerance: a client that waits exactly Retry-After is admitted
NO_KEY = Key("", b"", b"")  # of every client of a server without keys: no limits


class TokenBucket:
    """Refills evenly and holds one minute's worth. It may be overdrawn, and is then in debt."""

    __slots__ = ("_level", "_updated_s", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._updated_s = now

    def level(self, now: float) -> float:
        refill = (now - self._updated_s) * self.per_minute / MINUTE_S
        self._level, self._updated_s = min(self._level + refill, float(self.per_minute)), now
        return self._level

    def consume(self, amount: float, now: float) -> None:
        self._level = self.level(now) - amount

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until the bucket holds `amount`, which is at most a minute's worth."""
        missing = amount - self.level(now)
        return missing * MINUTE_S / self.per_minute if missing > EPSILON else 0.0

    def resize(self, per_minute: int, now: float) -> None:
        """Change the limit and keep the used amount."""
        used = self.per_minute - self.level(now)
        self.per_minute, self._level = per_minute, per_minute - used


class UsageMeter:
    """Usage of one key, within its limits. Used from one thread."""

    def __init__(
        self,
        key: Key = NO_KEY,
        clock: Callable[[], float] = time.monotonic,
        on_refusal: Callable[[str], None] | None = None,  # called with one of the catalog's REJECTIONS
        usage: UsageLog | None = None,  # counts the tokens of the day
    ) -> None:
        self._clock = clock
        self._usage = usage
        self._on_refusal = on_refusal
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self.open = 0  # choices and texts; the other counters are totals since the server started
        self.requests = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.refused = 0
        self.set_key(key)

    def set_key(self, key: Key) -> None:
        """New limits of the same key; used amounts still count."""
        now = self._clock()
        self.key = key
        self._requests = _resize_bucket(self._requests, key.requests_per_minute, now)
        self._tokens = _resize_bucket(self._tokens, key.tokens_per_minute, now)

    def check_request(self) -> None:
        """Count one request. Raises RateLimited above the requests or tokens per minute."""
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
        """Raises RateLimited unless one token is left: the tokens of a prompt are not known yet."""
        self._check_day()
        if self._tokens is not None and (wait_s := self._tokens.wait_s(1, self._clock())) > 0:
            limit = self._tokens.per_minute
            raise self._reject(
                f"this key may use {limit} tokens a minute, of prompts and answers", wait_s, "rate_tokens"
            )

    def _check_day(self) -> None:
        limit, usage = self.key.tokens_per_day, self._usage
        if limit is not None and usage is not None and usage.tokens_today(self.key.name) >= limit:
            wait_s = usage.seconds_left_today()
            self._count_refusal("quota")
            raise QuotaExceeded(
                f"this key may use {limit} tokens a day, of prompts and answers; it ends at midnight, UTC",
                retry_after_s=wait_s,
            )

    def check_concurrency(self, count: int, wait_s: float) -> None:
        """Raises RateLimited if `count` more would exceed the concurrency; `wait_s` is its Retry-After."""
        limit = self.key.max_concurrency
        if limit is not None and self.open + count > limit:
            raise self._reject(
                f"this key may have {limit} requests open, and has {self.open}", wait_s, "concurrency"
            )

    def charge(self, prompt_tokens: int = 0, generated_tokens: int = 0) -> None:
        """Count tokens; more than the bucket holds becomes a debt."""
        self.prompt_tokens += prompt_tokens
        self.generated_tokens += generated_tokens
        if self._tokens is not None:
            self._tokens.consume(prompt_tokens + generated_tokens, self._clock())

    def headers(self) -> dict[str, str]:
        """OpenAI's x-ratelimit-* headers; empty without limits per minute."""
        now = self._clock()
        buckets = {"requests": self._requests, "tokens": self._tokens}
        return {
            name: value
            for unit, bucket in buckets.items()
            if bucket is not None
            for name, value in (
                (f"x-ratelimit-limit-{unit}", str(bucket.per_minute)),
                (f"x-ratelimit-remaining-{unit}", str(max(math.floor(bucket.level(now)), 0))),
                (f"x-ratelimit-reset-{unit}", _format_duration(bucket.wait_s(bucket.per_minute, now))),
            )
        }

    def usage(self) -> Mapping[str, int]:
        names = ("open", "requests", "prompt_tokens", "generated_tokens", "refused")
        today = {} if self._usage is None else {"tokens_today": self._usage.tokens_today(self.key.name)}
        return {name: getattr(self, name) for name in names} | today

    def _count_refusal(self, reason: str) -> None:
        self.refused += 1
        if self._on_refusal is not None:
            self._on_refusal(reason)

    def _reject(self, message: str, wait_s: float, reason: str) -> RateLimited:
        self._count_refusal(reason)
        return RateLimited(f"{message}; try again in {math.ceil(wait_s)} s", retry_after_s=wait_s)


def _resize_bucket(bucket: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    if per_minute is None or bucket is None:
        return None if per_minute is None else TokenBucket(per_minute, now)
    bucket.resize(per_minute, now)
    return bucket


def _format_duration(seconds: float) -> str:
    """OpenAI's format: 850ms, 12s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    total_s = math.ceil(seconds)
    return f"{total_s}s" if total_s < MINUTE_S else f"{total_s // 60}m{total_s % 60}s"
