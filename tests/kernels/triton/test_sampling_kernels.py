"""Masks, biases, repetition penalties and temperature in Triton against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.budget import examples
from tests.support.kernel_rows import make_row
from tests.support.triton_sample_rows import assert_same, mixed_rows, random_few_rows, repeat_to


@pytest.mark.parametrize("words", [1, 3, 4])
def test_mask_matches_reference(words: int) -> None:
    logits = mixed_rows(75)
    masks = torch.randint(
        -(2**31), 2**31, (len(logits), words), generator=torch.Generator().manual_seed(words)
    ).int()
    masks[::4] = -1
    assert_same("apply_mask", logits, masks)
    assert_same("apply_mask", logits, masks[1:2].expand(len(logits), -1))
    assert_same("apply_mask", logits, masks.T.contiguous().T)


# Infinite results are expected here.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def assert_changed(logits: Tensor, ids: list[Tensor]) -> None:
    starts = torch.tensor([0, *map(len, ids)]).cumsum(0)
    flat = torch.cat(ids)
    assert_same("add_bias", logits, starts, flat, torch.linspace(-3, 3, len(flat)))
    assert_same(
        "apply_repetition_penalty",
        logits,
        starts,
        flat,
        repeat_to((1.3, 0.7, 1.0, 1e-30), len(logits), torch.float32),
    )


@given(random_few_rows(), st.data())
@settings(max_examples=examples(25))
def test_random_ids_match_reference(logits: Tensor, data: st.DataObject) -> None:
    """Also ids outside of the vocabulary."""
    some = st.lists(st.integers(-3, logits.shape[1] + 3), unique=True, max_size=8)
    assert_changed(logits, [torch.tensor(data.draw(some), dtype=torch.int64) for _ in logits])


def test_all_row_kinds_match_reference() -> None:
    logits = mixed_rows(75)
    assert_changed(logits, [torch.arange(r * 5) for r in range(len(logits))])


def test_more_ids_than_one_iteration() -> None:
    logits = torch.stack([make_row("plain", 5000, seed) for seed in range(2)])
    assert_changed(
        logits, [torch.randperm(5000, generator=torch.Generator().manual_seed(0)), torch.arange(3)]
    )


@given(random_few_rows(), st.floats(2.0**-20, 2.0**20, width=32))
@settings(max_examples=examples(20))
def test_temperature_rounds_to_nearest(logits: Tensor, by: float) -> None:
    assert_same("apply_temperature", logits, repeat_to((by, 1.0), len(logits), torch.float32))
