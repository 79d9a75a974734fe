"""What drafting was worth: one set of sums, kept per request, per drafter and per log interval."""

from __future__ import annotations

from itertools import zip_longest

__all__ = ["SpecDecodeStats"]


class SpecDecodeStats:
    """Sums over the steps that verified a draft, after every cut.

    verify_steps  steps that verified at least one drafted token
    drafted       tokens drafted and verified
    accepted      of these, delivered
    emitted       tokens delivered by these steps, the one after the draft included
    drafted_at, accepted_at  the same by place in the draft; lengths vary, so each place has its own base

    Every ratio is None until something was drafted.
    """

    __slots__ = (
        "accepted_per_position",
        "drafted_per_position",
        "num_accepted",
        "num_drafted",
        "num_emitted",
        "num_verify_steps",
    )

    def __init__(self) -> None:
        self.num_verify_steps = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self.num_emitted = 0
        self.drafted_per_position: list[int] = []
        self.accepted_per_position: list[int] = []

    def add(self, num_drafted: int, num_accepted: int, num_emitted: int) -> None:
        """One verified draft."""
        assert 0 <= num_accepted <= num_drafted and num_accepted <= num_emitted <= num_accepted + 1
        self.num_verify_steps += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.num_emitted += num_emitted
        _count_positions(self.drafted_per_position, num_drafted)
        _count_positions(self.accepted_per_position, num_accepted)

    def merge(self, other: SpecDecodeStats) -> None:
        """Add the sums of another tally."""
        self.num_verify_steps += other.num_verify_steps
        self.num_drafted += other.num_drafted
        self.num_accepted += other.num_accepted
        self.num_emitted += other.num_emitted
        self.drafted_per_position = _add_elementwise(self.drafted_per_position, other.drafted_per_position)
        self.accepted_per_position = _add_elementwise(self.accepted_per_position, other.accepted_per_position)

    @property
    def acceptance_rate(self) -> float | None:
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def mean_acceptance_len(self) -> float | None:
        return self.num_emitted / self.num_verify_steps if self.num_verify_steps else None

    @property
    def system_efficiency(self) -> float | None:
        """Delivered tokens per verified row: drafted tokens and one more a step."""
        return (
            self.num_emitted / (self.num_drafted + self.num_verify_steps) if self.num_verify_steps else None
        )

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """Share accepted among the drafts that reached each place."""
        accepted = [
            *self.accepted_per_position,
            *[0] * (len(self.drafted_per_position) - len(self.accepted_per_position)),
        ]
        return tuple(hit / base for hit, base in zip(accepted, self.drafted_per_position, strict=True))


def _add_elementwise(left: list[int], right: list[int]) -> list[int]:
    return [a + b for a, b in zip_longest(left, right, fillvalue=0)]


def _count_positions(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))
    for place in range(length):
        counts[place] += 1
