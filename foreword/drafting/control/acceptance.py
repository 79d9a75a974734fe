"""How likely a guess is right: by drafter, confidence and position for all requests, and by each request's own record.

P(token right | the one before it right) is learned from every position that the text reached, whether the draft was
verified or not. Positions behind the first wrong one say nothing, and neither does the end of a draft that was right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from foreword.core.draft import Draft

__all__ = ["PASS_PRIORS", "PASS_PRIOR_TRIALS", "Rates", "Record"]

GROUPS = (0, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4, 5)  # by position in the draft; beyond the end as the last
NUM_GROUPS = 6
EDGES = (0.2, 0.4, 0.6, 0.75, 0.85, 0.93, 0.98)  # of the buckets of confidence
BUCKETS = tuple(sum(step / 64 >= edge for edge in EDGES) for step in range(65))
UNKNOWN, ANY = 8, 9  # the bucket of drafts without confidence, and that of all drafts together
PRIORS = (0.1, 0.3, 0.5, 0.67, 0.8, 0.9, 0.95, 0.98, 0.5, 0.5)
PASS_PRIORS = (0.3, 0.5, 0.6, 0.75, 0.85, 0.9, 0.95, 0.98, 0.85, 0.85)  # whoever brings a draft model chose it for the job
PRIOR_TRIALS, PASS_PRIOR_TRIALS = 4.0, 8.0
MEMORY = 1 - 1 / 256  # of all requests, by trial of the same kind
OWN_TRIALS = 4.0
OWN_MEMORY = 1 - 1 / 32  # of a request, by trial
SURE = 0.995


class Record:
    """How a drafter does on one request, beside what is usual for guesses like those.

    The request's own probability is `shift + slope * p` for a usual p: fewer hits than expected scale the hits down,
    fewer misses the misses.
    """

    __slots__ = ("_expected", "_hits", "_trials", "shift", "slope")

    def __init__(self) -> None:
        self._hits = self._expected = self._trials = 0.0
        self.shift, self.slope = 0.0, 1.0

    def add(self, hits: int, expected: float, trials: int) -> None:
        """Take in guesses of which `hits` were right and `expected` should have been."""
        kept = OWN_MEMORY**trials
        self._hits = self._hits * kept + hits
        self._expected = self._expected * kept + expected
        self._trials = self._trials * kept + trials
        if self._hits < self._expected:
            self.shift, self.slope = 0.0, (self._hits + OWN_TRIALS) / (self._expected + OWN_TRIALS)
        else:
            misses, expected_misses = self._trials - self._hits, self._trials - self._expected
            self.slope = (misses + OWN_TRIALS) / (expected_misses + OWN_TRIALS)
            self.shift = 1.0 - self.slope


class Rates:
    """How a drafter does on all requests: P(right) by bucket of confidence and group of positions."""

    def __init__(self, priors: Sequence[float] = PRIORS, prior_trials: float = PRIOR_TRIALS) -> None:
        self._priors = priors
        self._prior_trials = prior_trials
        self._hits = [[0.0] * NUM_GROUPS for _ in PRIORS]
        self._trials = [[0.0] * NUM_GROUPS for _ in PRIORS]
        self._usual: list[list[float] | None] = [None] * len(PRIORS)
        self._hit_rate = self._confidence = 0.5

    def score(self, draft: Draft, run: Sequence[int], record: Record) -> int:
        """Learn from what the text went on with; returns how many guesses were right."""
        guesses = draft.token_ids
        reached = min(len(guesses), len(run))
        right = next((i for i in range(reached) if guesses[i] != run[i]), reached)
        trials = min(right + 1, reached)
        buckets = _buckets(draft, trials)
        expected = 0.0
        for position, bucket in enumerate(buckets):
            group = GROUPS[position] if position < 16 else 5
            expected += self.usual(bucket)[group]
            self._count(bucket, group, position < right)
            self._count(ANY, group, position < right)
        if draft.confidence:
            self._compare(draft.confidence[:trials], right)
        record.add(right, expected, trials)
        return right

    def chances(self, draft: Draft, record: Record, floor: float) -> list[float]:
        """P(all guesses up to each are right), for this request; ends before it falls below `floor`."""
        shift, slope = record.shift, record.slope
        chances: list[float] = []
        chance = 1.0
        for position, bucket in enumerate(_buckets(draft, len(draft.token_ids))):
            usual = self._usual[bucket] or self.usual(bucket)
            chance *= min(shift + slope * usual[GROUPS[position] if position < 16 else 5], SURE)
            if chance < floor:
                break
            chances.append(chance)
        return chances

    def foreseen(self, record: Record, length: int) -> list[float]:
        """The same for a draft of `length` tokens that does not exist yet."""
        usual = self.usual(ANY)
        chances: list[float] = []
        chance = 1.0
        for position in range(length):
            chance *= min(record.shift + record.slope * usual[GROUPS[min(position, 16)]], SURE)
            chances.append(chance)
        return chances

    @property
    def trials(self) -> float:
        """How many guesses of late were scored."""
        return sum(self._trials[ANY])

    def usual(self, bucket: int) -> list[float]:
        """P(right) by group of positions; where little is known, that of the group before it."""
        usual = self._usual[bucket]
        if usual is None:
            usual, before = [], self._priors[bucket]
            for hits, trials in zip(self._hits[bucket], self._trials[bucket], strict=True):
                before = (hits + self._prior_trials * before) / (trials + self._prior_trials)
                usual.append(before)
            self._usual[bucket] = usual
        return usual

    def stated(self, chance: float) -> float:
        """What a drafter's own product of confidences is where the chance is this: some state less than they hold."""
        exponent = math.log(self._confidence) / math.log(self._hit_rate)
        return math.pow(min(max(chance, 1e-6), 1.0), exponent)

    def _count(self, bucket: int, group: int, right: bool) -> None:
        hits, trials = self._hits[bucket], self._trials[bucket]
        hits[group] = hits[group] * MEMORY + right
        trials[group] = trials[group] * MEMORY + 1
        self._usual[bucket] = None

    def _compare(self, confidence: Sequence[float], right: int) -> None:
        """Follow the mean confidence and the mean of hits, both kept off 0 and 1."""
        for position, stated in enumerate(confidence):
            self._confidence = MEMORY * self._confidence + (1 - MEMORY) * max(0.01, min(0.99, stated))
            self._hit_rate = MEMORY * self._hit_rate + (1 - MEMORY) * (0.99 if position < right else 0.01)


def _buckets(draft: Draft, count: int) -> Sequence[int]:
    """Buckets of the first `count` guesses."""
    if len(draft.confidence) < count:
        return (UNKNOWN,) * count
    return [BUCKETS[int(stated * 64) if 0.0 <= stated <= 1.0 else 0] for stated in draft.confidence[:count]]
