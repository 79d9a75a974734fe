"""The first ids of rows, across parts, and as many as there are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foreword.kernels.triton.sampling import MAX_TOP_IDS
from tests.support.kernel_rows import make_row
from tests.support.triton_sample_rows import assert_same, random_few_rows


@given(random_few_rows(), st.integers(1, 12))
@settings(max_examples=15, deadline=None)
def test_first_ids_and_sums_of_any_rows(logits: Tensor, k: int) -> None:
    assert_same("top_ids", logits, min(k, logits.shape[1]))
    assert_same("log_sum_exp", logits)


@pytest.mark.parametrize("k", [0, MAX_TOP_IDS, MAX_TOP_IDS + 1, 70])
def test_as_many_as_there_are(k: int) -> None:
    """More ids than are finite, and more than the kernel is for."""
    assert_same("top_ids", torch.stack([make_row(kind, 70, 3) for kind in ("ties", "few", "nan")]), k)


def test_ties_across_parts_go_to_the_lowest_id() -> None:
    row = torch.zeros(1, 100)
    row[0, ::3] = -0.0
    row[0, [40, 97]] = 1.0
    assert_same("top_ids", row, 5)
