"""What a step costs on this machine, timed on the loaded engine before the first request.

The steps are real ones, from assembling to matching, over requests that nobody sent. Their KV lies in the scratch
block, which belongs to no request. Only ratios matter later, so every size has its turn in each round: a machine
that slows down for a while slows all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from foreword.core.batch import SCRATCH_BLOCK
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.drafting.base import PassDrafter
from foreword.drafting.control.costs import Calibration
from foreword.engine.assemble import Assembler
from foreword.engine.plan import Plan, Work
from foreword.engine.runner import Runner

__all__ = ["Calibrator", "pass_seconds"]

# What tells most comes first: a large model is not timed for long, and between two sizes the cost is a line
ROWS = (1, 16, 4, 64, 8, 2, 32, 128, 3, 6, 12, 24, 48, 96)
CHUNKS = (1, 16, 64, 128)  # rows of a prompt, of which the last is sampled
CONTEXT, CONTEXT_ROWS = 1024, 8  # tokens of a long text, and rows of one request that read it
ROUNDS = 5
FIRST_S, MORE_S = 1.5, 0.2  # for each table: a large model is timed once, and no further than the first of these,
FEWEST = 2  # but for so many sizes: one says nothing about what further rows cost

Timed = Callable[[int], float]


class Calibrator:
    """Times steps of one engine.

    max_rows, max_len  of a step, and of a request
    clock              seconds
    """

    def __init__(
        self,
        assembler: Assembler,
        runner: Runner,
        max_rows: int,
        max_len: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._assembler = assembler
        self._runner = runner
        self._max_rows = max_rows
        self._max_len = max_len
        self._clock = clock

    def calibration(self) -> Calibration:
        most = min(self._max_rows, self._max_len - 2)
        first, further = self._reads()
        return Calibration(
            sampled=rounds(lambda rows: self.step(rows, rows), _up_to(most, ROWS), self._clock),
            single=rounds(lambda rows: self.step(rows, 1), _up_to(most, CHUNKS), self._clock),
            read_first=first,
            read_further=further,
        )

    def step(self, rows: int, sampled: int, context: int = 0) -> float:
        """Seconds of a step of one request behind `context` tokens: all sampled rows but the first are drafted."""
        num_known = rows - sampled + 1
        state = self._state(context + num_known, sampled - 1)
        plan = Plan((Work(state, context, num_known, samples=True, num_draft=sampled - 1),))
        started = self._clock()
        self._runner.run(self._assembler.build(plan))
        return self._clock() - started

    def _reads(self) -> tuple[float, float]:
        """Seconds for each token of context that the first row of a request reads, and each further row."""
        rows = min(CONTEXT_ROWS, self._max_rows)
        context = min(CONTEXT, self._max_len - rows - 2)
        if context < 1 or rows < 2:
            return 0.0, 0.0
        near = rounds(lambda n: self.step(n, n), (1, rows), self._clock)
        far = rounds(lambda n: self.step(n, n, context), (1, rows), self._clock)
        first = max(far.get(1, 0.0) - near[1], 0.0) / context
        all_rows = max(far.get(rows, 0.0) - near.get(rows, 0.0), 0.0) / context
        return first, max(all_rows - first, 0.0) / (rows - 1)

    def _state(self, num_tokens: int, num_draft: int) -> RequestState:
        """A request whose blocks are all the scratch block."""
        request = Request("calibration", (0,) * num_tokens, SamplingParams(temperature=0.0), seed=0)
        state = RequestState(request, 0, num_tokens + num_draft + 2)
        state.set_draft((0,) * num_draft, "calibration")
        state.blocks = [SCRATCH_BLOCK] * -(-(num_tokens + num_draft) // self._assembler.block_size)
        return state


def pass_seconds(drafter: PassDrafter, max_rows: int, clock: Callable[[], float] = time.perf_counter) -> Mapping[int, float]:
    """Seconds of one pass of a drafter's model, by rows."""
    return rounds(lambda rows: drafter.pass_seconds(rows, rows), _up_to(max_rows, ROWS), clock)


def rounds(timed: Timed, sizes: Sequence[int], clock: Callable[[], float]) -> Mapping[int, float]:
    """Least seconds by size: whoever else uses the machine only adds to them. What a first call does once is not counted."""
    timed(sizes[0])
    seconds: dict[int, list[float]] = {}
    started = clock()
    for round_ in range(ROUNDS):
        for size in sizes if round_ == 0 else tuple(seconds):
            if clock() - started > (MORE_S if round_ else FIRST_S) and (round_ or len(seconds) >= FEWEST):
                break
            seconds.setdefault(size, []).append(timed(size))
    return {rows: min(of) for rows, of in seconds.items()}


def _up_to(most: int, sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in sizes if size <= most) or (1,)
