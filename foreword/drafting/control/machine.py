"""What the controller believes about the machine, and how each step corrects it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from foreword.drafting.control.costs import (
    OUTLIER_RATIO,
    FIRST_HOST_SAMPLER_CLASS,
    NUM_SAMPLER_CLASSES,
    Calibration,
    SpeedDrift,
    PassCost,
    SamplingCosts,
    StepShape,
    StepCosts,
)
from foreword.drafting.control.watchdog import RegressionWatchdog
from foreword.drafting.policy import RequestStep

__all__ = ["CostModel", "StepSummary"]

SAMPLING_COST_EVERY = 8  # steps between two looks at the price of sampling
PASS_COST_ALPHA = 0.05
OVERLAP_PRIOR, OVERLAP_ALPHA = 0.9, 0.125
OVERLAP_FORGOTTEN, OVERLAP_FORGET_ALPHA = 0.985, 1 / 256  # believed of running ahead where it does not come to it: enough to try it


@dataclass(frozen=True, slots=True)
class StepSummary:
    """A step that is over: as it was, and as it would have been without its drafts.

    kinds     sampled rows by sampling class
    emitted   tokens, of `sampling` requests
    decoding  no prompt was computed: each row was sampled
    """

    shape: StepShape
    plain_shape: StepShape
    rows_by_sampler_class: Sequence[int]
    num_emitted: int
    num_sampling_requests: int

    @property
    def num_draft_rows(self) -> int:
        return self.shape.num_rows - self.plain_shape.num_rows

    @property
    def is_decode_only(self) -> bool:
        return self.shape.num_sampled == self.shape.num_rows


class CostModel:
    """Costs of steps and passes in model seconds, corrected by what they really take.

    watchdog   doubts it all
    ahead      what a step without drafts takes where it is computed ahead of the host, as a share of one that is not
    predicted  seconds that steps with drafts were thought to take, drafting included; realised: what they took
    """

    def __init__(self, calibration: Calibration, pass_costs: Mapping[str, PassCost]) -> None:
        self.step_costs = StepCosts(calibration)
        self.sampling_costs = SamplingCosts(self.step_costs.cost_of(StepShape(1, 1)))
        self.watchdog = RegressionWatchdog()
        self.predicted_seconds = self.realised_seconds = 0.0
        self.measured_overlap_ratio = 1.0
        self._pass_costs = dict(pass_costs)
        self._drift = SpeedDrift()
        self._pass_factor = 1.0
        self._last_step = (0, 1.0)  # rows of the last decoding step, and how many times its cost it took
        self._num_steps = 0

    @property
    def drift(self) -> float:
        """Seconds by model second."""
        return self._drift.factor or 1.0

    def summarize(self, requests: Sequence[RequestStep], sampler_classes: Mapping[str, int]) -> StepSummary:
        """Sum up a step; kinds: sampling classes of the requests that are not greedy."""
        rows = drafted = further = context = emitted = sampling = 0
        by_kind, by_kind_plain = [0] * NUM_SAMPLER_CLASSES, [0] * NUM_SAMPLER_CLASSES
        for one in requests:
            draft = one.num_draft_tokens
            rows += one.num_tokens
            context += one.context_len - draft
            if draft:
                drafted += draft
                further += draft * one.context_len
            if one.is_sampled:
                sampling += 1
                emitted += one.num_emitted
                kind = sampler_classes.get(one.state.id, 0) if sampler_classes else 0
                by_kind[kind] += 1 + draft
                by_kind_plain[kind] += 1
        shape = plain = StepShape(rows, sampling, context, 0, self._sampling_extra(by_kind_plain) if sampler_classes else 0.0)
        if drafted:
            extra = self._sampling_extra(by_kind) if sampler_classes else 0.0
            shape = StepShape(rows + drafted, sampling + drafted, context, further, extra)
        return StepSummary(shape, plain, by_kind, emitted, sampling)

    def record_step(self, summary: StepSummary, seconds_by_stage: Mapping[str, float], predicted_draft_cost: float) -> tuple[float, float]:
        """Learn from a step, in which drafters' passes should have taken `passes` model seconds.

        Returns model seconds: of the step without drafting, and of the drafting in it.
        """
        drafting = seconds_by_stage.get("draft", 0.0)
        verifying = sum(seconds_by_stage.values()) - drafting
        self.measured_overlap_ratio += max(OVERLAP_FORGOTTEN - self.measured_overlap_ratio, 0.0) * OVERLAP_FORGET_ALPHA
        cost = self.step_costs.cost_of(summary.shape)
        if summary.num_draft_rows:
            self.predicted_seconds += (cost + predicted_draft_cost) * self.drift
            self.realised_seconds += verifying + drafting
        if summary.is_decode_only and verifying > 0.0:
            self._update(summary, cost, seconds_by_stage)
        drafted = drafting / self.drift
        if predicted_draft_cost > 0.0 and drafted > 0.0:
            self._pass_factor *= min(max(drafted / predicted_draft_cost, 1 / OUTLIER_RATIO), OUTLIER_RATIO) ** PASS_COST_ALPHA
        return cost, drafted

    def enable_overlap(self) -> None:
        """It is worth finding out what running ahead saves."""
        self.measured_overlap_ratio = OVERLAP_PRIOR

    def record_overlap_step(self, summary: StepSummary, seconds_by_stage: Mapping[str, float]) -> None:
        """Learn from a step that was computed ahead."""
        share = sum(seconds_by_stage.values()) / (self.step_costs.cost_of(summary.plain_shape) * self.drift)
        self.measured_overlap_ratio += (min(max(share, 1 / OUTLIER_RATIO), 1.0) - self.measured_overlap_ratio) * OVERLAP_ALPHA

    def overlap_ratio(self, sampler_classes: Iterable[int]) -> float:
        """The share for a step of requests of these sampling classes, all of which decode: the host is asked by some."""
        return self.measured_overlap_ratio if self.measured_overlap_ratio == 1.0 or max(sampler_classes, default=0) < FIRST_HOST_SAMPLER_CLASS else 1.0

    def draft_cost(self, drafter: str, num_pending_rows: int, num_requests: int, draft_len: int) -> float:
        """Model seconds of drafting `length` tokens for `requests` requests with so many rows to compute first."""
        return self._pass_factor * self._pass_costs[drafter].draft_seconds(num_pending_rows, num_requests, draft_len)

    def _update(self, summary: StepSummary, cost: float, seconds_by_stage: Mapping[str, float]) -> None:
        total, sampling = sum(seconds_by_stage.values()), seconds_by_stage.get("sample", 0.0)
        ratio = (total - seconds_by_stage.get("draft", 0.0)) / cost
        self._drift.update(ratio)
        rows, (before, ratio_before) = summary.shape.num_rows, self._last_step
        if before and rows != before:
            self.step_costs.learn(rows, before, ratio / ratio_before)
        self._last_step = rows, ratio
        if summary.num_draft_rows:
            ahead = self.overlap_ratio(kind for kind, rows in enumerate(summary.rows_by_sampler_class) if rows)
            needed = ahead * self.step_costs.cost_of(summary.plain_shape) * summary.num_emitted / summary.num_sampling_requests
            self.watchdog.record_speculative(total, needed)
        else:
            self.watchdog.record_plain(ratio)
        self._num_steps += 1
        if self._num_steps % SAMPLING_COST_EVERY == 0 and sampling > 0.0:
            self.sampling_costs.learn(summary.rows_by_sampler_class, sampling / self.drift)

    def _sampling_extra(self, rows_by_sampler_class: Sequence[int]) -> float:
        return sum(count * self.sampling_costs.extra_cost(kind) for kind, count in enumerate(rows_by_sampler_class) if count)
