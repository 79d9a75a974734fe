"""Plans for a draft model."""

import pytest

from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.speculation.draft_length.cost_model import StepShape
from foreword.speculation.draft_length.delay_budget import DelayBudget
from foreword.speculation.draft_length.draft_planner import (
    DraftModelPlan,
    DraftModelRequest,
    affordable_plan,
    rank_plans,
)
from foreword.speculation.draft_length.next_step import BaseStep, TrackedRequest

FREE = [1.0] * 100  # seconds per step, for any number of draft rows


def tracked(lead: float = 10.0, read: bool = True) -> TrackedRequest:
    state = RequestState(Request("a", (1,), SamplingParams(), 0), 0, 1000)
    request = TrackedRequest(state, 32, DelayBudget(min_output_tokens=0, ahead_s=lead))
    request.prompt_read = read
    return request


def member(
    index: int,
    chance: float,
    pending_rows: int = 1,
    request: TrackedRequest | None = None,
    tokens: float = 0.0,
) -> DraftModelRequest:
    probs = [chance**length for length in range(1, 25)]
    return DraftModelRequest(
        index, request or tracked(), probs, tokens, 0, pending_rows, remaining_steps=50.0
    )


def frame_of(*accounts: DelayBudget) -> BaseStep:
    return BaseStep(StepShape(len(accounts), len(accounts)), 1.0, 1.0, accounts)


def passes_of(share: float, by_row: float = 0.0):  # type: ignore[no-untyped-def]
    """Cost of passes: `share` of a step each, plus a cost per pending row."""

    def seconds(pending_rows: int, requests: int, length: int) -> float:
        return share * length + by_row * (pending_rows - requests)

    return seconds


@pytest.mark.parametrize(
    ("chance", "share", "length"), [(0.8, 0.02, 12), (0.8, 0.4, 2), (0.5, 0.3, 1), (0.95, 0.05, 24)]
)
def test_best_length_for_one_request(chance: float, share: float, length: int) -> None:
    best = rank_plans([member(0, chance)], 1.0, 0, FREE, passes_of(share))[0]
    rates = {
        k: (1 + sum(chance**j for j in range(1, k + 1))) / (1 + share * k)
        for k in (1, 2, 3, 4, 6, 8, 10, 12, 16, 24)
    }
    assert best.draft_len == length == max(rates, key=rates.__getitem__)
    assert best.rate == pytest.approx(rates[length])


def test_no_plan_where_nothing_pays() -> None:
    assert rank_plans([member(0, 0.3)], 1.0, 0, FREE, passes_of(0.35)) == []


def test_plan_includes_only_requests_that_gain() -> None:
    """Rows cost time: the request that is never right is left out."""
    costs = [1.0 + 0.1 * rows for rows in range(100)]
    best = rank_plans([member(0, 0.01), member(1, 0.9), member(2, 0.9)], 3.0, 0, costs, passes_of(0.1))[0]
    assert {one.index for one in best.requests} == {1, 2}


def test_request_with_a_good_draft_is_left_out() -> None:
    assert rank_plans([member(0, 0.8, tokens=3.9)], 4.9, 0, FREE, passes_of(0.1)) == []


def test_catch_up_cost_is_spread_over_remaining_steps() -> None:
    plan = rank_plans([member(0, 0.8, pending_rows=101)], 1.0, 0, FREE, passes_of(0.1, by_row=0.02))[0]
    assert plan.catch_up_cost == pytest.approx(2.0)
    assert plan.rate == pytest.approx(
        (1 + plan.requests[0].expected_tokens(plan.draft_len)) / (1 + plan.draft_cost + 2.0 / 50)
    )


def plan_of(*members: DraftModelRequest, seconds: float = 0.3, invested: float = 0.0) -> DraftModelPlan:
    return DraftModelPlan(members, 2, 2.0, seconds, invested, 1.0)


@pytest.mark.parametrize(("lead", "allowed"), [(0.2, False), (0.4, True)])
def test_plan_respects_delay_budgets(lead: float, allowed: bool) -> None:
    mine = member(0, 0.9)
    frame = frame_of(mine.request.delay_budget, DelayBudget(min_output_tokens=0, ahead_s=lead))
    assert (affordable_plan([plan_of(mine)], frame) is not None) == allowed


@pytest.mark.parametrize(
    ("chance", "lead", "allowed"),
    [
        (0.1, 0.4, True),
        (0.1, 0.2, True),
        (0.1, 0.1, False),
        (0.3, 0.0, True),
        (0.3, -5.0, False),
        (0.4, -5.0, True),
    ],
)
def test_request_over_its_budget_joins_where_its_tokens_compensate(
    chance: float, lead: float, allowed: bool
) -> None:
    """A delay of 0.3 steps, which two draft tokens repay with 0.11, 0.39 or 0.56 of one."""
    easy, hard = member(0, 0.9), member(1, chance, request=tracked(lead))
    frame = frame_of(easy.request.delay_budget, hard.request.delay_budget)
    assert (affordable_plan([plan_of(easy, hard)], frame) is not None) == allowed


def test_first_read_delays_others_only_within_their_budgets() -> None:
    mine, others = member(0, 0.9, request=tracked(lead=0.0, read=False)), DelayBudget(0, ahead_s=4.0)
    frame, plan = frame_of(mine.request.delay_budget, others), plan_of(mine, invested=4.0)
    assert affordable_plan([plan], frame) is None
    others.ahead_s = 4.5
    assert affordable_plan([plan], frame) is plan
    assert mine.request.delay_budget.ahead_s == pytest.approx(4.0), "an investment is no delay of its own"
    affordable_plan([plan], frame)
    assert mine.request.delay_budget.ahead_s == pytest.approx(4.0), "only the first read is"
