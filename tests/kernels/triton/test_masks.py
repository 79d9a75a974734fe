"""Masks of fewer, as many and more words than ids need."""

from __future__ import annotations

import pytest
import torch

from tests.support.triton_sample_rows import assert_same, mixed_rows


@pytest.mark.parametrize("words", [1, 3, 4])
def test_only_ids_whose_bit_is_set_stay(words: int) -> None:
    logits = mixed_rows(75)
    masks = torch.randint(
        -(2**31), 2**31, (len(logits), words), generator=torch.Generator().manual_seed(words)
    ).int()
    masks[::4] = -1
    assert_same("apply_mask", logits, masks)
    assert_same("apply_mask", logits, masks[1:2].expand(len(logits), -1))
    assert_same("apply_mask", logits, masks.T.contiguous().T)
