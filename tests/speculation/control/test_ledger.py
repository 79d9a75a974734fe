"""Nobody falls behind plain decoding by more than was allowed."""

import pytest

from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.speculation.control.fairness import DelayLedger
from foreword.speculation.policy import RequestStep


def served(name: str, emitted: int, samples: bool = True) -> RequestStep:
    return RequestStep(
        RequestState(Request(name, (1,), SamplingParams(), 0), 0, 1000), 1, 0, samples, emitted, 7
    )


def test_lead_is_what_plain_decoding_would_have_needed_less_what_it_took() -> None:
    ledger = DelayLedger()
    account = ledger.open("a", None)
    ledger.record_step([served("a", 3)], plain_cost=1.0, actual_cost=1.5)
    assert account.ahead_s == pytest.approx(1.5) and account.plain_s == pytest.approx(3.0)
    ledger.record_step([served("a", 0, samples=False)], plain_cost=4.0, actual_cost=4.5)
    assert account.ahead_s == pytest.approx(1.0), "a piece of a prompt is one plain step"


def test_slack_is_two_percent_with_a_floor_by_what_the_answer_may_become() -> None:
    ledger = DelayLedger()
    long, short = ledger.open("a", None, is_speculative=False), ledger.open("b", 5, is_speculative=False)
    assert long.allowance(1.0) == pytest.approx(0.64)
    assert short.allowance(1.0) == pytest.approx(0.1)
    for _ in range(100):
        ledger.record_step([served("a", 1)], 1.0, 1.0)
    assert long.allowance(1.0) == pytest.approx(2.0)


def test_who_ends_early_is_a_ghost_until_the_lead_is_used_up() -> None:
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


def test_whoever_arrives_takes_the_place_of_a_ghost() -> None:
    ledger = DelayLedger()
    ledger.open("a", None)
    ledger.record_step([served("a", 4)], 1.0, 1.0)
    ledger.close("a")
    ledger.open("b", None)
    assert not ledger.departed


def test_requests_that_were_never_opened_have_an_account_too() -> None:
    ledger = DelayLedger()
    ledger.record_step([served("off", 1)], 1.0, 1.2)
    assert ledger.budgets["off"].ahead_s == pytest.approx(-0.2)


def test_credit_is_given_to_requests_whose_own_guesses_come_true() -> None:
    """A new one has what is usual; a short answer has less to make up for it."""
    ledger = DelayLedger()
    new, short = ledger.open("a", None), ledger.open("b", 8)
    assert new.allowance(1.0) == pytest.approx(0.64 + 2 * 0.5) and short.allowance(1.0) == pytest.approx(
        (0.64 + 2 * 0.5) / 4
    )
    for _ in range(60):
        ledger.record_hit(new, is_hit=True)
    assert new.allowance(1.0) == pytest.approx(0.64 + 2, abs=0.01)
    assert ledger.open("c", None).allowance(1.0) > 0.64 + 2 * 0.75, "what is usual follows"
    for _ in range(60):
        ledger.record_hit(new, is_hit=False)
    assert new.allowance(1.0) == pytest.approx(0.64, abs=0.01), "and is taken back"


def test_those_ahead_will_leave_early_and_the_others_gain_by_it() -> None:
    """As far as their places were left empty of late."""
    ledger = DelayLedger()
    quick, slow = ledger.open("quick", None), ledger.open("slow", None)
    ledger.record_step(
        [served("quick", 5), served("slow", 1)], plain_cost=1.0, actual_cost=2.0, saving_per_request=0.1
    )
    assert quick.ahead_s == pytest.approx(3.0) and quick.expected_gain_s == 0.0
    assert slow.expected_gain_s == pytest.approx(0.1 * 0.5 * 3.0)
    for name in "bcdefgh":
        ledger.close("quick" if name == "b" else "a")
        ledger.open("a", None).ahead_s = 3.0  # somebody takes the place at once
    ledger.record_step([served("slow", 1)], plain_cost=1.0, actual_cost=1.0, saving_per_request=0.1)
    assert 0.0 < slow.expected_gain_s < 0.8 * 0.1 * 0.5 * 3.0
