"""Corrections of the cost model by measured steps."""

import pytest

from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.speculation.draft_length.cost_model import Calibration, CostModel, PassCost, StepShape
from foreword.speculation.draft_length.step_record import RequestStep


def served(
    name: str,
    num_draft: int = 0,
    emitted: int = 1,
    context: int = 10,
    num_tokens: int = 1,
    samples: bool = True,
) -> RequestStep:
    state = RequestState(Request(name, (1,), SamplingParams(), 0), 0, 1000)
    return RequestStep(state, num_tokens, num_draft, samples, emitted, context)


def machine_of() -> CostModel:
    flat = {1: 0.01, 100: 0.01}
    return CostModel(
        Calibration(flat, flat, 1e-6, 1e-7), {"draft": PassCost.from_seconds({1: 0.001, 100: 0.001})}
    )


def test_summary_with_and_without_drafts() -> None:
    summary = machine_of().summarize(
        [served("a", 3, 2, 23), served("b"), served("c", 0, 0, 50, 40, False)], {}
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
    summary = machine.summarize([served("a", 2)], {"a": 2})
    assert list(summary.rows_by_sampler_class) == [0, 0, 3, 0, 0]
    assert (
        summary.shape.sampling_extra == pytest.approx(3 * machine.sampling_costs.extra_cost(2))
        and summary.plain_shape.sampling_extra < summary.shape.sampling_extra
    )


def test_model_seconds_do_not_depend_on_drift() -> None:
    machine = machine_of()
    plain = machine.summarize([served("a")], {})
    for _ in range(40):
        cost, drafting = machine.record_step(plain, {"forward": 0.019, "sample": 0.001, "draft": 0.002}, 0.0)
    assert machine.drift == pytest.approx(2.0, rel=0.2), "a small part is taken for a wrong calibration"
    assert cost * machine.drift == pytest.approx(0.02, rel=0.01)
    assert drafting * machine.drift == pytest.approx(0.002, rel=0.02)


def test_realised_seconds_include_drafting() -> None:
    machine = machine_of()
    plain, drafted = machine.summarize([served("a")], {}), machine.summarize([served("a", 2, 3)], {})
    machine.record_step(plain, {"forward": 0.01, "draft": 0.5}, 0.0)
    assert machine.realised_seconds == 0.0
    machine.record_step(drafted, {"forward": 0.011, "draft": 0.002}, 0.001)
    assert machine.realised_seconds == pytest.approx(0.013)
    assert machine.predicted_seconds == pytest.approx(0.011, rel=0.01)


def test_pass_costs_are_corrected() -> None:
    machine, plain = machine_of(), machine_of().summarize([served("a")], {})
    assert machine.draft_cost("draft", 1, 1, 3) == pytest.approx(0.003)
    for _ in range(150):
        machine.record_step(plain, {"forward": 0.01, "draft": 0.002}, machine.draft_cost("draft", 1, 1, 1))
    assert machine.draft_cost("draft", 1, 1, 1) == pytest.approx(0.002, rel=0.05)


def test_prefill_steps_are_not_learned() -> None:
    machine = machine_of()
    machine.record_step(machine.summarize([served("a", num_tokens=50)], {}), {"forward": 5.0}, 0.0)
    assert machine.drift == 1.0


def test_overlap_ratio_is_measured_and_forgotten() -> None:
    machine = machine_of()
    plain = machine.summarize([served("a")], {})
    assert machine.measured_overlap_ratio == 1.0
    machine.enable_overlap()
    for seconds, share in ((0.008, 0.8), (0.001, 0.5), (0.05, 1.0), (0.007, 0.7)):
        for _ in range(60):
            machine.record_step(plain, {"forward": 0.01}, 0.0)
            machine.record_overlap_step(plain, {"forward": seconds})
        assert machine.measured_overlap_ratio == pytest.approx(share, rel=0.05)
    for _ in range(2000):
        machine.record_step(plain, {"forward": 0.01}, 0.0)
    assert 0.98 < machine.measured_overlap_ratio < 0.99, "without overlap steps the ratio must recover"
