"""Cost curves, step costs and sampling costs."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.core.params import SamplingParams
from foreword.speculation.control.cost_model import (
    Calibration,
    CostCurve,
    PassCost,
    SamplingCosts,
    SpeedDrift,
    StepCosts,
    StepShape,
    classify_sampling,
)


def test_curve_is_linear_then_proportional() -> None:
    curve = CostCurve({1: 1.0, 2: 2.0, 4: 3.0})
    assert [curve.at(rows) for rows in (1, 2, 3, 4, 8)] == pytest.approx([1.0, 2.0, 2.5, 3.0, 6.0])
    assert curve.up_to(3)[1:4] == pytest.approx([1.0, 2.0, 2.5])


def test_disturbed_point_is_lowered_to_the_next() -> None:
    curve = CostCurve({1: 1.0, 2: 9.0, 3: 2.0, 4: 5.0})
    assert [curve.at(rows) for rows in (1, 2, 3, 4)] == pytest.approx([1.0, 2.0, 2.0, 5.0])


@given(st.dictionaries(st.integers(1, 200), st.floats(1e-4, 1.0), min_size=1))
def test_curve_never_falls(points: dict[int, float]) -> None:
    curve = CostCurve(points)
    dense = curve.up_to(300)
    assert all(low <= high * (1 + 1e-9) for low, high in pairwise(dense))


def test_scaling_a_point_is_local() -> None:
    curve = CostCurve({1: 1.0, 4: 4.0, 8: 8.0, 16: 16.0})
    before = list(curve.up_to(20))
    curve.scale(1, 1.5)
    after = curve.up_to(20)
    assert after[4] == pytest.approx(6.0) and after[2] > before[2] and after[6] > before[6]
    assert after[1] == before[1] and after[8:21] == before[8:]
    curve.scale(3, 2.0)
    assert curve.at(20) == pytest.approx(40.0)


def test_falling_points_are_pooled() -> None:
    curve = CostCurve({1: 1.0, 4: 1.0, 8: 1.0})
    curve.scale(0, 1.06)
    assert [curve.at(rows) for rows in (1, 3, 8)] == pytest.approx([1.02] * 3)
    curve.scale(2, 1.2)
    assert [curve.at(rows) for rows in (1, 4, 8)] == pytest.approx([1.03, 1.03, 1.2])


def test_unsampled_rows_cost_less() -> None:
    costs = StepCosts(Calibration({1: 1.0, 11: 3.0}, {1: 1.0, 11: 2.0}))
    assert costs.cost_of(StepShape(11, 11)) == pytest.approx(3.0)
    assert costs.cost_of(StepShape(11, 1)) == pytest.approx(2.0)
    assert costs.cost_of(StepShape(11, 6)) == pytest.approx(2.5)


@pytest.mark.parametrize("sampled", [1, 3])
def test_extra_rows_cost_as_a_larger_step(sampled: int) -> None:
    costs = StepCosts(Calibration({1: 1.0, 4: 2.0, 16: 8.0}, {1: 1.0, 16: 4.0}, 0.01, 0.002))
    shape = StepShape(3, sampled, first_rows_context=50, sampling_extra=0.1)
    further = costs.with_extra_rows(shape, 4)
    assert further == pytest.approx(
        [costs.cost_of(StepShape(3 + n, sampled + n, 50, 0, 0.1)) for n in range(5)]
    )
    assert costs.cost_of(StepShape(3, sampled, 50, 30, 0.1)) == pytest.approx(further[0] + 0.06)


def test_wrong_calibration_heals_under_drift() -> None:
    """Steps of 8 rows take 3x their calibration, of 1 row 1x; the machine halves its speed at times."""
    costs, rng = StepCosts(Calibration({1: 1.0, 8: 1.0}, {})), random.Random(1)
    believed = StepCosts(Calibration({1: 1.0, 8: 3.0}, {}))
    ratio, rows = 1.0, 1
    for step in range(2000):
        before, rows_before = ratio, rows
        rows = 8 if rng.random() < 0.5 else 1
        speed = 1 + (step // 100 % 2)
        ratio = (
            speed
            * believed.cost_of(StepShape(rows, rows))
            * rng.gauss(1, 0.05)
            / costs.cost_of(StepShape(rows, rows))
        )
        if step and rows != rows_before:
            costs.learn(rows, rows_before, ratio / before)
    assert costs.cost_of(StepShape(8, 8)) / costs.cost_of(StepShape(1, 1)) == pytest.approx(3.0, rel=0.1)


def test_draft_seconds_of_a_model() -> None:
    passes = PassCost.from_seconds({1: 1.0, 4: 1.0, 100: 10.0})
    assert passes.draft_seconds(1, 1, 3) == pytest.approx(3.0)
    assert passes.draft_seconds(100, 4, 2) == pytest.approx(11.0)
    assert passes.draft_seconds(0, 0, 2) == passes.draft_seconds(5, 1, 0) == 0.0


def test_drift_follows_quickly_and_ignores_outliers() -> None:
    drift = SpeedDrift()
    drift.update(1.0)
    drift.update(50.0)
    assert drift.factor < 1.2
    for _ in range(30):
        drift.update(2.0)
    assert drift.factor == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        (SamplingParams(temperature=0.0, top_p=0.5), 0),
        (SamplingParams(temperature=1.0), 1),
        (SamplingParams(temperature=1.0, top_k=5), 2),
        (SamplingParams(temperature=0.0, presence_penalty=1.0), 3),
        (SamplingParams(temperature=0.0, bad_words=("x",)), 3),
        (SamplingParams(temperature=0.0, logprobs=0), 4),
    ],
)
def test_classify_sampling(params: SamplingParams, kind: int) -> None:
    assert classify_sampling(params) == kind


def test_cost_of_filters_is_learned() -> None:
    """A filtered row costs 0.2, a greedy row 0.01, sampling itself 0.05."""
    prices, rng = SamplingCosts(1.0), random.Random(2)
    for _ in range(3000):
        greedy, filtered = rng.randrange(4), rng.randrange(1, 9)
        prices.learn([greedy, 0, filtered, 0, 0], 0.05 + 0.01 * greedy + 0.2 * filtered)
    assert prices.extra_cost(2) == pytest.approx(0.19, rel=0.1)
    assert prices.extra_cost(0) == 0.0
