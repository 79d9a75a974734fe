"""Verification is sampling: a drafted token is accepted if the target sampled the same."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["verify"]


def verify(sampled: Sequence[int], draft: Sequence[int]) -> int:
    """How many drafted tokens the target itself sampled.

    sampled  1 + d ids of the target; sampled[j] follows draft[:j]
    draft    d ids
    Returns a = 0..d; the request emits sampled[: a + 1].
    """
    assert len(sampled) == len(draft) + 1
    for accepted, (guess, token_id) in enumerate(zip(draft, sampled, strict=False)):
        if guess != token_id:
            return accepted
    return len(draft)
