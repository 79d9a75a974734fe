"""What a step costs: measured at start by rows, and kept right by what steps really take.

All costs here are in *model seconds*: those of the machine as it was when it was calibrated. Its speed may swing twofold
afterwards; one drift factor says by how much, and cancels wherever two costs are compared.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from foreword.core.params import SamplingParams

__all__ = [
    "FIRST_HOST_SAMPLER_CLASS",
    "Calibration",
    "CostCurve",
    "SpeedDrift",
    "PassCost",
    "SamplingCosts",
    "StepShape",
    "StepCosts",
    "MeasuredCosts",
    "classify_sampling",
]

NUM_SAMPLER_CLASSES = 5  # greedy, noise, filtered, processed, with logprobs
FIRST_HOST_SAMPLER_CLASS = 3  # the first class of those that the host must sample
SAMPLING_FIXED_SHARE = 0.05  # of a step of one row, until measured: what sampling takes however many rows there are
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
        same = next((i for i, pair in enumerate(zip(before, self._seconds, strict=True)) if pair[0] != pair[1]), len(before))
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
        return self.curve.at(max(num_pending_rows, num_requests)) + (draft_len - 1) * self.curve.at(num_requests)


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
        return replace(self, num_rows=self.num_rows + num_requests, num_sampled=self.num_sampled + num_requests, first_rows_context=self.first_rows_context + context)


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
        seconds = self._all_sampled_curve.at(shape.num_rows) if shape.num_sampled >= shape.num_rows else self._partly_sampled_cost(shape.num_rows, shape.num_sampled)
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
            return [seconds + constant for seconds in self._all_sampled_curve.up_to(rows + num_extra)[rows : rows + num_extra + 1]]
        return [self._partly_sampled_cost(rows + n, shape.num_sampled + n) + constant for n in range(num_extra + 1)]

    def context_cost(self, context_len: int) -> float:
        """What each further row of a request takes for its context."""
        return self._calibration.context_cost_extra_row * context_len

    def _fixed_cost(self, shape: StepShape) -> float:
        """What does not depend on the number of rows."""
        known = self._calibration
        return known.context_cost_first_row * shape.first_rows_context + known.context_cost_extra_row * shape.extra_rows_context + shape.sampling_extra

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
    if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty or params.uses_dry:
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
        surprise = SAMPLING_COST_ALPHA * math.log(min(max(seconds / predicted, 1 / OUTLIER_RATIO), OUTLIER_RATIO)) / predicted
        self._fixed_cost *= math.exp(surprise * self._fixed_cost)
        for kind, part in enumerate(parts):
            if part:
                self._row_costs[kind] *= math.exp(surprise * part)
