"""Cost curves, step costs and sampling costs, and their corrections by measured steps."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.speculation.draft_length.cost_model import (
    Calibration,
    CostCurve,
    CostModel,
    PassCost,
    SamplingCosts,
    StepCosts,
    StepShape,
    classify_sampling,
)
from foreword.speculation.draft_length.policy import RequestStep
from foreword.speculation.engine_drafter import OnePass


def test_curve_is_linear_then_proportional() -> None:
    curve = CostCurve({1: 1.0, 2: 2.0, 4: 3.0})
    assert [curve.at(rows) for rows in (1, 2, 3, 4, 8)] == pytest.approx([1.0, 2.0, 2.5, 3.0, 6.0])
    assert curve.up_to(3)[1:4] == pytest.approx([1.0, 2.0, 2.5])


def test_disturbed_point_is_lowered_to_the_next() -> None:
    curve = CostCurve({1: 1.0, 2: 9.0, 3: 2.0, 4: 2.5})
    assert [curve.at(rows) for rows in (1, 2, 3, 4)] == pytest.approx([1.0, 2.0, 2.0, 2.5])


def test_disturbed_large_size_is_bounded_by_the_cost_per_row() -> None:
    """A slow phase doubled the times from 48 rows on: drafts of many requests would never be tried."""
    curve = CostCurve({1: 1.0, 16: 2.0, 32: 3.0, 48: 9.0, 96: 18.0})
    assert [curve.at(rows) for rows in (32, 48, 96)] == pytest.approx([3.0, 4.5, 9.0])


@given(
    st.dictionaries(st.integers(1, 200), st.floats(1e-4, 1.0), min_size=1),
    st.integers(0, 300),
    st.floats(0.1, 10.0),
)
def test_curve_never_falls_nor_rises_per_row(points: dict[int, float], scaled: int, factor: float) -> None:
    curve = CostCurve(points)
    for _ in range(2):
        dense = curve.up_to(300)
        assert all(low <= high * (1 + 1e-9) for low, high in pairwise(dense))
        per_row = [dense[rows] / rows for rows in curve.rows]
        assert all(high <= low * (1 + 1e-9) for low, high in pairwise(per_row))
        curve.scale(scaled % len(curve.rows), factor)


def test_correction_reaches_sizes_that_were_not_tried() -> None:
    curve = CostCurve({1: 1.0, 8: 4.0, 16: 8.0, 32: 16.0})
    for _ in range(6):
        curve.scale(1, 0.8, weight=50.0)
    assert curve.at(8) == pytest.approx(4.0 * 0.8**6, rel=0.2)
    assert curve.at(32) <= 4 * curve.at(8) * (1 + 1e-9), "more rows do not cost more per row"
    assert curve.at(1) <= curve.at(8)


def test_falling_points_are_pooled_by_weight() -> None:
    curve = CostCurve({1: 1.0, 4: 1.0, 8: 1.0})
    curve.scale(0, 1.06)
    assert [curve.at(rows) for rows in (1, 3, 8)] == pytest.approx([1.02] * 3)
    curve.scale(0, 1.0, weight=98.0)
    assert [curve.at(rows) for rows in (1, 3, 8)] == pytest.approx([1.0588] * 3)


def test_further_requests_cost_more_than_rows() -> None:
    costs = StepCosts(Calibration({1: 1.0, 16: 2.0}, {}, request_cost=0.1))
    one, many = StepShape(16, 16), StepShape(16, 16, num_requests=16)
    assert costs.cost_of(one) == pytest.approx(2.0) and costs.cost_of(many) == pytest.approx(3.5)
    assert costs.with_extra_rows(many, 0) == pytest.approx([3.5])


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


def step_of(
    name: str,
    num_draft: int = 0,
    emitted: int = 1,
    context: int = 10,
    num_tokens: int = 1,
    samples: bool = True,
) -> RequestStep:
    state = RequestState(Request(name, (1,), SamplingParams(), 0), 0, 1000)
    return RequestStep(state, num_tokens, num_draft, samples, emitted, context)


def measured(machine: CostModel, rows: int, seconds: float) -> None:
    """A decoding step of one request."""
    step = (step_of("a", rows - 1, context=0),)
    machine.record_step(machine.summarize(step, {}), {"forward": seconds}, 0.0)


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_wrong_calibration_heals_within_a_few_steps(factor: float) -> None:
    """Also where all steps have the same rows: the machine's speed is known from the steps before."""
    machine = CostModel(Calibration({1: 1.0, 8: 6.0}, {}), {})
    for _ in range(10):
        measured(machine, 1, 2.0)  # the machine runs at half its speed
    for _ in range(5):
        measured(machine, 8, 2.0 * max(6.0 * factor, 1.0))
    one, eight = machine.step_costs.cost_of(StepShape(1, 1)), machine.step_costs.cost_of(StepShape(8, 8))
    assert eight / one == pytest.approx(min(max(6.0 * factor, 1.0), 8.0), rel=0.25)


def test_speed_changes_do_not_move_known_costs() -> None:
    machine, rng = CostModel(Calibration({1: 1.0, 8: 1.0}, {}), {}), random.Random(1)
    for step in range(2000):
        rows = 8 if rng.random() < 0.5 else 1
        speed = 1 + step // 100 % 2
        measured(machine, rows, speed * (3.0 if rows == 8 else 1.0) * rng.gauss(1, 0.05))
    one, eight = machine.step_costs.cost_of(StepShape(1, 1)), machine.step_costs.cost_of(StepShape(8, 8))
    assert eight / one == pytest.approx(3.0, rel=0.15)


def test_speed_follows_quickly_and_ignores_outliers() -> None:
    machine = CostModel(Calibration({1: 1.0}, {}), {})
    for _ in range(20):
        measured(machine, 1, 1.0)
    before = machine.drift
    measured(machine, 1, 50.0)
    assert machine.drift < 1.6 * before
    for _ in range(30):
        measured(machine, 1, 2.0)
    assert machine.drift * machine.step_costs.cost_of(StepShape(1, 1)) == pytest.approx(2.0, rel=0.1)


def test_draft_seconds_of_a_model() -> None:
    passes = PassCost.from_seconds({1: 1.0, 4: 1.0, 100: 10.0})
    assert passes.draft_seconds(1, 1, 3) == pytest.approx(3.0)
    assert passes.draft_seconds(100, 4, 2) == pytest.approx(11.0)
    assert passes.draft_seconds(0, 0, 2) == passes.draft_seconds(5, 1, 0) == 0.0


def test_draft_in_one_pass_costs_its_rows() -> None:
    """A request's last token and its masks: as many rows as tokens (P-EAGLE), or one more (DFlash)."""
    points = {1: 1.0, 8: 2.0, 16: 4.0}
    one_pass = {"dflash": OnePass(15, 1), "p-eagle": OnePass(8, 0)}
    costs = PassCost.by_drafter({"dflash": points, "p-eagle": points, "eagle3": {1: 1.0}}, one_pass)
    assert costs["dflash"].draft_seconds(2, 2, 3) == pytest.approx(2.0)
    assert costs["dflash"].draft_seconds(4, 4, 3) == pytest.approx(4.0)
    assert costs["p-eagle"].draft_seconds(2, 2, 4) == pytest.approx(2.0)
    assert costs["p-eagle"].draft_seconds(1, 1, 1) == pytest.approx(1.0)
    assert costs["eagle3"].draft_seconds(1, 1, 3) == pytest.approx(3.0)


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


def machine_of() -> CostModel:
    flat = {1: 0.01, 100: 0.01}
    return CostModel(
        Calibration(flat, flat, 1e-6, 1e-7), {"draft": PassCost.from_seconds({1: 0.001, 100: 0.001})}
    )


def test_summary_with_and_without_drafts() -> None:
    summary = machine_of().summarize(
        [step_of("a", 3, 2, 23), step_of("b"), step_of("c", 0, 0, 50, 40, False)], {}
    )
    assert summary.shape == StepShape(45, 5, 20 + 10 + 50, 3 * 23, 0.0, num_requests=3)
    assert summary.plain_shape == StepShape(42, 2, 80, 0, 0.0, num_requests=3)
    assert (
        summary.num_draft_rows,
        summary.num_emitted,
        summary.num_sampling_requests,
        summary.is_decode_only,
    ) == (3, 3, 2, False)
    assert list(summary.rows_by_sampler_class) == [5, 0, 0, 0, 0]


def test_filtered_rows_cost_more_than_greedy() -> None:
    machine = machine_of()
    summary = machine.summarize([step_of("a", 2)], {"a": 2})
    assert list(summary.rows_by_sampler_class) == [0, 0, 3, 0, 0]
    assert (
        summary.shape.sampling_extra == pytest.approx(3 * machine.sampling_costs.extra_cost(2))
        and summary.plain_shape.sampling_extra < summary.shape.sampling_extra
    )


def test_model_seconds_do_not_depend_on_drift() -> None:
    machine = machine_of()
    plain = machine.summarize([step_of("a")], {})
    for _ in range(40):
        cost, drafting = machine.record_step(plain, {"forward": 0.019, "sample": 0.001, "draft": 0.002}, 0.0)
    assert machine.drift == pytest.approx(2.0, rel=0.2), "a small part is taken for a wrong calibration"
    assert cost * machine.drift == pytest.approx(0.02, rel=0.01)
    assert drafting * machine.drift == pytest.approx(0.002, rel=0.02)


def test_realised_seconds_include_drafting() -> None:
    machine = machine_of()
    plain, drafted = machine.summarize([step_of("a")], {}), machine.summarize([step_of("a", 2, 3)], {})
    machine.record_step(plain, {"forward": 0.01, "draft": 0.5}, 0.0)
    assert machine.realised_seconds == 0.0
    machine.record_step(drafted, {"forward": 0.011, "draft": 0.002}, 0.001)
    assert machine.realised_seconds == pytest.approx(0.013)
    assert machine.predicted_seconds == pytest.approx(0.011, rel=0.01)
    machine.record_step(plain, {"forward": 0.01, "draft": 0.5}, 0.5, is_planned=True)
    assert machine.realised_seconds == pytest.approx(0.523), "planned drafts of which none was verified"


def test_planned_passes_before_a_prompt_chunk_are_booked() -> None:
    """The requests that drafted were preempted: nothing is sampled."""
    machine = machine_of()
    chunk = machine.summarize([step_of("a", 0, 0, 32, 32, False)], {})
    cost, drafting = machine.record_step(chunk, {"forward": 0.01, "draft": 0.002}, 0.002, is_planned=True)
    assert (cost, drafting) == pytest.approx((machine.step_costs.cost_of(chunk.shape), 0.002))
    assert machine.realised_seconds == pytest.approx(0.012) and machine.plain_seconds == pytest.approx(cost)


def test_pass_costs_are_corrected() -> None:
    machine, plain = machine_of(), machine_of().summarize([step_of("a")], {})
    assert machine.draft_cost("draft", 1, 1, 3) == pytest.approx(0.003)
    for _ in range(150):
        machine.record_step(plain, {"forward": 0.01, "draft": 0.002}, machine.draft_cost("draft", 1, 1, 1))
    assert machine.draft_cost("draft", 1, 1, 1) == pytest.approx(0.002, rel=0.05)


def test_prefill_steps_are_not_learned() -> None:
    machine = machine_of()
    machine.record_step(machine.summarize([step_of("a", num_tokens=50)], {}), {"forward": 5.0}, 0.0)
    assert machine.drift == 1.0


def test_plain_ratio_is_measured_and_forgotten() -> None:
    machine = machine_of()
    plain = machine.summarize([step_of("a")], {})
    assert machine.measured_plain_ratio == 1.0
    machine.enable_overlap()
    for seconds, share in ((0.008, 0.8), (0.001, 0.5), (0.05, 1.0), (0.007, 0.7)):
        for _ in range(60):
            machine.record_step(plain, {"forward": 0.01}, 0.0)
            machine.record_plain_step(plain, {"forward": seconds})
        assert machine.plain_ratio(False) == pytest.approx(share, rel=0.05)
    for _ in range(8000):
        machine.record_step(plain, {"forward": 0.01}, 0.0)
    assert 0.98 < machine.measured_plain_ratio < 0.99, "without plain steps the ratio must recover"
