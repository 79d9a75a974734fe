"""Nobody falls behind plain decoding by more than was allowed."""

import pytest

from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.drafting.control.ledger import Ledger
from foreword.drafting.policy import Served


def served(name: str, emitted: int, samples: bool = True) -> Served:
    return Served(RequestState(Request(name, (1,), SamplingParams(), 0), 0, 1000), 1, 0, samples, emitted, 7)


def test_lead_is_what_plain_decoding_would_have_needed_less_what_it_took() -> None:
    ledger = Ledger()
    account = ledger.open("a", None)
    ledger.settle([served("a", 3)], plain=1.0, actual=1.5)
    assert account.lead == pytest.approx(1.5) and account.plain == pytest.approx(3.0)
    ledger.settle([served("a", 0, samples=False)], plain=4.0, actual=4.5)
    assert account.lead == pytest.approx(1.0), "a piece of a prompt is one plain step"


def test_slack_is_two_percent_with_a_floor_by_what_the_answer_may_become() -> None:
    ledger = Ledger()
    long, short = ledger.open("a", None, drafting=False), ledger.open("b", 5, drafting=False)
    assert long.slack(1.0) == pytest.approx(0.64)
    assert short.slack(1.0) == pytest.approx(0.1)
    for _ in range(100):
        ledger.settle([served("a", 1)], 1.0, 1.0)
    assert long.slack(1.0) == pytest.approx(2.0)


def test_who_ends_early_is_a_ghost_until_the_lead_is_used_up() -> None:
    ledger = Ledger()
    ledger.open("a", None)
    ledger.open("b", None)
    ledger.settle([served("a", 4), served("b", 1)], 1.0, 1.0)
    ledger.close("a")
    ledger.close("b")
    assert len(ledger.ghosts) == 1 and ledger.ghost_context == 7
    ledger.settle([], 1.0, 2.0)
    assert len(ledger.ghosts) == 1
    ledger.settle([], 1.0, 1.0)
    assert not ledger.ghosts


def test_whoever_arrives_takes_the_place_of_a_ghost() -> None:
    ledger = Ledger()
    ledger.open("a", None)
    ledger.settle([served("a", 4)], 1.0, 1.0)
    ledger.close("a")
    ledger.open("b", None)
    assert not ledger.ghosts


def test_requests_that_were_never_opened_have_an_account_too() -> None:
    ledger = Ledger()
    ledger.settle([served("off", 1)], 1.0, 1.2)
    assert ledger.accounts["off"].lead == pytest.approx(-0.2)


def test_credit_is_given_to_requests_whose_own_guesses_come_true() -> None:
    """A new one has what is usual; a short answer has less to make up for it."""
    ledger = Ledger()
    new, short = ledger.open("a", None), ledger.open("b", 8)
    assert new.slack(1.0) == pytest.approx(0.64 + 2 * 0.5) and short.slack(1.0) == pytest.approx((0.64 + 2 * 0.5) / 4)
    for _ in range(60):
        ledger.note(new, guessed=True)
    assert new.slack(1.0) == pytest.approx(0.64 + 2, abs=0.01)
    assert ledger.open("c", None).slack(1.0) > 0.64 + 2 * 0.75, "what is usual follows"
    for _ in range(60):
        ledger.note(new, guessed=False)
    assert new.slack(1.0) == pytest.approx(0.64, abs=0.01), "and is taken back"


def test_those_ahead_will_leave_early_and_the_others_gain_by_it() -> None:
    """As far as their places were left empty of late."""
    ledger = Ledger()
    quick, slow = ledger.open("quick", None), ledger.open("slow", None)
    ledger.settle([served("quick", 5), served("slow", 1)], plain=1.0, actual=2.0, saved=0.1)
    assert quick.lead == pytest.approx(3.0) and quick.advance == 0.0
    assert slow.advance == pytest.approx(0.1 * 0.5 * 3.0)
    for name in "bcdefgh":
        ledger.close("quick" if name == "b" else "a")
        ledger.open("a", None).lead = 3.0  # somebody takes the place at once
    ledger.settle([served("slow", 1)], plain=1.0, actual=1.0, saved=0.1)
    assert 0.0 < slow.advance < 0.8 * 0.1 * 0.5 * 3.0
