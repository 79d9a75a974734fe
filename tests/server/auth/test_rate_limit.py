"""Limits of one key, with a fake clock."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.errors import RateLimited
from foreword.server.auth.rate_limit import NO_KEY, TokenBucket, UsageMeter
from tests.support.waiting import FakeClock


def test_requests_per_minute() -> None:
    clock, reasons = FakeClock(), list[str]()
    meter = UsageMeter(replace(NO_KEY, requests_per_minute=3), clock, reasons.append)
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


def test_client_is_admitted_after_retry_after() -> None:
    for per_minute in (1, 7, 50, 59, 61, 1000):
        clock = FakeClock()
        clock.now = 123456.789
        meter = UsageMeter(replace(NO_KEY, requests_per_minute=per_minute), clock)
        for _ in range(3 * per_minute):
            try:
                meter.check_request()
            except RateLimited as error:
                assert error.retry_after_s is not None
                clock.now += error.retry_after_s
                meter.check_request()


def test_token_debt_is_repaid_over_time() -> None:
    clock, reasons = FakeClock(), list[str]()
    meter = UsageMeter(replace(NO_KEY, tokens_per_minute=600), clock, reasons.append)
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


def test_request_refused_for_tokens_is_not_counted() -> None:
    meter = UsageMeter(replace(NO_KEY, requests_per_minute=2, tokens_per_minute=10), FakeClock())
    meter.charge(prompt_tokens=10)
    for _ in range(5):
        with pytest.raises(RateLimited, match="tokens a minute"):
            meter.check_request()
    assert meter.headers()["x-ratelimit-remaining-requests"] == "2"


def test_concurrency() -> None:
    meter = UsageMeter(replace(NO_KEY, max_concurrency=3), FakeClock())
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


def test_openai_headers() -> None:
    clock = FakeClock()
    meter = UsageMeter(replace(NO_KEY, requests_per_minute=60, tokens_per_minute=600), clock)
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


def test_changed_limits_keep_the_usage() -> None:
    clock = FakeClock()
    meter = UsageMeter(replace(NO_KEY, requests_per_minute=10, tokens_per_minute=100), clock)
    for _ in range(6):
        meter.check_request()
    meter.charge(150)
    meter.set_key(replace(NO_KEY, requests_per_minute=20, tokens_per_minute=200))
    assert meter.headers()["x-ratelimit-remaining-requests"] == "14"
    assert meter.headers()["x-ratelimit-remaining-tokens"] == "50"
    meter.set_key(replace(NO_KEY, requests_per_minute=5, tokens_per_minute=100))
    with pytest.raises(RateLimited):
        meter.check_request()
    meter.set_key(replace(NO_KEY, max_concurrency=1))
    meter.check_request()
    assert meter.headers() == {}


@given(
    st.integers(1, 10**6),
    st.lists(st.tuples(st.floats(0, 1000), st.floats(0, 10**7), st.integers(1, 10**6)), max_size=20),
)
def test_bucket_holds_at_most_a_minute(per_minute: int, events: list[tuple[float, float, int]]) -> None:
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
