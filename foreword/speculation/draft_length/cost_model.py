"""Cost model of steps and draft passes: calibrated at start, corrected by measured steps. Imports no torch.

All costs are in *model seconds*: seconds of the machine at calibration. Its speed may later change twofold;
one drift factor follows it, and cancels wherever two costs are compared.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from foreword.core.params import SamplingParams
from foreword.speculation.draft_length.policy import RequestStep
from foreword.speculation.draft_length.regression_watchdog import RegressionWatchdog
from foreword.speculation.engine_drafter import OnePass

NUM_SAMPLER_CLASSES = 5  # greedy, noise, filtered, processed, with logprobs
SAMPLING_FIXED_SHARE = 0.05  # initial fixed cost of sampling, in steps of one row
SAMPLING_ROW_SHARES = (0.002, 0.005, 0.01, 0.02, 0.02)  # initial cost per row by sampler class, likewise
# Variances of logarithms: of a calibrated point, of its change from step to step, of the machine's speed
# since the last step, and of one step.
POINT_VARIANCE, POINT_DRIFT_VARIANCE, SPEED_VARIANCE, STEP_VARIANCE = 0.1, 2e-4, 5e-3, 0.02
FIRST_SPEED_VARIANCE = 0.5  # the machine was quiet or busy when it was calibrated
MIN_CORRECTION = 0.01
MAX_SURPRISE = 3.0  # larger ones are clipped
SAMPLING_COST_ALPHA = 0.05
OUTLIER_RATIO = 2.0  # larger deviations are clipped
SAMPLING_COST_EVERY = 8  # steps between updates of the sampling cost
PASS_COST_ALPHA = 0.05
OVERLAP_PRIOR, PLAIN_RATIO_ALPHA = 0.9, 0.25
PLAIN_RATIO_FORGOTTEN, PLAIN_RATIO_FORGET_ALPHA = 0.985, 1 / 1024  # until it is worth trying again


@dataclass(frozen=True, slots=True)
class Calibration:
    """Seconds of steps without drafting, measured at start with empty contexts and greedy sampling."""

    all_rows_sampled: Mapping[int, float]  # by number of rows, at least one
    one_row_sampled: Mapping[int, float]  # by number of rows
    context_cost_first_row: float = 0.0  # per token that the first row of a request reads
    context_cost_extra_row: float = 0.0  # per token that each further row reads
    request_cost: float = 0.0  # per request beyond the first, in addition to its rows


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """All timings of an engine, as plain values: a restarted engine uses them again."""

    calibration: Calibration
    pass_seconds: Mapping[str, Mapping[int, float]]  # by model-based drafter and number of rows
    one_pass: Mapping[str, OnePass] = field(default_factory=dict)  # by drafter, if it drafts so


class CostCurve:
    """Seconds by rows: linear between measured points, proportional after the last.

    More rows never take less, and never more per row, since they share the weights read. So a point that
    noise disturbed is bounded by its neighbours, and a correction reaches sizes that are never tried.
    """

    def __init__(self, points: Mapping[int, float]) -> None:
        assert points and all(rows > 0 and seconds > 0 for rows, seconds in points.items())
        self.rows = sorted(points)
        least = list(accumulate((points[rows] for rows in reversed(self.rows)), min))[::-1]  # noise only adds
        per_row = accumulate((seconds / rows for rows, seconds in zip(self.rows, least, strict=True)), min)
        self._points = [rows * seconds for rows, seconds in zip(self.rows, per_row, strict=True)]
        self._weights = [1.0] * len(self.rows)
        self._seconds = list(self._points)
        self._dense: list[float] = []
        self.up_to(self.rows[-1])

    def at(self, rows: int) -> float:
        dense = self._dense
        return dense[rows] if rows < len(dense) else self.up_to(rows)[rows]

    def up_to(self, rows: int) -> list[float]:
        """Seconds of 0, 1, ..., at least `rows` rows, read-only; 0 rows cost as much as one."""
        dense = self._dense
        if not dense:
            dense += [self._seconds[0]] * (self.rows[0] + 1)
            for (low, least), (high, most) in pairwise(zip(self.rows, self._seconds, strict=True)):
                slope = (most - least) / (high - low)
                dense += [least + slope * n for n in range(1, high - low + 1)]
        if rows >= len(dense):
            per_row = self._seconds[-1] / self.rows[-1]
            dense += [per_row * n for n in range(len(dense), rows + 1)]
        return dense

    def scale(self, index: int, factor: float, weight: float = 1.0) -> None:
        """Correct one point, known from `weight` observations, and keep the shape of the curve."""
        self._points[index] *= factor
        self._weights[index] = weight
        self._seconds = _fit_shape(self.rows, self._points, self._weights)
        self._dense.clear()

    def neighbours(self, rows: int) -> tuple[int, float]:
        """(index of the last measured point at or below `rows`, weight of the next point)."""
        if rows <= self.rows[0] or rows >= self.rows[-1]:
            return (0 if rows <= self.rows[0] else len(self.rows) - 1), 0.0
        index = bisect_right(self.rows, rows) - 1
        low, high = self.rows[index], self.rows[index + 1]
        return index, (rows - low) / (high - low)

    def nearest(self, rows: int) -> int:
        """Index of the nearest measured point."""
        index, share = self.neighbours(rows)
        return index + (share >= 0.5)


def _fit_shape(rows: Sequence[int], seconds: Sequence[float], weights: Sequence[float]) -> list[float]:
    """About the closest seconds that do not decrease with the rows, and do not increase per row."""
    rising = _isotonic_fit(seconds, weights)
    falling = [-value / count for value, count in zip(rising, rows, strict=True)]
    per_row = _isotonic_fit(falling, weights)
    return list(accumulate((-value * count for value, count in zip(per_row, rows, strict=True)), max))


def _isotonic_fit(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The closest non-decreasing sequence (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, values
    for value, weight in zip(values, weights, strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (b, v, m), (a, u, n) = pools.pop(), pools.pop()
            pools.append(((a * u + b * v) / (u + v), u + v, n + m))
    return [mean for mean, _, count in pools for _ in range(count)]


@dataclass(frozen=True, slots=True)
class PassCost:
    """Seconds of one pass of a draft model."""

    seconds: Mapping[int, float]  # measured, by rows
    curve: CostCurve
    one_pass: OnePass | None = None

    @classmethod
    def from_seconds(cls, seconds: Mapping[int, float], one_pass: OnePass | None = None) -> PassCost:
        return cls(dict(seconds), CostCurve(seconds), one_pass)

    @classmethod
    def by_drafter(
        cls, seconds: Mapping[str, Mapping[int, float]], one_pass: Mapping[str, OnePass]
    ) -> dict[str, PassCost]:
        return {name: cls.from_seconds(each, one_pass.get(name)) for name, each in seconds.items()}

    def draft_seconds(self, num_pending_rows: int, num_requests: int, draft_len: int) -> float:
        """Seconds of drafting `draft_len` tokens for all requests, with `num_pending_rows` in total."""
        if not num_requests or not draft_len:
            return 0.0
        if self.one_pass is not None:  # a pending row of each request drafts its first token
            drafted = num_requests * (draft_len - 1 + self.one_pass.extra_rows)
            return self.curve.at(num_pending_rows + drafted)
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
    num_requests: int = 1


class StepCosts:
    """Model seconds of a step."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._all_sampled_curve = CostCurve(calibration.all_rows_sampled)
        one_sampled = CostCurve(calibration.one_row_sampled or calibration.all_rows_sampled)
        points = {rows: one_sampled.at(rows) for rows in self._all_sampled_curve.rows}
        self._one_sampled_curve = CostCurve(points)
        self._pending_corrections = [0.0] * len(self._all_sampled_curve.rows)  # small ones are kept back
        self._variances = [POINT_VARIANCE] * len(self._all_sampled_curve.rows)

    def cost_of(self, shape: StepShape) -> float:
        if shape.num_sampled >= shape.num_rows:
            return self._all_sampled_curve.at(shape.num_rows) + self._fixed_cost(shape)
        return self._partly_sampled_cost(shape.num_rows, shape.num_sampled) + self._fixed_cost(shape)

    def with_extra_rows(self, shape: StepShape, num_extra: int) -> list[float]:
        """Cost with 0, 1, ..., num_extra more sampled rows, without the cost of their context."""
        rows, fixed = shape.num_rows, self._fixed_cost(shape)
        if shape.num_sampled >= rows:
            dense = self._all_sampled_curve.up_to(rows + num_extra)
            return [seconds + fixed for seconds in dense[rows : rows + num_extra + 1]]
        last = rows + num_extra
        all_sampled = self._all_sampled_curve.up_to(last)[rows : last + 1]
        one_sampled = map(min, self._one_sampled_curve.up_to(last)[rows : last + 1], all_sampled)
        unsampled = rows - max(shape.num_sampled, 1)
        # as _partly_sampled_cost(): (sampled - 1) / (rows - 1) = 1 - unsampled / (rows - 1)
        return [
            most - (most - least) * unsampled / (count - 1) + fixed
            for count, least, most in zip(range(rows, last + 1), one_sampled, all_sampled, strict=True)
        ]

    def min_row_cost(self, rows: int, further: Sequence[int]) -> float:
        """The least cost of a further row beyond `rows`, on average over some numbers of `further` rows."""
        dense = self._all_sampled_curve.up_to(rows + further[-1])
        return min((dense[rows + count] - dense[rows]) / count for count in further)

    def context_cost(self, context_len: int) -> float:
        """Attention cost of each further row of a request."""
        return self._calibration.context_cost_extra_row * context_len

    def _fixed_cost(self, shape: StepShape) -> float:
        """The part that does not depend on the number of rows."""
        calibration = self._calibration
        context = calibration.context_cost_first_row * shape.first_rows_context
        context += calibration.context_cost_extra_row * shape.extra_rows_context
        return context + calibration.request_cost * (shape.num_requests - 1) + shape.sampling_extra

    def _partly_sampled_cost(self, rows: int, sampled: int) -> float:
        all_sampled = self._all_sampled_curve.at(rows)
        one_sampled = min(self._one_sampled_curve.at(rows), all_sampled)
        return one_sampled + (all_sampled - one_sampled) * max(sampled - 1, 0) / max(rows - 1, 1)

    def correct(self, rows: int, log_error: float, speed_variance: float) -> float:
        """A step of `rows` rows, all sampled, took exp(log_error) times its cost: a Kalman filter's update.

        Attributes the error to the point of this size or to the machine's speed, by their variances: a new
        size learns at once, a known one hardly changes. Returns the share of the speed.
        """
        index = self._all_sampled_curve.nearest(rows)
        variance = self._variances[index]
        total = variance + speed_variance + STEP_VARIANCE
        self._variances[index] = variance * (1.0 - variance / total) + POINT_DRIFT_VARIANCE
        self._pending_corrections[index] += log_error * variance / total
        if abs(self._pending_corrections[index]) > MIN_CORRECTION:
            factor, weight = math.exp(self._pending_corrections[index]), 1.0 / self._variances[index]
            self._pending_corrections[index] = 0.0
            self._all_sampled_curve.scale(index, factor, weight)
            self._one_sampled_curve.scale(index, factor, weight)
        return speed_variance / total


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
    plain_shape: StepShape  # the same without the draft rows
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
        self.predicted_seconds = self.realised_seconds = 0.0  # steps with drafts, drafting included
        self.plain_seconds = 0.0  # plain decoding for the same tokens
        self.measured_plain_ratio = 1.0  # cost of a plain step without proposing, as a share
        self._pass_costs = dict(pass_costs)
        self.drift = 1.0  # seconds per model second
        self._speed_variance = FIRST_SPEED_VARIANCE
        self._pass_factor = 1.0
        self._num_steps = 0

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
        count = len(requests)
        shape = plain = StepShape(rows, sampling, context, 0, extra, count)
        if drafted:
            extra = self._sampling_extra(by_class) if sampler_classes else 0.0
            shape = StepShape(rows + drafted, sampling + drafted, context, extra_context, extra, count)
        return StepSummary(shape, plain, by_class, emitted, sampling)

    def record_step(
        self,
        summary: StepSummary,
        seconds_by_stage: Mapping[str, float],
        predicted_draft_cost: float,
        proposal_cost: float = 0.0,
        is_planned: bool = False,
    ) -> tuple[float, float]:
        """Learn from a step whose draft passes were predicted to cost `predicted_draft_cost`.

        proposal_cost  measured cost of all other drafters, a part of the drafting
        is_planned     its draft passes were to pay, which counts even if no draft is verified
        Returns model seconds: of the step without drafting, and of the drafting.
        """
        drafting = seconds_by_stage.get("draft", 0.0)
        verifying = sum(seconds_by_stage.values()) - drafting
        forgotten = max(PLAIN_RATIO_FORGOTTEN - self.measured_plain_ratio, 0.0)
        self.measured_plain_ratio += forgotten * PLAIN_RATIO_FORGET_ALPHA
        cost = self.step_costs.cost_of(summary.shape)
        is_speculative = is_planned or summary.num_draft_rows > 0
        if is_speculative:
            self.predicted_seconds += (cost + predicted_draft_cost + proposal_cost) * self.drift
            self.realised_seconds += verifying + drafting
            self.plain_seconds += self._plain_cost_of_tokens(summary) * self.drift
        if summary.is_decode_only and verifying > 0.0:
            self._update(summary, cost, seconds_by_stage, is_speculative)
        drafted = drafting / self.drift
        passes = drafted - proposal_cost
        if predicted_draft_cost > 0.0 and passes > 0.0:
            surprise = min(max(passes / predicted_draft_cost, 1 / OUTLIER_RATIO), OUTLIER_RATIO)
            self._pass_factor *= surprise**PASS_COST_ALPHA
        return cost, drafted

    def enable_overlap(self) -> None:
        """Overlap is available: assume a saving that is worth measuring."""
        self.measured_plain_ratio = OVERLAP_PRIOR

    def record_plain_step(self, summary: StepSummary, seconds_by_stage: Mapping[str, float]) -> None:
        """Learn from a step in a row without proposing: on a CPU it finds warm caches."""
        ratio = sum(seconds_by_stage.values()) / (self.step_costs.cost_of(summary.plain_shape) * self.drift)
        error = min(max(ratio, 1 / OUTLIER_RATIO), OUTLIER_RATIO) - self.measured_plain_ratio
        self.measured_plain_ratio += error * PLAIN_RATIO_ALPHA
        self.watchdog.record_sample()

    def plain_ratio(self, has_prefill: bool) -> float:
        """Cost ratio of a step without proposing: it has warm caches, or overlaps unless it has prefill."""
        return 1.0 if has_prefill else min(self.measured_plain_ratio, 1.0)

    def plain_cost(self, shape: StepShape, has_prefill: bool) -> float:
        """Cost of a step in plain decoding."""
        return self.plain_ratio(has_prefill) * self.step_costs.cost_of(shape)

    def decode_cost(self, num_requests: int) -> float:
        """Cost of a step in which these requests decode one token each."""
        shape = StepShape(num_requests, num_requests, num_requests=num_requests)
        return self.step_costs.cost_of(shape)

    def max_draft_len(self, drafter: str) -> float:
        """Longest draft that the drafter makes, whatever a request takes."""
        one_pass = self._pass_costs[drafter].one_pass
        return math.inf if one_pass is None else one_pass.max_tokens

    def draft_cost(self, drafter: str, num_pending_rows: int, num_requests: int, draft_len: int) -> float:
        """Model seconds of PassCost.draft_seconds()."""
        seconds = self._pass_costs[drafter].draft_seconds(num_pending_rows, num_requests, draft_len)
        return self._pass_factor * seconds

    def _update(
        self,
        summary: StepSummary,
        cost: float,
        seconds_by_stage: Mapping[str, float],
        is_speculative: bool,
    ) -> None:
        total, sampling = sum(seconds_by_stage.values()), seconds_by_stage.get("sample", 0.0)
        ratio = (total - seconds_by_stage.get("draft", 0.0)) / cost
        error = math.log(min(max(ratio / self.drift, 1 / MAX_SURPRISE), MAX_SURPRISE))
        share = self.step_costs.correct(summary.shape.num_rows, error, self._speed_variance)
        self.drift *= math.exp(error * share)
        self._speed_variance = self._speed_variance * (1.0 - share) + SPEED_VARIANCE
        if is_speculative:
            self.watchdog.record_speculative(total, self._plain_cost_of_tokens(summary))
        else:
            self.watchdog.record_plain(ratio)
        self._num_steps += 1
        if self._num_steps % SAMPLING_COST_EVERY == 0 and sampling > 0.0:
            self.sampling_costs.learn(summary.rows_by_sampler_class, sampling / self.drift)

    def _plain_cost_of_tokens(self, summary: StepSummary) -> float:
        """Model seconds of plain decoding for the tokens of a step."""
        cost, count = self.step_costs.cost_of(summary.plain_shape), summary.num_sampling_requests
        if summary.is_decode_only:
            return self.plain_ratio(False) * cost * summary.num_emitted / count
        if not count:  # a prompt's chunk; the requests that drafted were preempted
            return cost
        return cost + self.decode_cost(count) * (summary.num_emitted - count) / count

    def _sampling_extra(self, rows_by_sampler_class: Sequence[int]) -> float:
        return sum(
            count * self.sampling_costs.extra_cost(sampler_class)
            for sampler_class, count in enumerate(rows_by_sampler_class)
            if count
        )
