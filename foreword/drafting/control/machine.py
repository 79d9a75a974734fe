"""What the controller believes about the machine, and how each step corrects it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from foreword.drafting.control.costs import (
    OUTLIER,
    PROCESSED,
    SAMPLING_CLASSES,
    Calibration,
    Drift,
    PassCost,
    SamplePrices,
    Shape,
    StepCosts,
)
from foreword.drafting.control.watchdog import Watchdog
from foreword.drafting.policy import Served

__all__ = ["Machine", "Tally"]

PRICE_EVERY = 8  # steps between two looks at the price of sampling
PASS_RATE = 0.05
AHEAD_PRIOR, AHEAD_RATE = 0.9, 0.125
AHEAD_FORGOTTEN, FORGET_RATE = 0.985, 1 / 256  # believed of running ahead where it does not come to it: enough to try it


@dataclass(frozen=True, slots=True)
class Tally:
    """A step that is over: as it was, and as it would have been without its drafts.

    kinds     sampled rows by sampling class
    emitted   tokens, of `sampling` requests
    decoding  no prompt was computed: each row was sampled
    """

    shape: Shape
    plain: Shape
    kinds: Sequence[int]
    emitted: int
    sampling: int

    @property
    def drafted(self) -> int:
        return self.shape.rows - self.plain.rows

    @property
    def decoding(self) -> bool:
        return self.shape.sampled == self.shape.rows


class Machine:
    """Costs of steps and passes in model seconds, corrected by what they really take.

    watchdog   doubts it all
    ahead      what a step without drafts takes where it is computed ahead of the host, as a share of one that is not
    predicted  seconds that steps with drafts were thought to take, drafting included; realised: what they took
    """

    def __init__(self, calibration: Calibration, passes: Mapping[str, PassCost]) -> None:
        self.costs = StepCosts(calibration)
        self.prices = SamplePrices(self.costs.of(Shape(1, 1)))
        self.watchdog = Watchdog()
        self.predicted = self.realised = 0.0
        self.ahead = 1.0
        self._passes = dict(passes)
        self._drift = Drift()
        self._pass_factor = 1.0
        self._last = (0, 1.0)  # rows of the last decoding step, and how many times its cost it took
        self._num_steps = 0

    @property
    def drift(self) -> float:
        """Seconds by model second."""
        return self._drift.factor or 1.0

    def tally(self, served: Sequence[Served], kinds: Mapping[str, int]) -> Tally:
        """Sum up a step; kinds: sampling classes of the requests that are not greedy."""
        rows = drafted = further = context = emitted = sampling = 0
        by_kind, by_kind_plain = [0] * SAMPLING_CLASSES, [0] * SAMPLING_CLASSES
        for one in served:
            draft = one.num_draft
            rows += one.num_tokens
            context += one.context - draft
            if draft:
                drafted += draft
                further += draft * one.context
            if one.samples:
                sampling += 1
                emitted += one.emitted
                kind = kinds.get(one.state.id, 0) if kinds else 0
                by_kind[kind] += 1 + draft
                by_kind_plain[kind] += 1
        shape = plain = Shape(rows, sampling, context, 0, self._extra(by_kind_plain) if kinds else 0.0)
        if drafted:
            extra = self._extra(by_kind) if kinds else 0.0
            shape = Shape(rows + drafted, sampling + drafted, context, further, extra)
        return Tally(shape, plain, by_kind, emitted, sampling)

    def measured(self, tally: Tally, seconds: Mapping[str, float], passes: float) -> tuple[float, float]:
        """Learn from a step, in which drafters' passes should have taken `passes` model seconds.

        Returns model seconds: of the step without drafting, and of the drafting in it.
        """
        drafting = seconds.get("draft", 0.0)
        verifying = sum(seconds.values()) - drafting
        self.ahead += max(AHEAD_FORGOTTEN - self.ahead, 0.0) * FORGET_RATE
        cost = self.costs.of(tally.shape)
        if tally.drafted:
            self.predicted += (cost + passes) * self.drift
            self.realised += verifying + drafting
        if tally.decoding and verifying > 0.0:
            self._learn(tally, cost, seconds)
        drafted = drafting / self.drift
        if passes > 0.0 and drafted > 0.0:
            self._pass_factor *= min(max(drafted / passes, 1 / OUTLIER), OUTLIER) ** PASS_RATE
        return cost, drafted

    def expect_ahead(self) -> None:
        """It is worth finding out what running ahead saves."""
        self.ahead = AHEAD_PRIOR

    def ran_ahead(self, tally: Tally, seconds: Mapping[str, float]) -> None:
        """Learn from a step that was computed ahead."""
        share = sum(seconds.values()) / (self.costs.of(tally.plain) * self.drift)
        self.ahead += (min(max(share, 1 / OUTLIER), 1.0) - self.ahead) * AHEAD_RATE

    def ahead_of(self, kinds: Iterable[int]) -> float:
        """The share for a step of requests of these sampling classes, all of which decode: the host is asked by some."""
        return self.ahead if self.ahead == 1.0 or max(kinds, default=0) < PROCESSED else 1.0

    def drafting(self, drafter: str, backlog: int, requests: int, length: int) -> float:
        """Model seconds of drafting `length` tokens for `requests` requests with so many rows to compute first."""
        return self._pass_factor * self._passes[drafter].draft(backlog, requests, length)

    def _learn(self, tally: Tally, cost: float, seconds: Mapping[str, float]) -> None:
        total, sampling = sum(seconds.values()), seconds.get("sample", 0.0)
        ratio = (total - seconds.get("draft", 0.0)) / cost
        self._drift.update(ratio)
        rows, (before, ratio_before) = tally.shape.rows, self._last
        if before and rows != before:
            self.costs.learn(rows, before, ratio / ratio_before)
        self._last = rows, ratio
        if tally.drafted:
            ahead = self.ahead_of(kind for kind, rows in enumerate(tally.kinds) if rows)
            needed = ahead * self.costs.of(tally.plain) * tally.emitted / tally.sampling
            self.watchdog.speculated(total, needed)
        else:
            self.watchdog.plain(ratio)
        self._num_steps += 1
        if self._num_steps % PRICE_EVERY == 0 and sampling > 0.0:
            self.prices.learn(tally.kinds, sampling / self.drift)

    def _extra(self, kinds: Sequence[int]) -> float:
        return sum(count * self.prices.extra(kind) for kind, count in enumerate(kinds) if count)
