"""Limits of one key, by a clock that the test turns."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.errors import RateLimited
from foreword.server.auth.rate_limit import KeyLimits, TokenBucket, UsageMeter


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_requests_by_the_minute() -> None:
    clock, reasons = Clock(), list[str]()
    meter = UsageMeter(KeyLimits(requests_per_minute=3), clock, reasons.append)
    for _ in range(3):
        meter.check_request()
    with pytest.raises(RateLimited, match="3 requests a minute; try again in 20 s") as caught:
        meter.check_request()
    assert caught.value.retry_after_s == pytest.approx(20) and reasons == ["rate_requests"]
    clock.now += 19.5
    with pytest.raises(RateLimited):
        meter.check_request()
    clock.now += 0.5
    meter.check_request()
    assert (meter.requests, meter.refused) == (4, 2)


def test_who_waits_as_long_as_told_is_let_in() -> None:
    for per_minute in (1, 7, 50, 59, 61, 1000):
        clock = Clock()
        clock.now = 123456.789
        meter = UsageMeter(KeyLimits(requests_per_minute=per_minute), clock)
        for _ in range(3 * per_minute):
            try:
                meter.check_request()
            except RateLimited as error:
                assert error.retry_after_s is not None
                clock.now += error.retry_after_s
                meter.check_request()


def test_tokens_become_a_debt_that_is_paid_by_time() -> None:
    clock, reasons = Clock(), list[str]()
    meter = UsageMeter(KeyLimits(tokens_per_minute=600), clock, reasons.append)
    meter.check_request()
    meter.charge(prompt_tokens=500)
    meter.check_request()
    meter.charge(prompt_tokens=100, generated_tokens=290)
    for check in (meter.check_request, meter.check_tokens):
        with pytest.raises(RateLimited, match="600 tokens a minute") as caught:
            check()
        assert caught.value.retry_after_s == pytest.approx(29.1)
    assert reasons == ["rate_tokens"] * 2
    clock.now += 29.1
    meter.check_request()
    assert (meter.prompt_tokens, meter.generated_tokens, meter.requests) == (600, 290, 3)


def test_a_request_that_tokens_refuse_does_not_count() -> None:
    meter = UsageMeter(KeyLimits(requests_per_minute=2, tokens_per_minute=10), Clock())
    meter.charge(prompt_tokens=10)
    for _ in range(5):
        with pytest.raises(RateLimited, match="tokens a minute"):
            meter.check_request()
    assert meter.headers()["x-ratelimit-remaining-requests"] == "2"


def test_open_requests() -> None:
    meter = UsageMeter(KeyLimits(max_concurrency=3), Clock())
    meter.open = 2
    meter.check_concurrency(1, 1.0)
    with pytest.raises(RateLimited, match="3 requests open, and has 2") as caught:
        meter.check_concurrency(2, 7.0)
    assert caught.value.retry_after_s == 7.0


def test_without_limits() -> None:
    meter = UsageMeter()
    for _ in range(1000):
        meter.check_request()
        meter.charge(10**9)
        meter.check_concurrency(10**9, 1.0)
    assert meter.headers() == {}


def test_headers_as_openai_writes_them() -> None:
    clock = Clock()
    meter = UsageMeter(KeyLimits(requests_per_minute=60, tokens_per_minute=600), clock)
    meter.check_request()
    meter.charge(900)
    assert meter.headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m30s",
    }
    clock.now += 0.25
    assert meter.headers()["x-ratelimit-reset-requests"] == "750ms"
    assert meter.headers()["x-ratelimit-remaining-requests"] == "59"


def test_what_was_taken_stays_taken_when_limits_change() -> None:
    clock = Clock()
    meter = UsageMeter(KeyLimits(requests_per_minute=10, tokens_per_minute=100), clock)
    for _ in range(6):
        meter.check_request()
    meter.charge(150)
    meter.limits = KeyLimits(requests_per_minute=20, tokens_per_minute=200)
    assert meter.headers()["x-ratelimit-remaining-requests"] == "14"
    assert meter.headers()["x-ratelimit-remaining-tokens"] == "50"
    meter.limits = KeyLimits(requests_per_minute=5, tokens_per_minute=100)
    with pytest.raises(RateLimited):
        meter.check_request()
    meter.limits = KeyLimits(max_concurrency=1)
    meter.check_request()
    assert meter.headers() == {}


@given(
    st.integers(1, 10**6),
    st.lists(st.tuples(st.floats(0, 1000), st.floats(0, 10**7), st.integers(1, 10**6)), max_size=20),
)
def test_a_bucket_never_holds_more_than_a_minutes_worth(
    per_minute: int, events: list[tuple[float, float, int]]
) -> None:
    now = 0.0
    bucket = TokenBucket(per_minute, now)
    for seconds, amount, other in events:
        now += seconds
        bucket.consume(amount, now)
        bucket.resize(other, now)
        assert bucket.level(now) <= other
        wait_s = bucket.wait_s(1, now)
        assert 0 <= wait_s < math.inf
        assert bucket.level(now + wait_s) >= 1 - 1e-3 or bucket.per_minute < 1
