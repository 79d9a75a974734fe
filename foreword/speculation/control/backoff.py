"""Who is left alone for a while: asking for drafts takes time, which is lost where none comes of it that pays."""

from __future__ import annotations

import math

from foreword.speculation.control.fairness import TrackedRequest

__all__ = ["Backoff"]

MISSES_BEFORE_BACKOFF = 4  # asks without a draft that pays before a request is left alone for a while
INITIAL_MISSES = 7  # as if so many had been in vain already, where no request's guesses come true at present
MAX_PROPOSAL_OVERHEAD = (
    0.004  # of the time may go into asking in vain; where it takes less, nobody is left alone
)


class Backoff:
    """Spells are powers of two and end where such a number divides the round: requests wake together, so that a model can draft
    for all of them in the same passes.

    asking  what asking in vain takes, as a share of a step
    """

    def __init__(self) -> None:
        self.proposal_overhead = 0.0

    def start(self, request: TrackedRequest, mean_hit_rate: float) -> None:
        """A request begins, where this share of the others' guesses comes true at present."""
        request.misses = round((1.0 - mean_hit_rate) * INITIAL_MISSES)

    def record_cost(self, share: float) -> None:
        """Of a step, asking without a draft took this share."""
        self.proposal_overhead += (share - self.proposal_overhead) / 16 if self.proposal_overhead else share

    def record_miss(self, request: TrackedRequest, step_index: int, max_steps: int) -> None:
        """No draft in the round `now`; a request that has had none for long sleeps for growing spells, if asking costs."""
        request.misses += 1
        if request.misses > MISSES_BEFORE_BACKOFF and max_steps:
            spell = self.length(request.misses - MISSES_BEFORE_BACKOFF, max_steps)
            request.skip_until = (step_index // spell + 1) * spell

    def length(self, num_failures: int, max_steps: int) -> int:
        """Rounds to leave alone what was in vain so many times: a power of two, the longer the more asking costs."""
        most = min(
            1 << min(num_failures, 10), max_steps, math.ceil(self.proposal_overhead / MAX_PROPOSAL_OVERHEAD)
        )
        return 1 << max(most - 1, 0).bit_length()
