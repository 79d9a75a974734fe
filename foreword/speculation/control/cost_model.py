"""What a step costs: measured at start by rows, and kept right by what steps really take.

All costs here are in *model seconds*: those of the machine as it was when it was calibrated. Its speed may swing twofold
afterwards; one drift factor says by how much, and cancels wherever two costs are compared.

What the controller believes about the machine, and how each step corrects it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from foreword.core.params import SamplingParams
from foreword.speculation.control.watchdog import RegressionWatchdog
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
FIRST_HOST_SAMPLER_CLASS = 3  # the first class of those that the host must sample
SAMPLING_FIXED_SHARE = (
    0.05  # of a step of one row, until measured: what sampling takes however many rows there are
)
SAMPLING_ROW_SHARES = (0.002, 0.005, 0.01, 0.02, 0.02)  # the same for one row of each sampling class
CORRECTION_ALPHA = 0.015  # of each later observation
CALIBRATION_WEIGHT = 6.0  # observations that the calibration counts for
SAMPLING_COST_ALPHA = 0.05
DRIFT_ALPHA = 0.125
OUTLIER_RATIO = 2.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """Seconds measured at start, with empty contexts and greedy sampling.

    sampled       of a whole step, without drafting, by number of rows, every row sampled; has at least one row count
    single        the same with one sampled row
    read_first    for each token of context that the first row of a request reads
    read_further  for each token of context that each further row of the same request reads
    """

    all_rows_sampled: Mapping[int, float]
    one_row_sampled: Mapping[int, float]
    context_cost_first_row: float = 0.0
    context_cost_extra_row: float = 0.0


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """All that was timed of an engine, as plain values: one that replaces it need not be timed again.

    passes  seconds of a pass by rows, of each drafter that runs a model
    """

    calibration: Calibration
    pass_seconds: Mapping[str, Mapping[int, float]]


class CostCurve:
    """Seconds by rows: linear between measured points, proportional beyond the last.

    More rows never take less. Where a measurement says so, the one of fewer rows was disturbed: what disturbs a
    measurement only ever adds to it.
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
        """Seconds of 0, 1, ..., at least `rows` rows, not to be changed; those of no rows are of one."""
        self._dense.extend(self._interpolate(n) for n in range(len(self._dense), rows + 1))
        return self._dense

    def scale(self, index: int, factor: float) -> None:
        """Correct one point; where points fall now, what is between them is noise."""
        self._points[index] *= factor
        before, self._seconds = self._seconds, _isotonic_fit(self._points)
        same = next(
            (i for i, pair in enumerate(zip(before, self._seconds, strict=True)) if pair[0] != pair[1]),
            len(before),
        )
        del self._dense[self.rows[same - 1] + 1 if same else 0 :]

    def neighbours(self, rows: int) -> tuple[int, float]:
        """(index of the last measured point that is not above, share of the next one) that make up `rows`."""
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
    """The closest sequence that never falls (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (b, m), (a, n) = pools.pop(), pools.pop()
            pools.append(((a * n + b * m) / (n + m), n + m))
    return [mean for mean, count in pools for _ in range(count)]


@dataclass(frozen=True, slots=True)
class PassCost:
    """Seconds of one pass of a drafter's model, by rows: as measured, and in between."""

    seconds: Mapping[int, float]
    curve: CostCurve

    @classmethod
    def from_seconds(cls, seconds: Mapping[int, float]) -> PassCost:
        return cls(dict(seconds), CostCurve(seconds))

    def draft_seconds(self, num_pending_rows: int, num_requests: int, draft_len: int) -> float:
        """Seconds of drafting `length` tokens for `requests` requests that must compute `backlog` rows in all first."""
        if not num_requests or not draft_len:
            return 0.0
        return self.curve.at(max(num_pending_rows, num_requests)) + (draft_len - 1) * self.curve.at(
            num_requests
        )


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computes.

    rows     of all kinds; sampled: those whose token is sampled
    context  tokens read by the first rows of all requests
    further  tokens read by their further rows
    extra    model seconds of sampling beyond greedy
    """

    num_rows: int
    num_sampled: int
    first_rows_context: int = 0
    extra_rows_context: int = 0
    sampling_extra: float = 0.0

    def with_requests(self, num_requests: int, context: int) -> StepShape:
        """With so many requests more, each of which decodes one token."""
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
        one = CostCurve(calibration.one_row_sampled or calibration.all_rows_sampled)
        self._one_sampled_curve = CostCurve({rows: one.at(rows) for rows in self._all_sampled_curve.rows})
        self._pending_corrections = [0.0] * len(self._all_sampled_curve.rows)
        self._num_observations = [CALIBRATION_WEIGHT] * len(self._all_sampled_curve.rows)

    def cost_of(self, shape: StepShape) -> float:
        seconds = (
            self._all_sampled_curve.at(shape.num_rows)
            if shape.num_sampled >= shape.num_rows
            else self._partly_sampled_cost(shape.num_rows, shape.num_sampled)
        )
        return seconds + self._fixed_cost(shape)

    def saving_per_request(self, shape: StepShape) -> float:
        """Share of a step of decoding that is saved where one request less is served."""
        if shape.num_rows < 2:
            return 0.0
        seconds = self._all_sampled_curve.at(shape.num_rows)
        return (seconds - self._all_sampled_curve.at(shape.num_rows - 1)) / seconds

    def with_extra_rows(self, shape: StepShape, num_extra: int) -> list[float]:
        """Seconds with 0, 1, ..., count further rows, all of them sampled, without what these read."""
        rows, constant = shape.num_rows, self._fixed_cost(shape)
        if shape.num_sampled >= rows:
            return [
                seconds + constant
                for seconds in self._all_sampled_curve.up_to(rows + num_extra)[rows : rows + num_extra + 1]
            ]
        return [
            self._partly_sampled_cost(rows + n, shape.num_sampled + n) + constant
            for n in range(num_extra + 1)
        ]

    def context_cost(self, context_len: int) -> float:
        """What each further row of a request takes for its context."""
        return self._calibration.context_cost_extra_row * context_len

    def _fixed_cost(self, shape: StepShape) -> float:
        """What does not depend on the number of rows."""
        known = self._calibration
        return (
            known.context_cost_first_row * shape.first_rows_context
            + known.context_cost_extra_row * shape.extra_rows_context
            + shape.sampling_extra
        )

    def _partly_sampled_cost(self, rows: int, sampled: int) -> float:
        everything = self._all_sampled_curve.at(rows)
        one = min(self._one_sampled_curve.at(rows), everything)
        return one + (everything - one) * max(sampled - 1, 0) / max(rows - 1, 1)

    def learn(self, rows: int, rows_before: int, surprise: float) -> None:
        """A step of `rows` rows took `surprise` times what a step of `before` rows just before it lets expect.

        The machine had no time to change between the two: what is wrong are the points they lie between, slowly moved
        apart. Every row was sampled.
        """
        error = math.log(min(max(surprise, 1 / OUTLIER_RATIO), OUTLIER_RATIO))
        for count, part in ((rows, error), (rows_before, -error)):
            index, share = self._all_sampled_curve.neighbours(count)
            self._observe(index, part, 1 - share)
            if share:
                self._observe(index + 1, part, share)

    def _observe(self, index: int, error: float, share: float) -> None:
        """One more observation of a measured point, of which there were few at first."""
        self._num_observations[index] += share
        self._correct(index, share * error * max(1 / self._num_observations[index], CORRECTION_ALPHA))

    def _correct(self, index: int, log_correction: float) -> None:
        """Keep a correction back until it matters: the curve is filled in again with each."""
        self._pending_corrections[index] += log_correction
        if abs(self._pending_corrections[index]) > 0.01:
            factor = math.exp(self._pending_corrections[index])
            self._pending_corrections[index] = 0.0
            self._all_sampled_curve.scale(index, factor)
            self._one_sampled_curve.scale(index, factor)


class SpeedDrift:
    """How much slower than calibrated the machine runs now: a fast average of realised by predicted seconds."""

    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 0.0

    def update(self, ratio: float) -> None:
        """Take a step in, with outliers cut."""
        if not self.factor:
            self.factor = ratio
        surprise = min(max(ratio / self.factor, 1 / OUTLIER_RATIO), OUTLIER_RATIO)
        self.factor *= 1 + DRIFT_ALPHA * (surprise - 1)


def classify_sampling(params: SamplingParams) -> int:
    """Requests of one class take about the same time to sample a row: 0 (greedy) .. 4 (with logprobs)."""
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
    """Model seconds that sampling a row takes, by sampling class, learned from the sampling stage of steps."""

    def __init__(self, step_seconds: float) -> None:
        self._fixed_cost = SAMPLING_FIXED_SHARE * step_seconds
        self._row_costs = [share * step_seconds for share in SAMPLING_ROW_SHARES]

    def extra_cost(self, sampler_class: int) -> float:
        """What a row of a class takes beyond a greedy one, which the calibration covers."""
        return max(self._row_costs[sampler_class] - self._row_costs[0], 0.0)

    def learn(self, rows_by_class: Sequence[int], seconds: float) -> None:
        """Sampling rows[kind] rows of each class took so long. Each price changes in proportion to its part of it."""
        parts = [count * price for count, price in zip(rows_by_class, self._row_costs, strict=True)]
        predicted = self._fixed_cost + sum(parts)
        surprise = (
            SAMPLING_COST_ALPHA
            * math.log(min(max(seconds / predicted, 1 / OUTLIER_RATIO), OUTLIER_RATIO))
            / predicted
        )
        self._fixed_cost *= math.exp(surprise * self._fixed_cost)
        for kind, part in enumerate(parts):
            if part:
                self._row_costs[kind] *= math.exp(surprise * part)


SAMPLING_COST_EVERY = 8  # steps between two looks at the price of sampling
PASS_COST_ALPHA = 0.05
OVERLAP_PRIOR, OVERLAP_ALPHA = 0.9, 0.125
OVERLAP_FORGOTTEN, OVERLAP_FORGET_ALPHA = (
    0.985,
    1 / 256,
)  # believed of running ahead where it does not come to it: enough to try it


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
        shape = plain = StepShape(
            rows, sampling, context, 0, self._sampling_extra(by_kind_plain) if sampler_classes else 0.0
        )
        if drafted:
            extra = self._sampling_extra(by_kind) if sampler_classes else 0.0
            shape = StepShape(rows + drafted, sampling + drafted, context, further, extra)
        return StepSummary(shape, plain, by_kind, emitted, sampling)

    def record_step(
        self, summary: StepSummary, seconds_by_stage: Mapping[str, float], predicted_draft_cost: float
    ) -> tuple[float, float]:
        """Learn from a step, in which drafters' passes should have taken `passes` model seconds.

        Returns model seconds: of the step without drafting, and of the drafting in it.
        """
        drafting = seconds_by_stage.get("draft", 0.0)
        verifying = sum(seconds_by_stage.values()) - drafting
        self.measured_overlap_ratio += (
            max(OVERLAP_FORGOTTEN - self.measured_overlap_ratio, 0.0) * OVERLAP_FORGET_ALPHA
        )
        cost = self.step_costs.cost_of(summary.shape)
        if summary.num_draft_rows:
            self.predicted_seconds += (cost + predicted_draft_cost) * self.drift
            self.realised_seconds += verifying + drafting
        if summary.is_decode_only and verifying > 0.0:
            self._update(summary, cost, seconds_by_stage)
        drafted = drafting / self.drift
        if predicted_draft_cost > 0.0 and drafted > 0.0:
            self._pass_factor *= (
                min(max(drafted / predicted_draft_cost, 1 / OUTLIER_RATIO), OUTLIER_RATIO) ** PASS_COST_ALPHA
            )
        return cost, drafted

    def enable_overlap(self) -> None:
        """It is worth finding out what running ahead saves."""
        self.measured_overlap_ratio = OVERLAP_PRIOR

    def record_overlap_step(self, summary: StepSummary, seconds_by_stage: Mapping[str, float]) -> None:
        """Learn from a step that was computed ahead."""
        share = sum(seconds_by_stage.values()) / (self.step_costs.cost_of(summary.plain_shape) * self.drift)
        self.measured_overlap_ratio += (
            min(max(share, 1 / OUTLIER_RATIO), 1.0) - self.measured_overlap_ratio
        ) * OVERLAP_ALPHA

    def overlap_ratio(self, sampler_classes: Iterable[int]) -> float:
        """The share for a step of requests of these sampling classes, all of which decode: the host is asked by some."""
        return (
            self.measured_overlap_ratio
            if self.measured_overlap_ratio == 1.0
            or max(sampler_classes, default=0) < FIRST_HOST_SAMPLER_CLASS
            else 1.0
        )

    def draft_cost(self, drafter: str, num_pending_rows: int, num_requests: int, draft_len: int) -> float:
        """Model seconds of drafting `length` tokens for `requests` requests with so many rows to compute first."""
        return self._pass_factor * self._pass_costs[drafter].draft_seconds(
            num_pending_rows, num_requests, draft_len
        )

    def _update(self, summary: StepSummary, cost: float, seconds_by_stage: Mapping[str, float]) -> None:
        total, sampling = sum(seconds_by_stage.values()), seconds_by_stage.get("sample", 0.0)
        ratio = (total - seconds_by_stage.get("draft", 0.0)) / cost
        self._drift.update(ratio)
        rows, (before, ratio_before) = summary.shape.num_rows, self._last_step
        if before and rows != before:
            self.step_costs.learn(rows, before, ratio / ratio_before)
        self._last_step = rows, ratio
        if summary.num_draft_rows:
            ahead = self.overlap_ratio(
                kind for kind, rows in enumerate(summary.rows_by_sampler_class) if rows
            )
            needed = (
                ahead
                * self.step_costs.cost_of(summary.plain_shape)
                * summary.num_emitted
                / summary.num_sampling_requests
            )
            self.watchdog.record_speculative(total, needed)
        else:
            self.watchdog.record_plain(ratio)
        self._num_steps += 1
        if self._num_steps % SAMPLING_COST_EVERY == 0 and sampling > 0.0:
            self.sampling_costs.learn(summary.rows_by_sampler_class, sampling / self.drift)

    def _sampling_extra(self, rows_by_sampler_class: Sequence[int]) -> float:
        return sum(
            count * self.sampling_costs.extra_cost(kind)
            for kind, count in enumerate(rows_by_sampler_class)
            if count
        )
