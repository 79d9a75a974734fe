"""Bounds on open requests: exact accounting, and Retry-After."""

import contextlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.errors import InvalidRequest, Overloaded, RateLimited
from foreword.server.admission import Admission, AdmissionTicket, DrainRateEstimator
from foreword.server.auth.rate_limit import KeyLimits, UsageMeter
from tests.support.waiting import FakeClock


def admission(
    requests: int = 4, tokens: int = 100, clock: FakeClock | None = None
) -> tuple[Admission, Counter[str]]:
    reasons: Counter[str] = Counter()
    return Admission(requests, tokens, lambda reason: reasons.update([reason]), clock or FakeClock()), reasons


def test_requests_are_bounded() -> None:
    limiter, reasons = admission()
    ticket = limiter.admit(3, 10, UsageMeter())
    with pytest.raises(Overloaded, match="3 requests are open of at most 4; try again in 1 s"):
        limiter.admit(2, 10, UsageMeter())
    with pytest.raises(Overloaded):
        limiter.check(2, UsageMeter())
    with pytest.raises(InvalidRequest, match="at most 4 at once"):
        limiter.check(5, UsageMeter())
    limiter.check(1, UsageMeter())
    assert reasons == {"queue": 2} and (limiter.num_open, limiter.num_open_tokens) == (3, 10)
    ticket.release()
    ticket.release()
    assert (limiter.num_open, limiter.num_open_tokens) == (0, 0)


def test_tokens_are_bounded() -> None:
    limiter, reasons = admission()
    ticket = limiter.admit(1, 60, UsageMeter())
    with pytest.raises(Overloaded, match="hold 60 tokens of at most 100"):
        limiter.admit(1, 41, UsageMeter())
    with pytest.raises(InvalidRequest, match="hold 101 tokens; this server takes at most 100"):
        limiter.admit(1, 101, UsageMeter())
    assert reasons == {"queue_tokens": 1} and limiter.num_open == 1
    limiter.admit(1, 40, UsageMeter()).release()
    ticket.release()
    limiter.admit(1, 100, UsageMeter()).release()


def test_key_is_charged_for_tokens() -> None:
    limiter, _ = admission()
    meter = UsageMeter(KeyLimits(tokens_per_minute=50, max_concurrency=3), FakeClock())
    ticket = limiter.admit(3, 90, meter, charged_tokens=30)
    ticket.charge_generated(4)
    assert (meter.open, meter.prompt_tokens, meter.generated_tokens) == (3, 30, 4)
    with pytest.raises(RateLimited, match="3 requests open"):
        limiter.check(1, meter)
    ticket.charge_generated(16)
    ticket.release()
    with pytest.raises(RateLimited, match="50 tokens a minute"):
        limiter.admit(1, 1, meter)
    assert (meter.open, limiter.num_open) == (0, 0)


def test_retry_after_follows_the_drain_rate() -> None:
    clock = FakeClock()
    limiter, _ = admission(requests=1000, tokens=1000, clock=clock)
    for _ in range(100):  # ten at once, of one second each
        tickets = [limiter.admit(1, 1, UsageMeter()) for _ in range(10)]
        clock.now += 1.0
        for ticket in tickets:
            ticket.release()
    limiter.admit(1000, 1, UsageMeter())
    waits = []
    for _ in range(700):
        with pytest.raises(Overloaded) as caught:
            limiter.check(1, UsageMeter())
        waits.append(caught.value.retry_after_s or 0.0)
    assert waits[0] == 1.0 and waits[99] == pytest.approx(10, rel=0.1), "the hundredth waits for 99 others"
    assert waits == sorted(waits) and waits[-1] == 60.0


def test_clients_in_a_loop_do_not_add_up() -> None:
    """Four slots are freed in a second, and 40 clients return at once whatever they are told."""
    clock = FakeClock()
    limiter, _ = admission(requests=16, clock=clock)
    tickets = [limiter.admit(1, 1, UsageMeter()) for _ in range(16)]
    for _ in range(240):
        clock.now += 0.25
        tickets.pop(0).release()
        tickets.append(limiter.admit(1, 1, UsageMeter()))
        for _ in range(40):
            with pytest.raises(Overloaded) as caught:
                limiter.check(1, UsageMeter())
    assert caught.value.retry_after_s == pytest.approx(16 / 4, rel=0.1), "the whole queue is free by then"


def test_idle_time_does_not_change_the_drain_rate() -> None:
    clock = FakeClock()
    limiter, _ = admission(requests=1, clock=clock)
    for _ in range(50):
        ticket = limiter.admit(1, 1, UsageMeter())
        clock.now += 2.0
        ticket.release()
        clock.now += 3600.0
    limiter.admit(1, 1, UsageMeter())
    with pytest.raises(Overloaded) as caught:
        limiter.check(1, UsageMeter())
    assert caught.value.retry_after_s == pytest.approx(2.0, rel=0.1)


def test_earlier_retry_estimates_expire() -> None:
    outflow = DrainRateEstimator(20, 0.0)
    outflow.advance(10.0, busy=True)
    outflow.record_freed(10)
    first = [outflow.retry_after_s(1, 10.0) for _ in range(20)][-1]
    outflow.advance(40.0, busy=False)
    assert outflow.retry_after_s(1, 40.0) < first, "clients with earlier estimates have returned"


@given(st.lists(st.tuples(st.sampled_from("tdrxz"), st.integers(1, 6), st.integers(0, 60)), max_size=60))
def test_accounting_is_exact_in_any_order(actions: list[tuple[str, int, int]]) -> None:
    """t admits, d delivers, r releases, x releases twice, z lets time pass; refusals change nothing."""
    clock = FakeClock()
    limiter, _ = admission(requests=8, clock=clock)
    meters = [UsageMeter(KeyLimits(max_concurrency=5, tokens_per_minute=200), clock), UsageMeter()]
    held: list[tuple[AdmissionTicket, int, int, UsageMeter]] = []
    for action, count, tokens in actions:
        if action == "t":
            meter = meters[count % 2]
            with contextlib.suppress(Overloaded, InvalidRequest):
                held.append((limiter.admit(count, tokens, meter), count, tokens, meter))
        elif action == "z":
            clock.now += count
        elif held:
            ticket, *_ = held[tokens % len(held)]
            ticket.charge_generated(count)
            if action in "rx":
                del held[tokens % len(held)]
                ticket.release()
                if action == "x":
                    ticket.release()
        assert limiter.num_open == sum(count for _, count, _, _ in held) <= 8
        assert limiter.num_open_tokens == sum(tokens for _, _, tokens, _ in held) <= 100
        for meter in meters:
            assert meter.open == sum(count for _, count, _, own in held if own is meter)
        assert meters[0].open <= 5
