"""Verification is sampling: a draft token is accepted if the target sampled the same."""

from __future__ import annotations

from collections.abc import Sequence


def verify(sampled: Sequence[int], draft: Sequence[int]) -> int:
    """Number of draft tokens that the target itself sampled.

    sampled  1 + d ids; sampled[j] follows draft[:j]
    draft    d ids
    Returns a = 0..d; the request emits sampled[: a + 1].
    """
    assert len(sampled) == len(draft) + 1
    for num_accepted, (draft_id, token_id) in enumerate(zip(draft, sampled, strict=False)):
        if draft_id != token_id:
            return num_accepted
    return len(draft)
