"""Which drafted rows are worth verifying: the prefix of all, by expected gain, with the most tokens for its cost."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain
from operator import truediv

__all__ = ["best_count", "split"]

MARGIN = 1.005  # what must be won: below it is noise


def best_count(gains: Sequence[Sequence[float]], tokens: float, costs: Sequence[float], limit: float) -> int:
    """How many rows to verify, of those with the highest gains.

    gains   chance of each guess of each request, falling, less what the row costs beyond `costs`
    tokens  expected without any draft
    costs   of the step with 0, 1, ... rows more; it has steps of its own, so every count is looked at
    limit   no step may cost more; without drafts any may
    """
    ordered = gains[0] if len(gains) == 1 else sorted(chain.from_iterable(gains), reverse=True)
    allowed = bisect_right(costs, limit)
    rates = list(map(truediv, accumulate(ordered, initial=tokens), costs[:allowed]))
    if len(rates) < 2:
        return 0
    best = max(rates)
    return rates.index(best) if best > rates[0] * MARGIN else 0


def split(gains: Sequence[Sequence[float]], count: int) -> list[int]:
    """How many of the `count` highest gains are whose; of equal ones, the first request's come first."""
    if len(gains) == 1:
        return [count]
    last = sorted(chain.from_iterable(gains), reverse=True)[count - 1]
    lengths = [sum(gain > last for gain in own) for own in gains]
    spare = count - sum(lengths)
    for index, own in enumerate(gains):
        ties = min(own.count(last), spare)
        lengths[index] += ties
        spare -= ties
    return lengths
