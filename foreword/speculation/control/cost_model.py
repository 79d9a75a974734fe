"""Cost model of steps and draft passes: calibrated at start, corrected by measured steps.

All costs are in *model seconds*: seconds of the machine at calibration. Its speed may later change twofold;
one drift factor follows it, and cancels wherever two costs are compared.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from foreword.core.params import SamplingParams
from foreword.speculation.control.watchdog import RegressionWatchdog

if TYPE_CHECKING:  # the API process imports this module, and must not import torch
    from foreword.speculation.policy import RequestStep

__all__ = [
    "FIRST_HOST_SAMPLER_CLASS",
    "Calibration",
    "CostCurve",
    "CostModel",
    "MeasuredCosts",
    "PassCost",
    "SamplingCosts",
    "SpeedDrift",
    "StepCosts",
    "StepShape",
    "StepSummary",
    "classify_sampling",
]

NUM_SAMPLER_CLASSES = 5  # greedy, noise, filtered, processed, with logprobs
FIRST_HOST_SAMPLER_CLASS = 3  # this and higher classes are sampled on the host
SAMPLING_FIXED_SHARE = 0.05  # initial fixed cost of sampling, in steps of one row
SAMPLING_ROW_SHARES = (0.002, 0.005, 0.01, 0.02, 0.02)  # initial cost per row by sampler class, likewise
CORRECTION_ALPHA = 0.015  # least weight of an observation
CALIBRATION_WEIGHT = 6.0  # of the calibration, in observations
SAMPLING_COST_ALPHA = 0.05
DRIFT_ALPHA = 0.125
OUTLIER_RATIO = 2.0  # larger deviations are clipped
SAMPLING_COST_EVERY = 8  # steps between updates of the sampling cost
PASS_COST_ALPHA = 0.05
OVERLAP_PRIOR, OVERLAP_ALPHA = 0.9, 0.125
OVERLAP_FORGOTTEN, OVERLAP_FORGET_ALPHA = 0.985, 1 / 256  # without overlap steps: enough to try them again


@dataclass(frozen=True, slots=True)
class Calibration:
    """Seconds of steps without drafting, measured at start with empty contexts and greedy sampling."""

    all_rows_sampled: Mapping[int, float]  # by number of rows, at least one
    one_row_sampled: Mapping[int, float]  # by number of rows
    context_cost_first_row: float = 0.0  # per token that the first row of a request reads
    context_cost_extra_row: float = 0.0  # per token that each further row reads


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """All timings of an engine, as plain values: a restarted engine uses them again."""

    calibration: Calibration
    pass_seconds: Mapping[str, Mapping[int, float]]  # by model-based drafter and number of rows


class CostCurve:
    """Seconds by rows: linear between measured points, proportional after the last.

    More rows never take less. Noise only adds time, so a point above one of more rows is lowered to it.
    """

    def __init__(self, points: Mapping[int, float]) -> None:
        assert points and all(rows > 0 and seconds > 0 for rows, seconds in points.items())
        self.rows = sorted(points)
        least = list(accumulate((points[rows] for rows in reversed(self.rows)), min))
        self._points = least[::-1]
        self._seconds = list(self._points)
        self._dense: list[float] = []
        self.up_to(self.rows[-1])

    def at(self, rows: int) -> float:
        dense = self._dense
        return dense[rows] if rows < len(dense) else self.up_to(rows)[rows]

    def up_to(self, rows: int) -> list[float]:
        """Seconds of 0, 1, ..., at least `rows` rows, read-only; 0 rows cost as much as one."""
        self._dense.extend(self._interpolate(n) for n in range(len(self._dense), rows + 1))
        return self._dense

    def scale(self, index: int, factor: float) -> None:
        """Correct one point, and keep the curve monotonic."""
        self._points[index] *= factor
        previous, self._seconds = self._seconds, _isotonic_fit(self._points)
        changed = (i for i, (old, new) in enumerate(zip(previous, self._seconds, strict=True)) if old != new)
        num_same = next(changed, len(previous))
        del self._dense[self.rows[num_same - 1] + 1 if num_same else 0 :]

    def neighbours(self, rows: int) -> tuple[int, float]:
        """(index of the last measured point at or below `rows`, weight of the next point)."""
        if rows <= self.rows[0] or rows >= self.rows[-1]:
            return (0 if rows <= self.rows[0] else len(self.rows) - 1), 0.0
        index = bisect_right(self.rows, rows) - 1
        low, high = self.rows[index], self.rows[index + 1]
        return index, (rows - low) / (high - low)

    def _interpolate(self, rows: int) -> float:
        index, share = self.neighbours(rows)
        seconds = self._seconds[index]
        if share:
            return seconds + (self._seconds[index + 1] - seconds) * share
        return seconds * max(rows / self.rows[index], 1.0)


def _isotonic_fit(values: Sequence[float]) -> list[float]:
    """The closest non-decreasing sequence (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (b, m), (a, n) = pools.pop(), pools.pop()
            pools.append(((a * n + b * m) / (n + m), n + m))
    return [mean for mean, count in pools for _ in range(count)]


@dataclass(frozen=True, slots=True)
class PassCost:
    """Seconds of one pass of a draft model."""

    seconds: Mapping[int, float]  # measured, by rows
    curve: CostCurve

    @classmethod
    def from_seconds(cls, seconds: Mapping[int, float]) -> PassCost:
        return cls(dict(seconds), CostCurve(seconds))

    def draft_seconds(self, num_pending_rows: int, num_requests: int, draft_len: int) -> float:
        """Seconds of drafting `draft_len` tokens for all requests, with `num_pending_rows` in total."""
        if not num_requests or not draft_len:
            return 0.0
        first_pass = self.curve.at(max(num_pending_rows, num_requests))
        return first_pass + (draft_len - 1) * self.curve.at(num_requests)


@dataclass(frozen=True, slots=True)
class StepShape:
    """The work of a step."""

    num_rows: int
    num_sampled: int
    first_rows_context: int = 0  # tokens read by the first rows of all requests
    extra_rows_context: int = 0  # tokens read by their further rows
    sampling_extra: float = 0.0  # model seconds of sampling beyond greedy

    def with_requests(self, num_requests: int, context: int) -> StepShape:
        """With `num_requests` more requests that decode one token each."""
        return replace(
            self,
            num_rows=self.num_rows + num_requests,
            num_sampled=self.num_sampled + num_requests,
            first_rows_context=self.first_rows_context + context,
        )


class StepCosts:
    """Model seconds of a step."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._all_sampled_curve = CostCurve(calibration.all_rows_sampled)
        one_sampled = CostCurve(calibration.one_row_sampled or calibration.all_rows_sampled)
        points = {rows: one_sampled.at(rows) for rows in self._all_sampled_curve.rows}
        self._one_sampled_curve = CostCurve(points)
        self._pending_corrections = [0.0] * len(self._all_sampled_curve.rows)
        self._num_observations = [CALIBRATION_WEIGHT] * len(self._all_sampled_curve.rows)

    def cost_of(self, shape: StepShape) -> float:
        if shape.num_sampled >= shape.num_rows:
            return self._all_sampled_curve.at(shape.num_rows) + self._fixed_cost(shape)
        return self._partly_sampled_cost(shape.num_rows, shape.num_sampled) + self._fixed_cost(shape)

    def saving_per_request(self, shape: StepShape) -> float:
        """Share of a decoding step that is saved with one request less."""
        if shape.num_rows < 2:
            return 0.0
        seconds = self._all_sampled_curve.at(shape.num_rows)
        return (seconds - self._all_sampled_curve.at(shape.num_rows - 1)) / seconds

    def with_extra_rows(self, shape: StepShape, num_extra: int) -> list[float]:
        """Cost with 0, 1, ..., num_extra more sampled rows, without the cost of their context."""
        rows, fixed = shape.num_rows, self._fixed_cost(shape)
        if shape.num_sampled >= rows:
            dense = self._all_sampled_curve.up_to(rows + num_extra)
            return [seconds + fixed for seconds in dense[rows : rows + num_extra + 1]]
        return [
            self._partly_sampled_cost(rows + n, shape.num_sampled + n) + fixed for n in range(num_extra + 1)
        ]

    def context_cost(self, context_len: int) -> float:
        """Attention cost of each further row of a request."""
        return self._calibration.context_cost_extra_row * context_len

    def _fixed_cost(self, shape: StepShape) -> float:
        """The part that does not depend on the number of rows."""
        first, extra = self._calibration.context_cost_first_row, self._calibration.context_cost_extra_row
        return first * shape.first_rows_context + extra * shape.extra_rows_context + shape.sampling_extra

    def _partly_sampled_cost(self, rows: int, sampled: int) -> float:
        all_sampled = self._all_sampled_curve.at(rows)
        one_sampled = min(self._one_sampled_curve.at(rows), all_sampled)
        return one_sampled + (all_sampled - one_sampled) * max(sampled - 1, 0) / max(rows - 1, 1)

    def learn(self, rows: int, rows_before: int, surprise: float) -> None:
        """A step took `surprise` times the cost predicted from the previous one, of `rows_before` rows.

        The drift cannot change in between, so the points around both are moved apart. All rows were sampled.
        """
        error = math.log(min(max(surprise, 1 / OUTLIER_RATIO), OUTLIER_RATIO))
        for count, log_error in ((rows, error), (rows_before, -error)):
            index, weight = self._all_sampled_curve.neighbours(count)
            self._observe(index, log_error, 1 - weight)
            if weight:
                self._observe(index + 1, log_error, weight)

    def _observe(self, index: int, log_error: float, weight: float) -> None:
        """Correct a measured point; small corrections are kept back, since each rebuilds the curve."""
        self._num_observations[index] += weight
        alpha = max(1 / self._num_observations[index], CORRECTION_ALPHA)
        self._pending_corrections[index] += weight * log_error * alpha
        if abs(self._pending_corrections[index]) > 0.01:
            factor = math.exp(self._pending_corrections[index])
            self._pending_corrections[index] = 0.0
            self._all_sampled_curve.scale(index, factor)
            self._one_sampled_curve.scale(index, factor)


class SpeedDrift:
    """Slowdown of the machine since calibration: a fast average of measured / predicted seconds."""

    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 0.0

    def update(self, ratio: float) -> None:
        """Learn from a step, with outliers clipped."""
        if not self.factor:
            self.factor = ratio
        surprise = min(max(ratio / self.factor, 1 / OUTLIER_RATIO), OUTLIER_RATIO)
        self.factor *= 1 + DRIFT_ALPHA * (surprise - 1)


def classify_sampling(params: SamplingParams) -> int:
    """Class of requests with about the same sampling cost per row: 0 (greedy) .. 4 (with logprobs)."""
    if params.logprobs is not None:
        return 4
    if params.structured is not None:
        return 3
    if params.allowed_token_ids is not None or params.logit_bias or params.bad_words or params.min_tokens:
        return 3
    if (
        params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or params.uses_dry
    ):
        return 3
    if params.greedy:
        return 0
    if params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0:
        return 2
    return 2 if params.typical_p < 1.0 or params.top_n_sigma > 0.0 or params.xtc_probability > 0.0 else 1


class SamplingCosts:
    """Model seconds of sampling a row, by sampler class, learned from the sampling stage of steps."""

    def __init__(self, step_seconds: float) -> None:
        self._fixed_cost = SAMPLING_FIXED_SHARE * step_seconds
        self._row_costs = [share * step_seconds for share in SAMPLING_ROW_SHARES]

    def extra_cost(self, sampler_class: int) -> float:
        """Cost of a row beyond that of a greedy one, which the calibration includes."""
        return max(self._row_costs[sampler_class] - self._row_costs[0], 0.0)

    def learn(self, rows_by_class: Sequence[int], seconds: float) -> None:
        """Sampling `rows_by_class` took `seconds`; each cost changes in proportion to its share."""
        costs = [count * cost for count, cost in zip(rows_by_class, self._row_costs, strict=True)]
        predicted = self._fixed_cost + sum(costs)
        log_ratio = math.log(min(max(seconds / predicted, 1 / OUTLIER_RATIO), OUTLIER_RATIO))
        correction = SAMPLING_COST_ALPHA * log_ratio / predicted
        self._fixed_cost *= math.exp(correction * self._fixed_cost)
        for sampler_class, cost in enumerate(costs):
            if cost:
                self._row_costs[sampler_class] *= math.exp(correction * cost)


@dataclass(frozen=True, slots=True)
class StepSummary:
    """A completed step, with and without its drafts."""

    shape: StepShape
    plain_shape: StepShape  # without the draft rows
    rows_by_sampler_class: Sequence[int]
    num_emitted: int
    num_sampling_requests: int

    @property
    def num_draft_rows(self) -> int:
        return self.shape.num_rows - self.plain_shape.num_rows

    @property
    def is_decode_only(self) -> bool:
        """No prefill: each row was sampled."""
        return self.shape.num_sampled == self.shape.num_rows


class CostModel:
    """Costs of steps and draft passes in model seconds, corrected by measurements."""

    def __init__(self, calibration: Calibration, pass_costs: Mapping[str, PassCost]) -> None:
        self.step_costs = StepCosts(calibration)
        self.sampling_costs = SamplingCosts(self.step_costs.cost_of(StepShape(1, 1)))
        self.watchdog = RegressionWatchdog()
        self.predicted_seconds = self.realised_seconds = 0.0  # of steps with drafts, drafting included
        self.measured_overlap_ratio = 1.0  # cost of a plain step that overlaps with the host, as a share
        self._pass_costs = dict(pass_costs)
        self._drift = SpeedDrift()
        self._pass_factor = 1.0
        self._last_step = (0, 1.0)  # rows of the last decoding step, and its measured / predicted cost
        self._num_steps = 0

    @property
    def drift(self) -> float:
        """Seconds per model second."""
        return self._drift.factor or 1.0

    def summarize(self, requests: Sequence[RequestStep], sampler_classes: Mapping[str, int]) -> StepSummary:
        """Sum up a step; `sampler_classes` are those of requests that are not greedy."""
        rows = drafted = extra_context = context = emitted = sampling = 0
        by_class, plain_by_class = [0] * NUM_SAMPLER_CLASSES, [0] * NUM_SAMPLER_CLASSES
        for request in requests:
            draft = request.num_draft_tokens
            rows += request.num_tokens
            context += request.context_len - draft
            if draft:
                drafted += draft
                extra_context += draft * request.context_len
            if request.is_sampled:
                sampling += 1
                emitted += request.num_emitted
                sampler_class = sampler_classes.get(request.state.id, 0) if sampler_classes else 0
                by_class[sampler_class] += 1 + draft
                plain_by_class[sampler_class] += 1
        extra = self._sampling_extra(plain_by_class) if sampler_classes else 0.0
        shape = plain = StepShape(rows, sampling, context, 0, extra)
        if drafted:
            extra = self._sampling_extra(by_class) if sampler_classes else 0.0
            shape = StepShape(rows + drafted, sampling + drafted, context, extra_context, extra)
        return StepSummary(shape, plain, by_class, emitted, sampling)

    def record_step(
        self,
        summary: StepSummary,
        seconds_by_stage: Mapping[str, float],
        predicted_draft_cost: float,
        plugin_cost: float = 0.0,
    ) -> tuple[float, float]:
        """Learn from a step whose draft passes were predicted to cost `predicted_draft_cost`.

        plugin_cost  measured cost of plugged-in drafters, a part of the drafting
        Returns model seconds: of the step without drafting, and of the drafting.
        """
        drafting = seconds_by_stage.get("draft", 0.0)
        verifying = sum(seconds_by_stage.values()) - drafting
        forgotten = max(OVERLAP_FORGOTTEN - self.measured_overlap_ratio, 0.0)
        self.measured_overlap_ratio += forgotten * OVERLAP_FORGET_ALPHA
        cost = self.step_costs.cost_of(summary.shape)
        if summary.num_draft_rows:
            self.predicted_seconds += (cost + predicted_draft_cost + plugin_cost) * self.drift
            self.realised_seconds += verifying + drafting
        if summary.is_decode_only and verifying > 0.0:
            self._update(summary, cost, seconds_by_stage)
        drafted = drafting / self.drift
        passes = drafted - plugin_cost
        if predicted_draft_cost > 0.0 and passes > 0.0:
            surprise = min(max(passes / predicted_draft_cost, 1 / OUTLIER_RATIO), OUTLIER_RATIO)
            self._pass_factor *= surprise**PASS_COST_ALPHA
        return cost, drafted

    def enable_overlap(self) -> None:
        """Overlap is available: assume a saving that is worth measuring."""
        self.measured_overlap_ratio = OVERLAP_PRIOR

    def record_overlap_step(self, summary: StepSummary, seconds_by_stage: Mapping[str, float]) -> None:
        """Learn from a step that overlapped with the host."""
        ratio = sum(seconds_by_stage.values()) / (self.step_costs.cost_of(summary.plain_shape) * self.drift)
        error = min(max(ratio, 1 / OUTLIER_RATIO), 1.0) - self.measured_overlap_ratio
        self.measured_overlap_ratio += error * OVERLAP_ALPHA

    def overlap_ratio(self, sampler_classes: Iterable[int]) -> float:
        """Cost ratio of an overlapped decoding step; 1 if a request must be sampled on the host."""
        ratio = self.measured_overlap_ratio
        if ratio == 1.0 or max(sampler_classes, default=0) < FIRST_HOST_SAMPLER_CLASS:
            return ratio
        return 1.0

    def draft_cost(self, drafter: str, num_pending_rows: int, num_requests: int, draft_len: int) -> float:
        """Model seconds of PassCost.draft_seconds()."""
        seconds = self._pass_costs[drafter].draft_seconds(num_pending_rows, num_requests, draft_len)
        return self._pass_factor * seconds

    def _update(self, summary: StepSummary, cost: float, seconds_by_stage: Mapping[str, float]) -> None:
        total, sampling = sum(seconds_by_stage.values()), seconds_by_stage.get("sample", 0.0)
        ratio = (total - seconds_by_stage.get("draft", 0.0)) / cost
        self._drift.update(ratio)
        rows, (last_rows, last_ratio) = summary.shape.num_rows, self._last_step
        if last_rows and rows != last_rows:
            self.step_costs.learn(rows, last_rows, ratio / last_ratio)
        self._last_step = rows, ratio
        if summary.num_draft_rows:
            used = (number for number, count in enumerate(summary.rows_by_sampler_class) if count)
            step_cost = self.overlap_ratio(used) * self.step_costs.cost_of(summary.plain_shape)
            plain_cost = step_cost * summary.num_emitted / summary.num_sampling_requests
            self.watchdog.record_speculative(total, plain_cost)
        else:
            self.watchdog.record_plain(ratio)
        self._num_steps += 1
        if self._num_steps % SAMPLING_COST_EVERY == 0 and sampling > 0.0:
            self.sampling_costs.learn(summary.rows_by_sampler_class, sampling / self.drift)

    def _sampling_extra(self, rows_by_sampler_class: Sequence[int]) -> float:
        return sum(
            count * self.sampling_costs.extra_cost(sampler_class)
            for sampler_class, count in enumerate(rows_by_sampler_class)
            if count
        )
