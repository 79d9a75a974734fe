"""Costs of the loaded engine's steps, measured before its first request.

All steps are real ones over dummy requests whose KV goes to the scratch block.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Mapping, Sequence

from foreword.core.batch import NULL_BLOCK
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.engine.batch_builder import BatchBuilder
from foreword.engine.model_runner import ModelRunner
from foreword.engine.scheduler import ScheduledRequest
from foreword.speculation.draft_length.cost_model import Calibration, CostCurve
from foreword.speculation.engine_drafter import ModelBasedDrafter

# The most informative sizes first: a large model is timed at few of them
SAMPLED_ROWS = (1, 16, 4, 64, 8, 2, 32, 128, 3, 6, 12, 24, 48, 96)
PROMPT_ROWS = (1, 16, 64, 128)  # rows of a prompt, of which the last is sampled
REQUEST_ROWS = 16  # rows of one request, and requests of one row
CONTEXT_TOKENS, CONTEXT_ROWS = 4096, 8  # a long context, and rows of one request that attend to it
ROUNDS_S = 0.5  # time limit of a table
SLOW_STEP_S = 0.05  # step of one row from which each size is timed once, since the start waits for it
FEW_ROWS, MORE_ROWS = 4, (16, 8)  # MORE_ROWS: where FEW_ROWS cost about as much as one, and where not
FLAT_RATIO = 1.5
MIN_SAMPLES = 3
AGREEMENT = 1.1  # ratio of the two least samples that settles a size
MIN_SIZES = 2  # timed regardless: one size says nothing about the cost of more rows
TOKEN_STRIDE = 7919  # distance of the ids of neighbouring tokens; prime

TimeRows = Callable[[int], float]


class StepCostProfiler:
    """Times steps of one engine."""

    def __init__(
        self,
        batch_builder: BatchBuilder,
        model_runner: ModelRunner,
        vocab_size: int,
        max_rows: int,  # rows of a step
        max_len: int,  # tokens of a request
        max_requests: int,  # requests of a step
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._batch_builder = batch_builder
        self._model_runner = model_runner
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self._max_len = max_len
        self._max_requests = max_requests
        self._clock = clock

    def measure(self) -> Calibration:
        max_rows = max(min(self._max_rows, self._max_len - 2), 1)
        self.time_step(1, 1)  # touches memory for the first time
        row_s = self.time_step(1, 1)
        if row_s > SLOW_STEP_S:
            return self._measure_slow(row_s, max_rows)
        first_row, extra_row = self._context_costs()
        sampled_rows, prompt_rows = _sizes_up_to(max_rows, SAMPLED_ROWS), _sizes_up_to(max_rows, PROMPT_ROWS)
        return Calibration(
            all_rows_sampled=time_sizes(lambda n: self.time_step(n, n), sampled_rows, self._clock),
            one_row_sampled=time_sizes(lambda n: self.time_step(n, 1), prompt_rows, self._clock),
            context_cost_first_row=first_row,
            context_cost_extra_row=extra_row,
            request_cost=self._request_cost(),
        )

    def _measure_slow(self, row_s: float, max_rows: int) -> Calibration:
        """The table of a model whose steps take long: noise is small beside them, and each corrects it.

        Rows of a prompt cost as much as sampled ones, and rows share the cost of a context alike; that of a
        request is left out, since it is the host's.
        """
        few = min(FEW_ROWS, max_rows)
        sampled = {1: row_s, few: self.time_step(few, few)}
        more = min(MORE_ROWS[sampled[few] > FLAT_RATIO * row_s], max_rows)
        sampled[more] = self.time_step(more, more)
        rows = min(CONTEXT_ROWS, max_rows)
        context = min(CONTEXT_TOKENS, self._max_len - rows - 2)
        per_row = 0.0
        if context >= 1 and rows >= 2:
            near = CostCurve(sampled).at(rows)
            per_row = max(self.time_step(rows, rows, context) - near, 0.0) / context / rows
        return Calibration(sampled, {}, per_row, per_row)

    def time_step(self, num_rows: int, num_sampled: int, context: int = 0, num_requests: int = 1) -> float:
        """Seconds of a step of requests after `context` tokens, each with num_sampled - 1 draft rows."""
        num_known, num_draft = num_rows - num_sampled + 1, num_sampled - 1
        params, block_size = SamplingParams(temperature=0.0), self._batch_builder.block_size
        requests = [
            make_dummy_request(index, num_known, num_draft, params, block_size, context, self._vocab_size)
            for index in range(num_requests)
        ]
        # Distinct blocks, since one block again would be in the cache. They are only read: memory that
        # outlives an engine has the conversations of the one before.
        for index in range(context // block_size):
            requests[0].state.blocks[index] = index + 1
        started = self._clock()
        self._model_runner.run(self._batch_builder.build(requests))
        return self._clock() - started

    def _context_costs(self) -> tuple[float, float]:
        """Seconds per context token: of the first row of a request, and of each further row."""
        rows = min(CONTEXT_ROWS, self._max_rows)
        context = min(CONTEXT_TOKENS, self._max_len - rows - 2)
        if context < 1 or rows < 2:
            return 0.0, 0.0
        near = time_sizes(lambda n: self.time_step(n, n), (1, rows), self._clock)
        far = time_sizes(lambda n: self.time_step(n, n, context), (1, rows), self._clock)
        first = max(far.get(1, 0.0) - near[1], 0.0) / context
        all_rows = max(far.get(rows, 0.0) - near.get(rows, 0.0), 0.0) / context
        extra = max(all_rows - first, 0.0) / (rows - 1)
        return max(first, extra), extra  # the first row reads the memory for all

    def _request_cost(self) -> float:
        """Seconds of a request beyond the first: one row of each of many, against as many rows of one."""
        rows = min(REQUEST_ROWS, self._max_rows, self._max_requests, self._max_len - 2)
        if rows < 2:
            return 0.0
        seconds = time_sizes(
            lambda n: self.time_step(rows // n, rows // n, num_requests=n), (1, rows), self._clock
        )
        return max(seconds[rows] - seconds[1], 0.0) / (rows - 1)


def make_dummy_request(
    index: int,
    num_tokens: int,
    num_draft: int,
    params: SamplingParams,
    block_size: int,
    context: int = 0,
    vocab_size: int = 1,
) -> ScheduledRequest:
    """A request with `num_tokens` uncomputed tokens after `context`, all on the scratch block.

    Tokens are spread over the vocabulary: rows of the same token would choose the same experts.
    """
    length = context + num_tokens + num_draft
    token_ids = [(index * length + i) * TOKEN_STRIDE % vocab_size for i in range(length)]
    request = Request(f"dummy-{index}", tuple(token_ids[: context + num_tokens]), params, seed=index)
    state = RequestState(request, index, length + 2)
    state.set_draft(tuple(token_ids[context + num_tokens :]), "dummy")
    state.blocks.extend([NULL_BLOCK] * -(-length // block_size))
    return ScheduledRequest(state, context, num_tokens, is_sampled=True, num_draft_tokens=len(state.draft))


def time_passes(drafter: ModelBasedDrafter, num_requests: int) -> Mapping[int, float]:
    """Seconds of a pass of a draft model by rows, up to those of `num_requests` requests."""
    max_rows = num_requests * (1 if drafter.one_pass is None else drafter.one_pass.max_rows)
    last = min(max_rows, max(SAMPLED_ROWS))
    sizes = _sizes_up_to(max_rows, tuple(dict.fromkeys((*SAMPLED_ROWS, last))))
    return time_sizes(lambda rows: drafter.pass_seconds(rows, rows), sizes, time.perf_counter)


def time_sizes(time_rows: TimeRows, sizes: Sequence[int], clock: Callable[[], float]) -> Mapping[int, float]:
    """Least seconds by size, since noise only adds. The first call warms up and is not counted.

    A size is timed at least MIN_SAMPLES times, and until its two least samples agree. Each round times all
    others, so that a slow phase of the machine affects them alike.
    """
    time_rows(sizes[0])
    seconds: dict[int, list[float]] = {}
    started = clock()
    for size in sizes:
        if clock() - started > ROUNDS_S and len(seconds) >= MIN_SIZES:
            break
        seconds[size] = [time_rows(size)]
    unsettled = list(seconds)
    while unsettled and clock() - started < ROUNDS_S:
        for size in unsettled:
            insort(seconds[size], time_rows(size))
        unsettled = [size for size in unsettled if not _is_settled(seconds[size])]
    return {size: samples[0] for size, samples in seconds.items()}


def _is_settled(samples: Sequence[float]) -> bool:
    return len(samples) >= MIN_SAMPLES and samples[1] <= AGREEMENT * samples[0]


def _sizes_up_to(max_size: int, sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in sizes if size <= max_size) or (1,)
