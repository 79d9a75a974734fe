"""Steps and drafts made only to learn, within a budget of time: costs and acceptance change."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from foreword.speculation.draft_length.cost_model import CostModel, StepShape
from foreword.speculation.draft_length.next_step import BaseStep, NextStep, TrackedRequest
from foreword.speculation.draft_length.policy import NUM_COLD_STEPS
from foreword.speculation.draft_length.row_selection import Candidate, Selection, best_num_rows, split_by_gain

EXPLORATION_SHARE = 0.003  # share of the time
MAX_SAVED_STEPS = 6.0  # capacity of the budget
FIRST_SAVED_STEPS = 8.0  # plain steps in the first budget, to check the calibration
FIRST_EXPLORE_STEP = 256  # until then the budget serves to check the calibration, not draft models
FIRST_STEPS_BETWEEN_PROBES, STEPS_BETWEEN_PROBES = 8, 32  # doubles
MAX_COLD_SHARE = 0.3  # share of a plain step that cold caches may take
MIN_PROBE_GAIN = 1.1  # expected tokens of a probe, relative to none


class ExplorationBudget:
    """Seconds that may be spent on steps and drafts made only to learn: a share of the time, saved up."""

    __slots__ = ("_saved", "spent")

    def __init__(self, step_seconds: float = 0.0) -> None:
        """step_seconds  of a plain step"""
        self.spent = 0.0  # seconds of explorations that did not pay; never falls
        self._saved = FIRST_SAVED_STEPS * step_seconds

    def earn(self, seconds: float) -> None:
        """Time passed; a long unspent budget is capped."""
        saved = min(self._saved + EXPLORATION_SHARE * seconds, MAX_SAVED_STEPS * seconds)
        self._saved = max(self._saved, saved)

    def take(self, seconds: float) -> bool:
        """Spend from the budget if it suffices."""
        if not self.reserve(seconds):
            return False
        self.spent += seconds
        return True

    def reserve(self, seconds: float) -> bool:
        """Set the cost of an exploration aside if the budget suffices; settle() follows."""
        if seconds > self._saved:
            return False
        self._saved -= seconds
        return True

    def settle(self, seconds: float, has_paid: bool) -> None:
        """Return the reserved cost of an exploration that paid, else count it as spent."""
        if has_paid:
            self._saved += seconds
        else:
            self.spent += seconds


class Exploration:
    """Decides when a step explores: more rows, no drafts, or drafts of a model that does not pay."""

    def __init__(self, cost_model: CostModel, next_step: NextStep) -> None:
        self.budget = ExplorationBudget(cost_model.step_costs.cost_of(StepShape(1, 1)))
        self.next_probe_step = 0
        self.samples_plain = False  # the baseline that was taken last is followed by a sample
        self._steps_between_probes = FIRST_STEPS_BETWEEN_PROBES
        self._cost_model = cost_model
        self._next_step = next_step

    def probe(
        self, candidates: Sequence[Candidate], base_step: BaseStep, costs: Sequence[float]
    ) -> Selection:
        """Occasionally verify rows that nearly pay: only measured row counts get their costs corrected."""
        no_drafts = Selection([0] * len(candidates))
        if self._next_step.index < self.next_probe_step:
            return no_drafts
        selection = nearest_paying(candidates, base_step, costs)
        cost = costs[sum(selection.lengths)]
        lost = cost - selection.rate * cost * costs[0] / base_step.shape.num_sampled
        if not selection.rate or not self._take(lost):
            return no_drafts
        self._record_probe()
        return selection

    def probe_more(
        self,
        candidates: Sequence[Candidate],
        base_step: BaseStep,
        costs: Sequence[float],
        selection: Selection,
    ) -> Selection:
        """Occasionally verify twice the rows that seem to pay best."""
        count = 2 * sum(selection.lengths)
        if self._next_step.index < self.next_probe_step or count >= len(costs):
            return selection
        lengths = split_by_gain([candidate.gains for candidate in candidates], count)
        expected = sum(c.expected_tokens[n] for c, n in zip(candidates, lengths, strict=True))
        num_tokens = base_step.shape.num_sampled + expected
        lost = costs[count] + self._next_step.draft_cost - num_tokens / selection.rate
        if not self._take(lost):
            return selection
        self._record_probe()
        return Selection(lengths, selection.rate)

    def takes_baseline(self, base_step: BaseStep, token_rate: float) -> bool:
        """Whether the next step runs without its drafts, to renew the watchdog's baseline.

        Where drafts gain little, steps without proposing follow, of which the last is a sample of plain
        decoding. Where they gain more, cold caches cannot be the reason.
        """
        watchdog = self._cost_model.watchdog
        if not watchdog.is_baseline_stale:
            return False
        lost = base_step.plain_cost - base_step.shape.num_sampled / token_rate
        self.samples_plain = lost < MAX_COLD_SHARE * base_step.plain_cost
        if not self._take(lost * (NUM_COLD_STEPS + 2) if self.samples_plain else lost):
            return False
        if not self.samples_plain:
            watchdog.record_sample()
        return True

    @property
    def explores_models(self) -> bool:
        """The budget has checked the calibration, and serves for draft models now."""
        return self._next_step.index >= FIRST_EXPLORE_STEP

    def probe_draft_model(self, requests: Sequence[TrackedRequest], cost: float) -> bool:
        """Whether a model that does not seem to pay drafts one token for these requests, at `cost`."""
        seconds = cost * self._cost_model.drift
        if not self.budget.reserve(seconds):
            return False
        for request in requests:
            self.settle_probe(request, 0)  # the last one had no draft to score
            request.probe_cost = seconds / len(requests)
        return True

    def settle_probe(self, request: TrackedRequest, num_hits: int) -> None:
        """The draft of a request was scored, or never will be; a probe that hit is refunded."""
        self.budget.settle(request.probe_cost, num_hits > 0)
        request.probe_cost = 0.0

    def _take(self, lost_cost: float) -> bool:
        return self.budget.take(max(lost_cost, 0.0) * self._cost_model.drift)

    def _record_probe(self) -> None:
        self.next_probe_step = self._next_step.index + self._steps_between_probes
        self._steps_between_probes = min(2 * self._steps_between_probes, STEPS_BETWEEN_PROBES)


def nearest_paying(candidates: Sequence[Candidate], base_step: BaseStep, costs: Sequence[float]) -> Selection:
    """The best rows to probe where none pay; no rows if they would not pay even for free."""
    gains = [candidate.gains for candidate in candidates]
    tokens = float(base_step.shape.num_sampled)
    max_cost = base_step.plain_cost + base_step.max_delay(candidate.request for candidate in candidates)
    # compare from one row on: without drafts would win
    ordered = sorted(chain.from_iterable(gains), reverse=True)
    count = 1 + best_num_rows([ordered[1:]], tokens + ordered[0], costs[1:], max_cost, min_speedup=1.0)
    total = tokens + sum(ordered[:count])
    if total < MIN_PROBE_GAIN * tokens or costs[count] > max_cost:
        return Selection([0] * len(candidates))
    return Selection(split_by_gain(gains, count), total / costs[count])
