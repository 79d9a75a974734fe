"""Ordered bits, top_ids, log_sum_exp and prefix filters in Triton against the reference."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foreword.kernels.triton.sampling import MAX_TOP_IDS
from foreword.kernels.triton.topk import (
    compute_block_maxes,
    from_ordered_bits,
    is_finite_row,
    key_to_id,
    ordered_bits,
    sort_keys,
)
from tests.support.budget import examples
from tests.support.cpu_kernels import same_bits
from tests.support.device import DEVICE
from tests.support.kernel_rows import make_row
from tests.support.triton_interpreter import IS_INTERPRETED, program_order
from tests.support.triton_sample_rows import assert_same, random_few_rows

FLOATS = st.floats(width=32, allow_nan=False) | st.sampled_from(
    [0.0, -0.0, math.inf, -math.inf, 2.0**-149, -(2.0**-149)]
)


@triton.jit
def _sort_bits_kernel(values, bits, keys, roundtrip, finite, N, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    ordered = ordered_bits(tl.load(values + place, mask=place < N, other=0.0))
    key = sort_keys(ordered, place)
    tl.store(bits + place, ordered, mask=place < N)
    tl.store(keys + place, key, mask=place < N)
    matches = (place < N) & (key_to_id(key) == place) & (key >> 31 == ordered)
    tl.store(roundtrip + place, from_ordered_bits(ordered), mask=matches)
    tl.store(finite + place, is_finite_row(ordered).to(tl.int64), mask=place < N)


@given(st.lists(FLOATS, min_size=2, max_size=16))
@settings(max_examples=examples(60))
def test_sort_keys_have_the_order_of_ids(values: list[float]) -> None:
    x = torch.tensor([*values, math.nan], device=DEVICE)
    bits, keys, finite = (torch.empty(len(x), dtype=torch.int64, device=DEVICE) for _ in range(3))
    roundtrip = torch.full_like(x, math.pi)
    _sort_bits_kernel[(1,)](x, bits, keys, roundtrip, finite, len(x), BLOCK=32)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert keys[:-1].argsort(descending=True).tolist() == order
    assert all(
        (bits[i] < bits[j]) == (values[i] < values[j]) for i in range(len(values)) for j in range(len(values))
    )
    assert same_bits(roundtrip[:-1].cpu(), torch.where(x == 0, 0.0, x)[:-1].cpu())
    assert finite.tolist() == [int(math.isfinite(value)) for value in x.tolist()]
    assert bits[-1] > bits[:-1].max() and bits.min() >= 0 and bits.max() < 2**32


def test_block_maxes_cover_each_block() -> None:
    logits = torch.stack([make_row("plain", 40, seed) for seed in range(3)]).to(DEVICE)
    maxes = compute_block_maxes(logits, 16)
    assert maxes.shape == (3, 3)
    top = torch.empty_like(maxes).view(-1)
    keys, values, finite = torch.empty_like(top), torch.empty(9, device=DEVICE), torch.empty_like(top)
    _sort_bits_kernel[(1,)](logits.amax(1), top, keys, values, finite, 3, BLOCK=4)
    assert maxes.amax(1).tolist() == top[:3].tolist()


@given(random_few_rows(), st.integers(1, 12))
@settings(max_examples=examples(15))
def test_top_ids_and_log_sum_exp_match_reference(logits: Tensor, k: int) -> None:
    assert_same("top_ids", logits, min(k, logits.shape[1]))
    assert_same("log_sum_exp", logits)


@pytest.mark.parametrize("k", [0, MAX_TOP_IDS, MAX_TOP_IDS + 1, 70])
def test_top_ids_up_to_the_whole_row(k: int) -> None:
    """More ids than are finite, and more than MAX_TOP_IDS."""
    assert_same("top_ids", torch.stack([make_row(kind, 70, 3) for kind in ("ties", "few", "nan")]), k)


def test_ties_across_blocks_go_to_the_lowest_id() -> None:
    row = torch.zeros(1, 100)
    row[0, ::3] = -0.0
    row[0, [40, 97]] = 1.0
    assert_same("top_ids", row, 5)


@pytest.mark.parametrize("k", [32, 63, 99])
def test_top_k_cuts_ties_by_id(k: int) -> None:
    row = torch.zeros(1, 101)
    row[0, 70] = -0.0
    row[0, 90] = 2.0
    row[0, 3] = -torch.inf
    assert_same("apply_top_k", row, torch.tensor([k]))


@pytest.mark.parametrize("operation", ["apply_top_p", "apply_typical_p"])
def test_top_p_and_typical_p_cut_ties_by_id(operation: str) -> None:
    rows = torch.zeros(2, 70)
    rows[:, ::2] = -1.0
    assert_same(operation, rows, torch.tensor([0.3, 0.9]).double())


def test_typical_p_ties_of_different_weight() -> None:
    """Distances on both sides of the mean are equal, probabilities are not."""
    pair = torch.log(torch.tensor([0.5, 0.125]).double())
    row = torch.cat([pair.repeat(20), torch.full((30,), -2.0).double()]).float()[None].repeat(3, 1)
    assert_same("apply_typical_p", row, torch.tensor([0.05, 0.4, 0.95]).double())


def test_p_just_below_one() -> None:
    row = torch.cat([torch.zeros(33), torch.full((33,), -29.0), torch.full((10,), -40.0)])[None]
    share = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    assert_same("apply_top_p", row, share)
    assert_same("apply_typical_p", row, share)


@pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU chooses the order of programs")
@pytest.mark.parametrize("operation", ["apply_top_k", "apply_top_p"])
def test_program_order_changes_no_bit(operation: str) -> None:
    row = make_row("ties", 120, 4)[None]
    bound = torch.tensor([17]) if operation == "apply_top_k" else torch.tensor([0.8]).double()
    with program_order(lambda numbers: numbers[::-1]):
        assert_same(operation, row, bound)
