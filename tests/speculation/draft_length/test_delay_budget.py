"""Delay budgets: no request falls behind plain decoding by more than its allowance."""

import pytest

from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.speculation.draft_length.delay_budget import DelayLedger
from foreword.speculation.draft_length.policy import RequestStep


def served(name: str, emitted: int, samples: bool = True) -> RequestStep:
    return RequestStep(
        RequestState(Request(name, (1,), SamplingParams(), 0), 0, 1000), 1, 0, samples, emitted, 7
    )


def test_lead_is_plain_time_minus_actual_time() -> None:
    ledger = DelayLedger()
    budget = ledger.open("a", None)
    ledger.record_step([served("a", 3)], plain_cost=1.0, decode_cost=1.0, actual_cost=1.5)
    assert budget.ahead_s == pytest.approx(1.5) and budget.plain_s == pytest.approx(3.0)
    ledger.record_step([served("a", 0, samples=False)], plain_cost=4.0, decode_cost=1.0, actual_cost=4.5)
    assert budget.ahead_s == pytest.approx(1.0), "a prefill chunk is one plain step"
    ledger.record_step([served("a", 3)], plain_cost=4.0, decode_cost=1.0, actual_cost=4.5)
    assert budget.ahead_s == pytest.approx(2.5), "accepted tokens save decode steps, not a prompt's"


@pytest.mark.parametrize("share", [0.02, 0.1])
def test_allowance_is_a_share_of_the_time_with_a_floor(share: float) -> None:
    ledger = DelayLedger(share)
    long, short = ledger.open("a", None), ledger.open("b", 5)
    assert long.allowance(1.0) == pytest.approx(32 * share)
    assert short.allowance(1.0) == pytest.approx(5 * share)
    for _ in range(100):
        ledger.record_step([served("a", 1)], 1.0, 1.0, 1.0)
    assert long.allowance(1.0) == pytest.approx(100 * share)


def test_nonspeculative_request_has_a_budget_while_it_runs() -> None:
    ledger = DelayLedger()
    ledger.open("a", None)
    ledger.record_step([served("off", 1), served("a", 1)], 1.0, 1.0, 1.2)
    (budget,) = ledger.nonspeculative.values()
    assert budget.ahead_s == pytest.approx(-0.2) and budget.context_len == 7
    ledger.record_step([served("a", 1)], 1.0, 1.0, 1.2)
    assert not ledger.nonspeculative and budget.ahead_s == pytest.approx(-0.2)
