"""Delay budgets: no request falls behind plain decoding by more than its allowance."""

import pytest

from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.speculation.control.fairness import DelayLedger
from foreword.speculation.policy import RequestStep


def served(name: str, emitted: int, samples: bool = True) -> RequestStep:
    return RequestStep(
        RequestState(Request(name, (1,), SamplingParams(), 0), 0, 1000), 1, 0, samples, emitted, 7
    )


def test_lead_is_plain_time_minus_actual_time() -> None:
    ledger = DelayLedger()
    budget = ledger.open("a", None)
    ledger.record_step([served("a", 3)], plain_cost=1.0, actual_cost=1.5)
    assert budget.ahead_s == pytest.approx(1.5) and budget.plain_s == pytest.approx(3.0)
    ledger.record_step([served("a", 0, samples=False)], plain_cost=4.0, actual_cost=4.5)
    assert budget.ahead_s == pytest.approx(1.0), "a prefill chunk is one plain step"


def test_allowance_is_two_percent_with_a_floor() -> None:
    ledger = DelayLedger()
    long, short = ledger.open("a", None, is_speculative=False), ledger.open("b", 5, is_speculative=False)
    assert long.allowance(1.0) == pytest.approx(0.64)
    assert short.allowance(1.0) == pytest.approx(0.1)
    for _ in range(100):
        ledger.record_step([served("a", 1)], 1.0, 1.0)
    assert long.allowance(1.0) == pytest.approx(2.0)


def test_early_end_departs_until_its_lead_is_used() -> None:
    ledger = DelayLedger()
    ledger.open("a", None)
    ledger.open("b", None)
    ledger.record_step([served("a", 4), served("b", 1)], 1.0, 1.0)
    ledger.close("a")
    ledger.close("b")
    assert len(ledger.departed) == 1 and ledger.departed_context == 7
    ledger.record_step([], 1.0, 2.0)
    assert len(ledger.departed) == 1
    ledger.record_step([], 1.0, 1.0)
    assert not ledger.departed


def test_new_request_replaces_a_departed_one() -> None:
    ledger = DelayLedger()
    ledger.open("a", None)
    ledger.record_step([served("a", 4)], 1.0, 1.0)
    ledger.close("a")
    ledger.open("b", None)
    assert not ledger.departed


def test_unknown_request_gets_a_budget() -> None:
    ledger = DelayLedger()
    ledger.record_step([served("off", 1)], 1.0, 1.2)
    assert ledger.budgets["off"].ahead_s == pytest.approx(-0.2)


def test_hit_rate_gives_credit() -> None:
    """A new request starts at the mean hit rate; a short one gets less credit."""
    ledger = DelayLedger()
    new, short = ledger.open("a", None), ledger.open("b", 8)
    assert new.allowance(1.0) == pytest.approx(0.64 + 2 * 0.5) and short.allowance(1.0) == pytest.approx(
        (0.64 + 2 * 0.5) / 4
    )
    for _ in range(60):
        ledger.record_hit(new, is_hit=True)
    assert new.allowance(1.0) == pytest.approx(0.64 + 2, abs=0.01)
    assert ledger.open("c", None).allowance(1.0) > 0.64 + 2 * 0.75, "the mean must follow"
    for _ in range(60):
        ledger.record_hit(new, is_hit=False)
    assert new.allowance(1.0) == pytest.approx(0.64, abs=0.01), "credit must be taken back"


def test_expected_gain_from_requests_ahead() -> None:
    """In proportion to the slots that stayed vacant."""
    ledger = DelayLedger()
    quick, slow = ledger.open("quick", None), ledger.open("slow", None)
    ledger.record_step(
        [served("quick", 5), served("slow", 1)], plain_cost=1.0, actual_cost=2.0, saving_per_request=0.1
    )
    assert quick.ahead_s == pytest.approx(3.0) and quick.expected_gain_s == 0.0
    assert slow.expected_gain_s == pytest.approx(0.1 * 0.5 * 3.0)
    for name in "bcdefgh":
        ledger.close("quick" if name == "b" else "a")
        ledger.open("a", None).ahead_s = 3.0  # another request takes the slot at once
    ledger.record_step([served("slow", 1)], plain_cost=1.0, actual_cost=1.0, saving_per_request=0.1)
    assert 0.0 < slow.expected_gain_s < 0.8 * 0.1 * 0.5 * 3.0
