"""Acceptance probability of draft tokens: by drafter, confidence and position, and by request.

P(token accepted | those before it accepted) is learned from every draft position that the output reached,
whether the draft was verified or not. Positions after the first wrong token carry no information.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from foreword.core.outputs import Draft

POSITION_GROUPS = (0, 1, 2, 2, 3, 3, 3, 3, *(4,) * 8, 5)  # by position in the draft
NUM_POSITION_GROUPS = 6
CONFIDENCE_EDGES = (0.2, 0.4, 0.6, 0.75, 0.85, 0.93, 0.98)  # edges between the buckets
CONFIDENCE_BUCKETS = tuple(sum(step / 64 >= edge for edge in CONFIDENCE_EDGES) for step in range(65))
NO_CONFIDENCE, ALL_DRAFTS = 8, 9  # buckets of drafts without confidence, and of all drafts
PRIORS = (0.1, 0.3, 0.5, 0.67, 0.8, 0.9, 0.95, 0.98, 0.5, 0.5)  # by bucket
MODEL_PRIORS = (0.3, 0.5, 0.6, 0.75, 0.85, 0.9, 0.95, 0.98, 0.85, 0.85)  # a draft model is chosen to fit
PRIOR_TRIALS, MODEL_PRIOR_TRIALS = 4.0, 8.0
DECAY = 1 - 1 / 256  # per trial of the same bucket and position group, over all requests
REQUEST_PRIOR_TRIALS = 4.0
REQUEST_DECAY, OVERALL_DECAY = 1 - 1 / 32, 1 - 1 / 128  # per trial of the request
INHERITED_TRIALS, INHERITED_ALPHA = 12.0, 1 / 8  # belief in ended requests, and the weight of each
MAX_PROB = 0.995


class RelativeAcceptance:
    """Acceptance on one request, relative to what was predicted for its drafts.

    Its probability is `shift + slope * p` for a mean p: fewer hits than expected scale the hits down, fewer
    misses scale the misses down.
    """

    __slots__ = ("_decay", "_expected", "_hits", "_trials", "shift", "slope")

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._hits = self._expected = self._trials = 0.0
        self.shift, self.slope = 0.0, 1.0

    @property
    def ratio(self) -> float:
        """Hits relative to those expected, with the prior."""
        return (self._hits + REQUEST_PRIOR_TRIALS) / (self._expected + REQUEST_PRIOR_TRIALS)

    def believe(self, ratio: float) -> None:
        """Begin with a ratio of fewer hits than expected."""
        self._expected = self._trials = INHERITED_TRIALS
        self.slope = min(ratio, 1.0)
        self._hits = self.slope * INHERITED_TRIALS

    def update(self, hits: int, expected: float, trials: int) -> None:
        """Learn from `trials` draft tokens: `hits` were accepted, `expected` were predicted to be."""
        kept = self._decay**trials
        self._hits = self._hits * kept + hits
        self._expected = self._expected * kept + expected
        self._trials = self._trials * kept + trials
        if self._hits < self._expected:
            self.shift = 0.0
            self.slope = self.ratio
        else:
            misses, expected_misses = self._trials - self._hits, self._trials - self._expected
            self.slope = (misses + REQUEST_PRIOR_TRIALS) / (expected_misses + REQUEST_PRIOR_TRIALS)
            self.shift = 1.0 - self.slope


class RequestAcceptance(RelativeAcceptance):
    """A drafter's acceptance on one request, relative to drafts of the same confidence on all requests.

    `overall` is relative to all drafts: before a draft is made, its confidence is not known, and on a hard
    request it is low.
    """

    __slots__ = ("overall",)

    def __init__(self) -> None:
        super().__init__(REQUEST_DECAY)
        self.overall = RelativeAcceptance(OVERALL_DECAY)


class AcceptanceModel:
    """A drafter's acceptance on all requests, by confidence bucket and position group."""

    def __init__(self, priors: Sequence[float] = PRIORS, prior_trials: float = PRIOR_TRIALS) -> None:
        self._priors = priors
        self._prior_trials = prior_trials
        self._hits = [[0.0] * NUM_POSITION_GROUPS for _ in PRIORS]
        self._trials = [[0.0] * NUM_POSITION_GROUPS for _ in PRIORS]
        self._hit_rates: list[list[float] | None] = [None] * len(PRIORS)
        self._has_new_trials = False  # the rates are recomputed when they are next asked for, once a step
        self._mean_hit_rate = self._mean_confidence = 0.5
        self._ended_ratio = 1.0  # of requests that ended: the mean of all drafts is that of the longest

    def start_request(self) -> RequestAcceptance:
        """The acceptance of a new request, believed to be like that of requests that ended."""
        request = RequestAcceptance()
        request.overall.believe(self._ended_ratio)
        return request

    def finish_request(self, request: RequestAcceptance) -> None:
        """A request ends."""
        self._ended_ratio += (min(request.overall.ratio, 1.0) - self._ended_ratio) * INHERITED_ALPHA

    def update(self, draft: Draft, output_ids: Sequence[int], request: RequestAcceptance) -> int:
        """Learn from the output where the draft began; returns the number of correct draft tokens.

        An empty draft is a miss of unknown confidence: the drafter found no token.
        """
        if not draft.token_ids:
            rates = self._hit_rates[ALL_DRAFTS] or self._compute_hit_rates(ALL_DRAFTS)
            request.overall.update(0, rates[0], 1)
            self._add_trial(ALL_DRAFTS, 0, False)
            self._has_new_trials = True
            return 0
        draft_ids = draft.token_ids
        reached = min(len(draft_ids), len(output_ids))
        hits = next((i for i in range(reached) if draft_ids[i] != output_ids[i]), reached)
        trials = min(hits + 1, reached)
        buckets = _confidence_buckets(draft, trials)
        expected = expected_overall = 0.0
        overall = self._hit_rates[ALL_DRAFTS] or self._compute_hit_rates(ALL_DRAFTS)
        for position, bucket in enumerate(buckets):
            group = POSITION_GROUPS[position] if position < 16 else 5
            expected_overall += overall[group]
            expected += (self._hit_rates[bucket] or self._compute_hit_rates(bucket))[group]
            self._add_trial(bucket, group, position < hits)
            self._add_trial(ALL_DRAFTS, group, position < hits)
        self._has_new_trials = True
        if draft.confidence:
            self._update_means(draft.confidence[:trials], hits)
        request.update(hits, expected, trials)
        request.overall.update(hits, expected_overall, trials)
        return hits

    def prefix_probs(self, draft: Draft, request: RequestAcceptance, min_prob: float) -> list[float]:
        """P(all tokens up to each are accepted), for this request, while it is at least `min_prob`."""
        shift, slope = request.shift, request.slope
        probs: list[float] = []
        prob = 1.0
        if self._has_new_trials:
            self._forget_hit_rates()
        for position, bucket in enumerate(_confidence_buckets(draft, len(draft.token_ids))):
            rates = self._hit_rates[bucket] or self._compute_hit_rates(bucket)
            prob *= min(shift + slope * rates[POSITION_GROUPS[position] if position < 16 else 5], MAX_PROB)
            if prob < min_prob:
                break
            probs.append(prob)
        return probs

    def expected_prefix_probs(self, request: RequestAcceptance, draft_len: int) -> list[float]:
        """The same for a draft of `draft_len` tokens that is not proposed yet."""
        shift, slope = request.overall.shift, request.overall.slope
        by_group = [min(shift + slope * rate, MAX_PROB) for rate in self.hit_rates(ALL_DRAFTS)]
        by_position = [by_group[group] for group in POSITION_GROUPS]
        by_position += by_position[-1:] * (draft_len - len(by_position))
        return list(accumulate(by_position[:draft_len], mul))

    @property
    def num_trials(self) -> float:
        """Decayed number of scored draft tokens."""
        return sum(self._trials[ALL_DRAFTS])

    def hit_rates(self, bucket: int) -> list[float]:
        """P(accepted) by position group; the prior of a group is the rate of the group before it."""
        if self._has_new_trials:
            self._forget_hit_rates()
        return self._hit_rates[bucket] or self._compute_hit_rates(bucket)

    def to_confidence(self, prob: float) -> float:
        """The drafter's confidence product for a true probability: calibrates over- and underconfidence."""
        exponent = math.log(self._mean_confidence) / math.log(self._mean_hit_rate)
        return math.pow(min(max(prob, 1e-6), 1.0), exponent)

    def _forget_hit_rates(self) -> None:
        self._hit_rates = [None] * len(self._hit_rates)
        self._has_new_trials = False

    def _compute_hit_rates(self, bucket: int) -> list[float]:
        rates, prior = [], self._priors[bucket]
        for hits, trials in zip(self._hits[bucket], self._trials[bucket], strict=True):
            prior = (hits + self._prior_trials * prior) / (trials + self._prior_trials)
            rates.append(prior)
        self._hit_rates[bucket] = rates
        return rates

    def _add_trial(self, bucket: int, group: int, is_hit: bool) -> None:
        hits, trials = self._hits[bucket], self._trials[bucket]
        hits[group] = hits[group] * DECAY + is_hit
        trials[group] = trials[group] * DECAY + 1

    def _update_means(self, confidence: Sequence[float], num_hits: int) -> None:
        """Update the means of confidence and hits, both kept away from 0 and 1."""
        for position, value in enumerate(confidence):
            hit = 0.99 if position < num_hits else 0.01
            self._mean_confidence = DECAY * self._mean_confidence + (1 - DECAY) * max(0.01, min(0.99, value))
            self._mean_hit_rate = DECAY * self._mean_hit_rate + (1 - DECAY) * hit


def _confidence_buckets(draft: Draft, count: int) -> Sequence[int]:
    """Confidence buckets of the first `count` tokens."""
    if len(draft.confidence) < count:
        return (NO_CONFIDENCE,) * count
    return [CONFIDENCE_BUCKETS[int(c * 64) if 0.0 <= c <= 1.0 else 0] for c in draft.confidence[:count]]
