"""Matching on tensors is `verify()` of each request."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.executor.decode_slots import count_accepted
from foreword.sampling.verify import verify


@st.composite
def lanes(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """sampled int64 [L, 1 + D], drafts int64 [L, D], num_draft int64 [L]: few different ids, so that some are equal."""
    count, depth = draw(st.integers(1, 4)), draw(st.integers(0, 5))
    ids = st.integers(-1, 1)

    def matrix(width: int) -> torch.Tensor:
        return torch.tensor(draw(st.lists(ids, min_size=count * width, max_size=count * width))).long()

    num_draft = draw(st.lists(st.integers(0, depth), min_size=count, max_size=count))
    return matrix(1 + depth).view(count, 1 + depth), matrix(depth).view(count, depth), torch.tensor(num_draft)


def verified(sampled: torch.Tensor, drafts: torch.Tensor, num_draft: torch.Tensor) -> list[int]:
    own = zip(sampled.tolist(), drafts.tolist(), num_draft.tolist(), strict=True)
    return [verify(tokens[: 1 + length], draft[:length]) for tokens, draft, length in own]


@given(lanes())
@settings(max_examples=200, deadline=None)
def test_each_lane_is_verified(lane: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    found = count_accepted(*lane)
    assert found.dtype == torch.int64 and found.tolist() == verified(*lane)
