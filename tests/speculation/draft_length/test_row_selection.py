"""Selection of draft rows."""

from itertools import accumulate, chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.core.outputs import Draft
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.speculation.draft_length.cost_model import StepShape
from foreword.speculation.draft_length.delay_budget import DelayBudget
from foreword.speculation.draft_length.exploration import nearest_paying
from foreword.speculation.draft_length.next_step import BaseStep, TrackedRequest
from foreword.speculation.draft_length.row_selection import (
    NEAR_BEST,
    Candidate,
    best_num_rows,
    distribute,
    select_rows,
    split_by_gain,
)

Chances = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6).map(
    lambda ps: list(accumulate(ps, lambda a, b: a * b))
)


def tracked(lead: float) -> TrackedRequest:
    state = RequestState(Request("a", (1,), SamplingParams(), 0), 0, 1000)
    return TrackedRequest(state, 32, DelayBudget(min_output_tokens=0, ahead_s=lead))


def frame_of(*requests: TrackedRequest, prompts: bool = False) -> BaseStep:
    count = len(requests)
    shape = StepShape(count + 8 if prompts else count, count)
    return BaseStep(shape, 1.0, 1.0, [request.delay_budget for request in requests])


def candidate(request: TrackedRequest, *probs: float) -> Candidate:
    return Candidate(0, request, Draft((1,) * len(probs), "suffix"), probs, probs)


@given(
    st.lists(Chances, min_size=1, max_size=4),
    st.lists(st.floats(0.0, 0.5), min_size=24, max_size=24),
    st.floats(1.0, 3.0),
)
def test_best_num_rows_is_the_smallest_near_the_best(
    gains: list[list[float]], steps: list[float], limit: float
) -> None:
    rows = sum(map(len, gains))
    costs = list(accumulate(steps[:rows], initial=1.0))
    count = best_num_rows(gains, len(gains), costs, limit)
    ordered = [0.0, *accumulate(sorted(chain(*gains), reverse=True))]
    rates = [
        (len(gains) + gained) / cost for gained, cost in zip(ordered, costs, strict=True) if cost <= limit
    ]
    assert count < len(rates)
    assert rates[count] >= max(rates) * NEAR_BEST
    assert all(rate < max(rates) * NEAR_BEST for rate in rates[1:count]), "no smaller step does as well"


@given(st.lists(Chances, min_size=1, max_size=4), st.data())
def test_split_by_gain_keeps_prefixes(gains: list[list[float]], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, sum(map(len, gains))))
    lengths = split_by_gain(gains, count)
    assert sum(lengths) == count
    assert all(0 <= length <= len(own) for length, own in zip(lengths, gains, strict=True))
    kept = [gain for length, own in zip(lengths, gains, strict=True) for gain in own[:length]]
    left = [gain for length, own in zip(lengths, gains, strict=True) for gain in own[length:]]
    assert not left or min(kept) >= max(left)


def test_cost_jump_does_not_stop_the_search() -> None:
    """One row costs as much as four: select none or all."""
    costs = [1.0, 1.6, 1.6, 1.6, 1.6]
    assert best_num_rows([[0.5, 0.45, 0.4, 0.35]], 1.0, costs, 9.0) == 4
    assert best_num_rows([[0.5]], 1.0, costs[:2], 9.0) == 0


@pytest.mark.parametrize(("lead", "length"), [(10.0, 3), (0.55, 2), (0.3, 1), (0.0, 0)])
def test_selection_respects_delay_budgets(lead: float, length: int) -> None:
    mine, other = tracked(10.0), tracked(lead)
    choice = select_rows(
        [candidate(mine, 0.99, 0.98, 0.97)], frame_of(mine, other), [1.0, 1.2, 1.5, 1.6], 0.0
    )
    assert choice.lengths == [length]
    assert choice.limited_by_budget == (length == 0)


def test_candidates_without_gains_select_nothing() -> None:
    choice = select_rows([candidate(tracked(0.0))], frame_of(tracked(0.0)), [1.0], 0.0)
    assert choice.lengths == [0] and not choice.limited_by_budget


def test_selection_that_would_not_pay_is_not_limited_by_budgets() -> None:
    mine, other = tracked(10.0), tracked(0.0)
    choice = select_rows([candidate(mine, 0.1)], frame_of(mine, other), [1.0, 1.2], 0.0)
    assert choice.lengths == [0] and not choice.limited_by_budget


def test_delay_budgets_are_fully_used() -> None:
    mine, other = tracked(0.0), tracked(0.25)
    choice = select_rows(
        [candidate(mine, 0.99, 0.98, 0.97)], frame_of(mine, other), [1.0, 1.1, 1.2, 1.3], 0.0
    )
    assert choice.lengths == [2]


def test_low_gain_request_is_not_delayed_by_high_gain_request() -> None:
    behind, ahead = tracked(-5.0), tracked(5.0)
    costs = [1.0, 1.0, 1.3, 1.6, 1.9]
    choice = select_rows(
        [candidate(behind, 0.3), candidate(ahead, 0.99, 0.98, 0.97)], frame_of(behind, ahead), costs, 0.0
    )
    assert choice.lengths == [0, 1], "free rows are always allowed"
    assert not choice.limited_by_budget or choice.rate


def test_prefill_is_delayed_by_two_percent_at_most() -> None:
    mine = tracked(5.0)
    costs = [1.0, 1.01, 1.02, 1.03]
    assert select_rows([candidate(mine, 0.9, 0.8, 0.7)], frame_of(mine), costs, 0.0).lengths == [3]
    assert select_rows(
        [candidate(mine, 0.9, 0.8, 0.7)], frame_of(mine, prompts=True), costs, 0.0
    ).lengths == [2]


def test_draft_cost_counts_in_rate_not_in_delay() -> None:
    mine = tracked(0.0)
    choice = select_rows([candidate(mine, 0.9)], frame_of(mine), [1.0, 1.0], 0.5)
    assert choice.lengths == [1] and choice.rate == pytest.approx(1.9 / 1.5)


def test_nearest_paying_selection() -> None:
    mine = tracked(5.0)
    costs = [1.0, 2.0, 2.1, 4.0]
    choice = nearest_paying([candidate(mine, 0.7, 0.5, 0.4)], frame_of(mine), costs)
    assert choice.lengths == [2] and choice.rate == pytest.approx(2.2 / 2.1)
    assert nearest_paying([candidate(mine, 0.05)], frame_of(mine), costs[:2]).lengths == [0], (
        "no gain even if rows were free"
    )
    assert nearest_paying([candidate(mine, 0.9)], frame_of(mine, tracked(0.5)), costs[:2]).lengths == [0], (
        "a probe must respect delay budgets"
    )


def split(candidates: list[Candidate]) -> list[int]:
    """Four rows that cost 0.8 steps."""
    slacks = [candidate.request.delay_budget.allowance(1.0) for candidate in candidates]
    return distribute(candidates, slacks, 4, delay=0.8, plain_cost=1.0)


def test_rows_first_compensate_delayed_requests() -> None:
    """By gain alone the first candidate would take all rows, and the second's budget forbid it."""
    sure, unsure = candidate(tracked(0.0), *[0.99] * 8), candidate(tracked(0.0), 0.9, 0.8, 0.7, 0.6)
    lengths = split([sure, unsure])
    assert lengths == [3, 1]
    choice = select_rows(
        [sure, unsure], frame_of(sure.request, unsure.request), [1.0 + 0.1 * n for n in range(13)], 0.0
    )
    assert min(choice.lengths) > 0


def test_no_selection_without_fair_shares() -> None:
    sure, hopeless = candidate(tracked(0.0), *[0.99] * 8), candidate(tracked(0.0), 0.1)
    assert split([sure, hopeless]) == []


def test_request_far_ahead_may_be_delayed() -> None:
    sure, ahead = candidate(tracked(0.0), *[0.99] * 8), candidate(tracked(5.0), 0.1)
    assert split([sure, ahead]) == [4, 0]
