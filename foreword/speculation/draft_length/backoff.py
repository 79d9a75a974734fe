"""Backoff for requests whose drafts do not pay: proposing costs time too."""

from __future__ import annotations

import math

from foreword.speculation.draft_length.next_step import TrackedRequest

MAX_BACKOFF_NO_CANDIDATE = 64  # steps, while nothing is proposed
MAX_BACKOFF_NOT_WORTH_IT = 128  # steps, while drafts do not pay
MAX_BACKOFF_DELAY_BUDGET = 8  # steps, while drafts would delay others too much: so does proposing
MISSES_BEFORE_BACKOFF = 4  # proposals without a draft that pays
MAX_MISSES = 14.0
# Misses of a new request: at first, at most, and the weight of each request that ends
FIRST_MISSES, MAX_INHERITED_MISSES, INHERITED_ALPHA = 4.0, 9.0, 1 / 4
PROPOSAL_COST_ALPHA = 1 / 16
MAX_PROPOSAL_OVERHEAD = 0.004  # share of the time for unused proposals; below it there is no backoff


class Backoff:
    """Backoff lengths are powers of two that end at their multiples: requests resume together.

    So a model can draft for all of them in the same passes.
    """

    def __init__(self) -> None:
        self.proposal_overhead = 0.0  # cost of proposals without a model, as a share of a step
        self.proposal_cost = 0.0  # the same in model seconds
        self._inherited_misses = FIRST_MISSES

    def start(self, request: TrackedRequest, step_index: int) -> None:
        """A request begins as those before it ended; a short one would end before it has learned the same."""
        request.misses = self._inherited_misses
        self._skip(request, step_index, MAX_BACKOFF_NOT_WORTH_IT)

    def finish(self, request: TrackedRequest) -> None:
        """A request ends."""
        misses = min(request.misses, MAX_INHERITED_MISSES)
        self._inherited_misses += (misses - self._inherited_misses) * INHERITED_ALPHA

    def record_hit(self, request: TrackedRequest, num_paid: float = math.inf) -> None:
        """A draft is verified that pays as much as `num_paid` proposals cost; negative if it loses time."""
        request.misses = min(max(request.misses + 1.0 - num_paid, 0.0), MAX_MISSES)

    def record_cost(self, cost: float, share: float) -> None:
        """Proposing without a model took `cost` model seconds, and with cold caches this share of a step."""
        alpha = PROPOSAL_COST_ALPHA if self.proposal_cost else 1.0
        self.proposal_cost += (cost - self.proposal_cost) * alpha
        self.proposal_overhead += (share - self.proposal_overhead) * alpha

    def record_miss(self, request: TrackedRequest, step_index: int, max_steps: int) -> None:
        """No draft in this step; after several misses the request backs off, for at most `max_steps`."""
        request.misses = min(request.misses + 1.0, MAX_MISSES)
        self._skip(request, step_index, max_steps)

    def _skip(self, request: TrackedRequest, step_index: int, max_steps: int) -> None:
        if request.misses > MISSES_BEFORE_BACKOFF and max_steps:
            length = self.length(math.ceil(request.misses) - MISSES_BEFORE_BACKOFF, max_steps)
            request.skip_until = (step_index // length + 1) * length

    def length(self, num_failures: int, max_steps: int) -> int:
        """Steps of backoff after `num_failures`: a power of two that grows with the cost of proposing."""
        overhead = math.ceil(self.proposal_overhead / MAX_PROPOSAL_OVERHEAD)
        steps = min(1 << min(num_failures, 10), max_steps, overhead)
        return 1 << max(steps - 1, 0).bit_length()
