"""What may be open at once: nothing is lost, whatever happens, and who is refused is told when to come again."""

import contextlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.errors import InvalidRequest, Overloaded, RateLimited
from foreword.serve.admission import Admission, Outflow, Ticket
from foreword.serve.limits import Limits, Meter


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def admission(requests: int = 4, tokens: int = 100, clock: Clock | None = None) -> tuple[Admission, Counter[str]]:
    reasons: Counter[str] = Counter()
    return Admission(requests, tokens, lambda reason: reasons.update([reason]), clock or Clock()), reasons


def test_requests_are_bounded() -> None:
    door, reasons = admission()
    ticket = door.take(3, 10, Meter())
    with pytest.raises(Overloaded, match="3 requests are open of at most 4; try again in 1 s"):
        door.take(2, 10, Meter())
    with pytest.raises(Overloaded):
        door.check(2, Meter())
    with pytest.raises(InvalidRequest, match="at most 4 at once"):
        door.check(5, Meter())
    door.check(1, Meter())
    assert reasons == {"queue": 2} and (door.open, door.open_tokens) == (3, 10)
    ticket.release()
    ticket.release()
    assert (door.open, door.open_tokens) == (0, 0)


def test_tokens_are_bounded() -> None:
    door, reasons = admission()
    ticket = door.take(1, 60, Meter())
    with pytest.raises(Overloaded, match="hold 60 tokens of at most 100"):
        door.take(1, 41, Meter())
    with pytest.raises(InvalidRequest, match="hold 101 tokens; this server takes at most 100"):
        door.take(1, 101, Meter())
    assert reasons == {"queue_tokens": 1} and door.open == 1
    door.take(1, 40, Meter()).release()
    ticket.release()
    door.take(1, 100, Meter()).release()


def test_what_a_key_is_charged() -> None:
    door, _ = admission()
    meter = Meter(Limits(tokens_per_minute=50, max_concurrency=3), Clock())
    ticket = door.take(3, 90, meter, read_tokens=30)
    ticket.delivered(4)
    assert (meter.open, meter.prompt_tokens, meter.generated_tokens) == (3, 30, 4)
    with pytest.raises(RateLimited, match="3 requests open"):
        door.check(1, meter)
    ticket.delivered(16)
    ticket.release()
    with pytest.raises(RateLimited, match="50 tokens a minute"):
        door.take(1, 1, meter)
    assert (meter.open, door.open) == (0, 0)


def test_the_wait_follows_how_fast_requests_ended() -> None:
    clock = Clock()
    door, _ = admission(requests=10, clock=clock)
    for _ in range(100):  # each takes a second, ten at once
        tickets = [door.take(1, 1, Meter()) for _ in range(10)]
        clock.now += 1.0
        for ticket in tickets:
            ticket.release()
    for _ in range(10):
        door.take(1, 1, Meter())
    waits = []
    for _ in range(700):
        with pytest.raises(Overloaded) as caught:
            door.check(1, Meter())
        waits.append(caught.value.retry_after_s or 0.0)
    assert waits[0] == 1.0 and waits[99] == pytest.approx(10, rel=0.1), "the hundredth comes behind 99 others"
    assert waits == sorted(waits) and waits[-1] == 60.0


def test_idle_time_says_nothing_of_the_speed() -> None:
    clock = Clock()
    door, _ = admission(requests=1, clock=clock)
    for _ in range(50):
        ticket = door.take(1, 1, Meter())
        clock.now += 2.0
        ticket.release()
        clock.now += 3600.0
    door.take(1, 1, Meter())
    with pytest.raises(Overloaded) as caught:
        door.check(1, Meter())
    assert caught.value.retry_after_s == pytest.approx(2.0, rel=0.1)


def test_promises_pass() -> None:
    outflow = Outflow(0.0)
    outflow.pass_time(10.0, busy=True)
    outflow.free(10)
    first = [outflow.promise(1, 10.0) for _ in range(20)][-1]
    outflow.pass_time(40.0, busy=False)
    assert outflow.promise(1, 40.0) < first, "those who were told so have come"


@given(st.lists(st.tuples(st.sampled_from("tdrxz"), st.integers(1, 6), st.integers(0, 60)), max_size=60))
def test_nothing_is_lost_in_any_order(actions: list[tuple[str, int, int]]) -> None:
    """t takes, d delivers, r releases, x releases twice, z lets time pass; refusals leave nothing behind."""
    clock = Clock()
    door, _ = admission(requests=8, clock=clock)
    meters = [Meter(Limits(max_concurrency=5, tokens_per_minute=200), clock), Meter()]
    held: list[tuple[Ticket, int, int, Meter]] = []
    for action, count, tokens in actions:
        if action == "t":
            meter = meters[count % 2]
            with contextlib.suppress(Overloaded, InvalidRequest):
                held.append((door.take(count, tokens, meter), count, tokens, meter))
        elif action == "z":
            clock.now += count
        elif held:
            ticket, *_ = held[tokens % len(held)]
            ticket.delivered(count)
            if action in "rx":
                del held[tokens % len(held)]
                ticket.release()
                if action == "x":
                    ticket.release()
        assert door.open == sum(count for _, count, _, _ in held) <= 8
        assert door.open_tokens == sum(tokens for _, _, tokens, _ in held) <= 100
        for meter in meters:
            assert meter.open == sum(count for _, count, _, own in held if own is meter)
        assert meters[0].open <= 5
