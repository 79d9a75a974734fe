"""The kernel counts what its plain twin counts."""

from __future__ import annotations

import torch
from hypothesis import given, settings

from foreword.executor import decode_slots as matching
from foreword.kernels.triton.match import count_accepted
from tests.executor.test_matching import lanes
from tests.support.triton_sample_rows import DEVICE


@given(lanes())
@settings(max_examples=60, deadline=None)
def test_equals_the_plain_one(lane: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(
        count_accepted(*(tensor.to(DEVICE) for tensor in lane)).cpu(), matching.count_accepted(*lane)
    )


def test_rows_may_be_parts_of_wider_ones() -> None:
    wide = torch.arange(40, device=DEVICE).view(4, 10) % 3
    sampled, drafts, num_draft = wide[:, 2:6], wide[:, 5:8], torch.tensor([3, 2, 1, 0], device=DEVICE)
    assert torch.equal(
        count_accepted(sampled, drafts, num_draft), matching.count_accepted(sampled, drafts, num_draft)
    )
