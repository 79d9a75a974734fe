"""Statistics of speculative decoding, kept per request, per drafter and per log interval."""

from __future__ import annotations

from itertools import zip_longest


class SpecDecodeStats:
    """Sums over steps that verified a draft, after stop conditions. Ratios are None without drafts."""

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
        self.num_drafted = 0  # tokens drafted and verified
        self.num_accepted = 0  # drafted tokens delivered
        self.num_emitted = 0  # tokens delivered, including the one after the draft
        self.drafted_per_position: list[int] = []
        self.accepted_per_position: list[int] = []

    def add(self, num_drafted: int, num_accepted: int, num_emitted: int) -> None:
        """Count one verified draft."""
        assert 0 <= num_accepted <= num_drafted and num_accepted <= num_emitted <= num_accepted + 1
        self.num_verify_steps += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.num_emitted += num_emitted
        _count_positions(self.drafted_per_position, num_drafted)
        _count_positions(self.accepted_per_position, num_accepted)

    def merge(self, other: SpecDecodeStats) -> None:
        """Add the sums of `other`."""
        self.num_verify_steps += other.num_verify_steps
        self.num_drafted += other.num_drafted
        self.num_accepted += other.num_accepted
        self.num_emitted += other.num_emitted
        for name in ("drafted_per_position", "accepted_per_position"):
            pairs = zip_longest(getattr(self, name), getattr(other, name), fillvalue=0)
            setattr(self, name, [left + right for left, right in pairs])

    @property
    def acceptance_rate(self) -> float | None:
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def mean_acceptance_len(self) -> float | None:
        return self.num_emitted / self.num_verify_steps if self.num_verify_steps else None

    @property
    def system_efficiency(self) -> float | None:
        """Delivered tokens per verified row: drafted tokens and one more per step."""
        num_rows = self.num_drafted + self.num_verify_steps
        return self.num_emitted / num_rows if self.num_verify_steps else None

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """Share accepted among the drafts that reach each position."""
        pairs = zip_longest(self.accepted_per_position, self.drafted_per_position, fillvalue=0)
        return tuple(accepted / drafted for accepted, drafted in pairs)


def _count_positions(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))
    for position in range(length):
        counts[position] += 1
