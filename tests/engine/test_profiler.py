"""What is timed before the first request, and what is known where there is little time for it."""

import pytest

from foreword.engine.profiler import REPETITIONS, SAMPLED_ROWS, time_sizes
from foreword.speculation.control.cost_model import CostCurve

RIDGE = 24  # rows up to which a step takes the same


class Steps:
    """Steps that take `seconds` up to the ridge, on a clock of their own."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.now = 0.0
        self.timed: list[int] = []

    def __call__(self, rows: int) -> float:
        took = self.seconds * max(rows / RIDGE, 1.0)
        self.timed.append(rows)
        self.now += took
        return took

    def clock(self) -> float:
        return self.now


def test_a_small_model_is_timed_at_every_size_and_more_than_once() -> None:
    steps = Steps(0.001)
    assert time_sizes(steps, SAMPLED_ROWS, steps.clock).keys() == set(SAMPLED_ROWS)
    assert steps.timed.count(1) == REPETITIONS + 1, "what a first call does once is not counted"


@pytest.mark.parametrize("seconds", [0.3, 0.7, 1.4, 20.0])
def test_a_large_model_shows_that_further_rows_are_free(seconds: float) -> None:
    """It has time for few sizes; what lies beyond them is thought to cost in proportion, so they must reach far."""
    steps = Steps(seconds)
    curve = CostCurve(time_sizes(steps, SAMPLED_ROWS, steps.clock))
    assert curve.at(16) == pytest.approx(curve.at(1))
    assert steps.now <= max(8 * seconds, 2.5)


def test_one_size_is_enough_where_there_is_no_other() -> None:
    steps = Steps(20.0)
    assert time_sizes(steps, (1,), steps.clock) == {1: 20.0}
    assert len(steps.timed) == 2
