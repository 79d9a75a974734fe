"""What drafting was worth: one set of sums, kept per request, per drafter and per log interval."""

from __future__ import annotations

from itertools import zip_longest

__all__ = ["DraftTally"]


class DraftTally:
    """Sums over the steps that verified a draft, after every cut.

    verify_steps  steps that verified at least one drafted token
    drafted       tokens drafted and verified
    accepted      of these, delivered
    emitted       tokens delivered by these steps, the one after the draft included
    drafted_at, accepted_at  the same by place in the draft; lengths vary, so each place has its own base

    Every ratio is None until something was drafted.
    """

    __slots__ = ("accepted", "accepted_at", "drafted", "drafted_at", "emitted", "verify_steps")

    def __init__(self) -> None:
        self.verify_steps = 0
        self.drafted = 0
        self.accepted = 0
        self.emitted = 0
        self.drafted_at: list[int] = []
        self.accepted_at: list[int] = []

    def add(self, drafted: int, accepted: int, emitted: int) -> None:
        """One verified draft."""
        assert 0 <= accepted <= drafted and accepted <= emitted <= accepted + 1
        self.verify_steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self.emitted += emitted
        _count(self.drafted_at, drafted)
        _count(self.accepted_at, accepted)

    def include(self, other: DraftTally) -> None:
        """Add the sums of another tally."""
        self.verify_steps += other.verify_steps
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.emitted += other.emitted
        self.drafted_at = _sums(self.drafted_at, other.drafted_at)
        self.accepted_at = _sums(self.accepted_at, other.accepted_at)

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_length(self) -> float | None:
        return self.emitted / self.verify_steps if self.verify_steps else None

    @property
    def efficiency(self) -> float | None:
        """Delivered tokens per verified row: drafted tokens and one more a step."""
        return self.emitted / (self.drafted + self.verify_steps) if self.verify_steps else None

    @property
    def acceptance_at(self) -> tuple[float, ...]:
        """Share accepted among the drafts that reached each place."""
        accepted = [*self.accepted_at, *[0] * (len(self.drafted_at) - len(self.accepted_at))]
        return tuple(hit / base for hit, base in zip(accepted, self.drafted_at, strict=True))


def _sums(left: list[int], right: list[int]) -> list[int]:
    return [a + b for a, b in zip_longest(left, right, fillvalue=0)]


def _count(places: list[int], length: int) -> None:
    places.extend([0] * (length - len(places)))
    for place in range(length):
        places[place] += 1
