"""How likely a guess is right: by drafter, confidence and position for all requests, and by each request's own record.

P(token right | the one before it right) is learned from every position that the text reached, whether the draft was
verified or not. Positions behind the first wrong one say nothing, and neither does the end of a draft that was right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from foreword.core.outputs import Draft

__all__ = ["MODEL_PRIORS", "MODEL_PRIOR_TRIALS", "AcceptanceModel", "RequestAcceptance"]

POSITION_GROUPS = (
    0,
    1,
    2,
    2,
    3,
    3,
    3,
    3,
    4,
    4,
    4,
    4,
    4,
    4,
    4,
    4,
    5,
)  # by position in the draft; beyond the end as the last
NUM_POSITION_GROUPS = 6
CONFIDENCE_EDGES = (0.2, 0.4, 0.6, 0.75, 0.85, 0.93, 0.98)  # of the buckets of confidence
CONFIDENCE_BUCKETS = tuple(sum(step / 64 >= edge for edge in CONFIDENCE_EDGES) for step in range(65))
NO_CONFIDENCE, ALL_DRAFTS = 8, 9  # the bucket of drafts without confidence, and that of all drafts together
PRIORS = (0.1, 0.3, 0.5, 0.67, 0.8, 0.9, 0.95, 0.98, 0.5, 0.5)
MODEL_PRIORS = (
    0.3,
    0.5,
    0.6,
    0.75,
    0.85,
    0.9,
    0.95,
    0.98,
    0.85,
    0.85,
)  # whoever brings a draft model chose it for the job
PRIOR_TRIALS, MODEL_PRIOR_TRIALS = 4.0, 8.0
DECAY = 1 - 1 / 256  # of all requests, by trial of the same kind
REQUEST_PRIOR_TRIALS = 4.0
REQUEST_DECAY = 1 - 1 / 32  # of a request, by trial
MAX_PROB = 0.995


class RequestAcceptance:
    """How a drafter does on one request, beside what is usual for guesses like those.

    The request's own probability is `shift + slope * p` for a usual p: fewer hits than expected scale the hits down,
    fewer misses the misses.
    """

    __slots__ = ("_expected", "_hits", "_trials", "shift", "slope")

    def __init__(self) -> None:
        self._hits = self._expected = self._trials = 0.0
        self.shift, self.slope = 0.0, 1.0

    def update(self, hits: int, expected: float, trials: int) -> None:
        """Take in guesses of which `hits` were right and `expected` should have been."""
        kept = REQUEST_DECAY**trials
        self._hits = self._hits * kept + hits
        self._expected = self._expected * kept + expected
        self._trials = self._trials * kept + trials
        if self._hits < self._expected:
            self.shift, self.slope = (
                0.0,
                (self._hits + REQUEST_PRIOR_TRIALS) / (self._expected + REQUEST_PRIOR_TRIALS),
            )
        else:
            misses, expected_misses = self._trials - self._hits, self._trials - self._expected
            self.slope = (misses + REQUEST_PRIOR_TRIALS) / (expected_misses + REQUEST_PRIOR_TRIALS)
            self.shift = 1.0 - self.slope


class AcceptanceModel:
    """How a drafter does on all requests: P(right) by bucket of confidence and group of positions."""

    def __init__(self, priors: Sequence[float] = PRIORS, prior_trials: float = PRIOR_TRIALS) -> None:
        self._priors = priors
        self._prior_trials = prior_trials
        self._hits = [[0.0] * NUM_POSITION_GROUPS for _ in PRIORS]
        self._trials = [[0.0] * NUM_POSITION_GROUPS for _ in PRIORS]
        self._hit_rates: list[list[float] | None] = [None] * len(PRIORS)
        self._mean_hit_rate = self._mean_confidence = 0.5

    def update(self, draft: Draft, output_ids: Sequence[int], request: RequestAcceptance) -> int:
        """Learn from what the text went on with; returns how many guesses were right."""
        guesses = draft.token_ids
        reached = min(len(guesses), len(output_ids))
        right = next((i for i in range(reached) if guesses[i] != output_ids[i]), reached)
        trials = min(right + 1, reached)
        buckets = _confidence_buckets(draft, trials)
        expected = 0.0
        for position, bucket in enumerate(buckets):
            group = POSITION_GROUPS[position] if position < 16 else 5
            expected += self.hit_rates(bucket)[group]
            self._add_trial(bucket, group, position < right)
            self._add_trial(ALL_DRAFTS, group, position < right)
        if draft.confidence:
            self._update_means(draft.confidence[:trials], right)
        request.update(right, expected, trials)
        return right

    def prefix_probs(self, draft: Draft, request: RequestAcceptance, min_prob: float) -> list[float]:
        """P(all guesses up to each are right), for this request; ends before it falls below `floor`."""
        shift, slope = request.shift, request.slope
        chances: list[float] = []
        chance = 1.0
        for position, bucket in enumerate(_confidence_buckets(draft, len(draft.token_ids))):
            usual = self._hit_rates[bucket] or self.hit_rates(bucket)
            chance *= min(shift + slope * usual[POSITION_GROUPS[position] if position < 16 else 5], MAX_PROB)
            if chance < min_prob:
                break
            chances.append(chance)
        return chances

    def expected_prefix_probs(self, request: RequestAcceptance, draft_len: int) -> list[float]:
        """The same for a draft of `length` tokens that does not exist yet."""
        usual = self.hit_rates(ALL_DRAFTS)
        chances: list[float] = []
        chance = 1.0
        for position in range(draft_len):
            chance *= min(request.shift + request.slope * usual[POSITION_GROUPS[min(position, 16)]], MAX_PROB)
            chances.append(chance)
        return chances

    @property
    def num_trials(self) -> float:
        """How many guesses of late were scored."""
        return sum(self._trials[ALL_DRAFTS])

    def hit_rates(self, bucket: int) -> list[float]:
        """P(right) by group of positions; where little is known, that of the group before it."""
        usual = self._hit_rates[bucket]
        if usual is None:
            usual, before = [], self._priors[bucket]
            for hits, trials in zip(self._hits[bucket], self._trials[bucket], strict=True):
                before = (hits + self._prior_trials * before) / (trials + self._prior_trials)
                usual.append(before)
            self._hit_rates[bucket] = usual
        return usual

    def to_confidence(self, prob: float) -> float:
        """What a drafter's own product of confidences is where the chance is this: some state less than they hold."""
        exponent = math.log(self._mean_confidence) / math.log(self._mean_hit_rate)
        return math.pow(min(max(prob, 1e-6), 1.0), exponent)

    def _add_trial(self, bucket: int, group: int, is_hit: bool) -> None:
        hits, trials = self._hits[bucket], self._trials[bucket]
        hits[group] = hits[group] * DECAY + is_hit
        trials[group] = trials[group] * DECAY + 1
        self._hit_rates[bucket] = None

    def _update_means(self, confidence: Sequence[float], num_hits: int) -> None:
        """Follow the mean confidence and the mean of hits, both kept off 0 and 1."""
        for position, stated in enumerate(confidence):
            self._mean_confidence = DECAY * self._mean_confidence + (1 - DECAY) * max(0.01, min(0.99, stated))
            self._mean_hit_rate = DECAY * self._mean_hit_rate + (1 - DECAY) * (
                0.99 if position < num_hits else 0.01
            )


def _confidence_buckets(draft: Draft, count: int) -> Sequence[int]:
    """Buckets of the first `count` guesses."""
    if len(draft.confidence) < count:
        return (NO_CONFIDENCE,) * count
    return [
        CONFIDENCE_BUCKETS[int(stated * 64) if 0.0 <= stated <= 1.0 else 0]
        for stated in draft.confidence[:count]
    ]
