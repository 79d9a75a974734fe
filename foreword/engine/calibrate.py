"""What a step costs on this machine, timed on the loaded engine before the first request.

The steps are real ones, from assembling to matching, over requests that nobody sent. Their KV lies in the scratch
block, which belongs to no request. Only ratios matter later, so every size has its turn in each round: a machine
that slows down for a while slows all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from foreword.core.batch import NULL_BLOCK
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.drafting.base import ModelBasedDrafter
from foreword.drafting.control.costs import Calibration
from foreword.engine.assemble import BatchBuilder
from foreword.engine.plan import ScheduleOutput, ScheduledRequest
from foreword.engine.runner import ModelRunner

__all__ = ["StepCostProfiler", "time_passes"]

# What tells most comes first: a large model is not timed for long, and between two sizes the cost is a line
SAMPLED_ROWS = (1, 16, 4, 64, 8, 2, 32, 128, 3, 6, 12, 24, 48, 96)
PROMPT_ROWS = (1, 16, 64, 128)  # rows of a prompt, of which the last is sampled
CONTEXT_TOKENS, CONTEXT_ROWS = 1024, 8  # tokens of a long text, and rows of one request that read it
REPETITIONS = 5
FIRST_REPETITION_S, ALL_REPETITIONS_S = 1.5, 0.2  # for each table: a large model is timed once, and no further than the first of these,
MIN_SIZES = 2  # but for so many sizes: one says nothing about what further rows cost

TimeRows = Callable[[int], float]


class StepCostProfiler:
    """Times steps of one engine.

    max_rows, max_len  of a step, and of a request
    clock              seconds
    """

    def __init__(
        self,
        batch_builder: BatchBuilder,
        model_runner: ModelRunner,
        max_rows: int,
        max_len: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._batch_builder = batch_builder
        self._model_runner = model_runner
        self._max_rows = max_rows
        self._max_len = max_len
        self._clock = clock

    def measure(self) -> Calibration:
        most = min(self._max_rows, self._max_len - 2)
        first, further = self._context_costs()
        return Calibration(
            all_rows_sampled=time_sizes(lambda rows: self.time_step(rows, rows), _sizes_up_to(most, SAMPLED_ROWS), self._clock),
            one_row_sampled=time_sizes(lambda rows: self.time_step(rows, 1), _sizes_up_to(most, PROMPT_ROWS), self._clock),
            context_cost_first_row=first,
            context_cost_extra_row=further,
        )

    def time_step(self, num_rows: int, num_sampled: int, context: int = 0) -> float:
        """Seconds of a step of one request behind `context` tokens: all sampled rows but the first are drafted."""
        num_known = num_rows - num_sampled + 1
        state = self._dummy_state(context + num_known, num_sampled - 1)
        plan = ScheduleOutput((ScheduledRequest(state, context, num_known, is_sampled=True, num_draft_tokens=num_sampled - 1),))
        started = self._clock()
        self._model_runner.run(self._batch_builder.build(plan))
        return self._clock() - started

    def _context_costs(self) -> tuple[float, float]:
        """Seconds for each token of context that the first row of a request reads, and each further row."""
        rows = min(CONTEXT_ROWS, self._max_rows)
        context = min(CONTEXT_TOKENS, self._max_len - rows - 2)
        if context < 1 or rows < 2:
            return 0.0, 0.0
        near = time_sizes(lambda n: self.time_step(n, n), (1, rows), self._clock)
        far = time_sizes(lambda n: self.time_step(n, n, context), (1, rows), self._clock)
        first = max(far.get(1, 0.0) - near[1], 0.0) / context
        all_rows = max(far.get(rows, 0.0) - near.get(rows, 0.0), 0.0) / context
        return first, max(all_rows - first, 0.0) / (rows - 1)

    def _dummy_state(self, num_tokens: int, num_draft: int) -> RequestState:
        """A request whose blocks are all the scratch block."""
        request = Request("calibration", (0,) * num_tokens, SamplingParams(temperature=0.0), seed=0)
        state = RequestState(request, 0, num_tokens + num_draft + 2)
        state.set_draft((0,) * num_draft, "calibration")
        state.blocks = [NULL_BLOCK] * -(-(num_tokens + num_draft) // self._batch_builder.block_size)
        return state


def time_passes(drafter: ModelBasedDrafter, max_rows: int, clock: Callable[[], float] = time.perf_counter) -> Mapping[int, float]:
    """Seconds of one pass of a drafter's model, by rows."""
    return time_sizes(lambda rows: drafter.pass_seconds(rows, rows), _sizes_up_to(max_rows, SAMPLED_ROWS), clock)


def time_sizes(time_rows: TimeRows, sizes: Sequence[int], clock: Callable[[], float]) -> Mapping[int, float]:
    """Least seconds by size: whoever else uses the machine only adds to them. What a first call does once is not counted."""
    time_rows(sizes[0])
    seconds: dict[int, list[float]] = {}
    started = clock()
    for round_ in range(REPETITIONS):
        for size in sizes if round_ == 0 else tuple(seconds):
            if clock() - started > (ALL_REPETITIONS_S if round_ else FIRST_REPETITION_S) and (round_ or len(seconds) >= MIN_SIZES):
                break
            seconds.setdefault(size, []).append(time_rows(size))
    return {rows: min(of) for rows, of in seconds.items()}


def _sizes_up_to(max_size: int, sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in sizes if size <= max_size) or (1,)
