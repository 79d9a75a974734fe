"""Timing of step sizes before the first request."""

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from foreword.core.batch import NULL_BLOCK
from foreword.engine.cost_profiler import MIN_SAMPLES, SAMPLED_ROWS, StepCostProfiler, time_passes, time_sizes
from foreword.engine.scheduler import ScheduledRequest
from foreword.speculation.draft_length.cost_model import CostCurve

FLAT_ROWS = 24  # rows of equal step time


class Steps:
    """Steps that take `seconds` up to RIDGE rows, on a fake clock."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.now = 0.0
        self.timed: list[int] = []

    def __call__(self, rows: int) -> float:
        took = self.seconds * max(rows / FLAT_ROWS, 1.0)
        self.timed.append(rows)
        self.now += took
        return took

    def clock(self) -> float:
        return self.now


def test_small_model_is_timed_at_every_size() -> None:
    steps = Steps(0.001)
    assert time_sizes(steps, SAMPLED_ROWS, steps.clock).keys() == set(SAMPLED_ROWS)
    assert steps.timed.count(1) == MIN_SAMPLES + 1, "the first call is not counted"


@pytest.mark.parametrize("seconds", [0.3, 0.7, 1.4, 20.0])
def test_large_model_is_timed_at_informative_sizes(seconds: float) -> None:
    """Costs beyond the timed sizes are extrapolated in proportion, so large sizes are timed first."""
    steps = Steps(seconds)
    curve = CostCurve(time_sizes(steps, SAMPLED_ROWS, steps.clock))
    assert curve.at(16) == pytest.approx(curve.at(1))
    assert steps.now <= max(8 * seconds, 2.5)


def test_single_size_is_timed() -> None:
    steps = Steps(20.0)
    assert time_sizes(steps, (1,), steps.clock) == {1: 20.0}
    assert len(steps.timed) == 2


def test_stalls_hardly_change_the_curve() -> None:
    """Stalls of other processes hit every second sample."""
    steps, rng = Steps(0.001), random.Random(1)

    def disturbed(rows: int) -> float:
        stall = rng.choice((0.0, rng.uniform(0.005, 0.03)))
        steps.now += stall
        return steps(rows) + stall

    curve = CostCurve(time_sizes(disturbed, SAMPLED_ROWS, steps.clock))
    for rows in SAMPLED_ROWS:
        assert 1.0 <= curve.at(rows) / (0.001 * max(rows / FLAT_ROWS, 1.0)) < 2.5, rows


class Machine:
    """Batch builder, model runner and clock of a machine where only further rows of a context take time."""

    block_size = 16

    def __init__(self, step_s: Callable[[int], float] = lambda rows: 0.01) -> None:
        self._step_s = step_s  # by rows
        self.num_steps = 0
        self.now = 0.0
        self.blocks: list[int] = []
        self.token_ids: list[int] = []

    def build(self, requests: Sequence[ScheduledRequest]) -> Sequence[ScheduledRequest]:
        self.token_ids = [token for r in requests for token in (*r.state.tokens, *r.state.draft)]
        self.blocks = [block for request in requests for block in request.state.blocks]
        return requests

    def run(self, requests: Sequence[ScheduledRequest]) -> None:
        self.num_steps += 1
        self.now += self._step_s(sum(1 + request.num_draft_tokens for request in requests))
        self.now += sum(request.start * request.num_draft_tokens for request in requests) * 1e-6

    def clock(self) -> float:
        return self.now


def test_contexts_are_read_from_memory() -> None:
    """One block again and again would be read from a cache, and a long context would seem free.

    Only the scratch block is written to: others may hold the KV of an engine before.
    """
    machine = Machine()
    profiler = StepCostProfiler(machine, machine, 1000, 64, 4096, 4, machine.clock)  # type: ignore[arg-type]
    for context in (1024, 1030):
        profiler.time_step(8, 8, context=context)
        assert machine.blocks == [*range(1, 65), *([NULL_BLOCK] * (len(machine.blocks) - 64))]
        assert len(machine.blocks) > 64
    profiler.time_step(8, 8)
    assert set(machine.blocks) == {NULL_BLOCK}


@pytest.mark.parametrize("num_requests", [1, 4])
def test_rows_have_different_tokens(num_requests: int) -> None:
    """Rows of the same token would choose the same experts, and further rows would seem free."""
    machine = Machine()
    profiler = StepCostProfiler(machine, machine, 1000, 64, 4096, 4, machine.clock)  # type: ignore[arg-type]
    profiler.time_step(16 // num_requests, 16 // num_requests, num_requests=num_requests)
    assert len(set(machine.token_ids)) == len(machine.token_ids) == 16


def test_first_row_of_a_context_costs_as_much_as_a_further_one() -> None:
    machine = Machine()
    calibration = StepCostProfiler(machine, machine, 1000, 64, 4096, 4, machine.clock).measure()  # type: ignore[arg-type]
    assert calibration.context_cost_extra_row == pytest.approx(1e-6)
    assert calibration.context_cost_first_row == calibration.context_cost_extra_row


@pytest.mark.parametrize("row_s", [0.06, 0.2, 5.0])
def test_slow_model_is_timed_in_a_few_steps(row_s: float) -> None:
    """The start waits for them: less than a second where a step of one row takes 0.2 s."""
    machine = Machine(lambda rows: row_s * (0.9 + 0.1 * rows))
    profiler = StepCostProfiler(machine, machine, 1000, 512, 8192, 64, machine.clock)  # type: ignore[arg-type]
    calibration = profiler.measure()
    curve = CostCurve(calibration.all_rows_sampled)
    assert [curve.at(n) for n in (1, 8, 16)] == pytest.approx([row_s * (0.9 + 0.1 * n) for n in (1, 8, 16)])
    assert machine.num_steps <= 5
    # The machine's first row reads a context for free, which here is not told from the others.
    assert calibration.context_cost_extra_row == pytest.approx(7 / 8 * 1e-6, rel=0.01)


@pytest.mark.parametrize("rows_per_request", [None, 7])
def test_passes_of_a_drafter_are_timed_up_to_their_largest(rows_per_request: int | None) -> None:
    one_pass = None if rows_per_request is None else SimpleNamespace(max_rows=rows_per_request)
    drafter: Any = SimpleNamespace(one_pass=one_pass, pass_seconds=lambda rows, sampled: rows * 1e-3)
    assert max(time_passes(drafter, 3)) == 3 * (rows_per_request or 1)
