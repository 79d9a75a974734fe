"""Ranks are whole numbers of the same order as values, and entries of the order of (value descending, id ascending)."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.kernels.triton.ranks import (
    compute_block_maxes,
    from_ordered_bits,
    is_finite_row,
    key_to_id,
    ordered_bits,
    sort_keys,
)
from tests.support.kernel_rows import make_row, same_bits
from tests.support.triton_sample_rows import DEVICE

FLOATS = st.floats(width=32, allow_nan=False) | st.sampled_from(
    [0.0, -0.0, math.inf, -math.inf, 1e-45, -1e-45]
)


@triton.jit
def _ranks(values, found, entry, again, sound, N, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    rank = ordered_bits(tl.load(values + place, mask=place < N, other=0.0))
    own = sort_keys(rank, place)
    tl.store(found + place, rank, mask=place < N)
    tl.store(entry + place, own, mask=place < N)
    tl.store(
        again + place,
        from_ordered_bits(rank),
        mask=(place < N) & (key_to_id(own) == place) & (own >> 31 == rank),
    )
    tl.store(sound + place, is_finite_row(rank).to(tl.int64), mask=place < N)


@given(st.lists(FLOATS, min_size=2, max_size=16))
@settings(max_examples=60, deadline=None)
def test_order(values: list[float]) -> None:
    x = torch.tensor([*values, math.nan], device=DEVICE)
    found, entry, sound = (torch.empty(len(x), dtype=torch.int64, device=DEVICE) for _ in range(3))
    again = torch.full_like(x, math.pi)
    _ranks[(1,)](x, found, entry, again, sound, len(x), BLOCK=32)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert entry[:-1].argsort(descending=True).tolist() == order
    assert all(
        (found[i] < found[j]) == (values[i] < values[j])
        for i in range(len(values))
        for j in range(len(values))
    )
    assert same_bits(again[:-1].cpu(), torch.where(x == 0, 0.0, x)[:-1].cpu())
    assert sound.tolist() == [int(math.isfinite(value)) for value in x.tolist()]
    assert found[-1] > found[:-1].max() and found.min() >= 0 and found.max() < 2**32


def test_peaks_of_parts() -> None:
    logits = torch.stack([make_row("plain", 40, seed) for seed in range(3)]).to(DEVICE)
    found = compute_block_maxes(logits, 16)
    assert found.shape == (3, 3)
    top = torch.empty_like(found).view(-1)
    _ranks[(1,)](logits.amax(1), top, *(torch.empty_like(top) for _ in range(1)), torch.empty(9, device=DEVICE),
                 torch.empty_like(top), 3, BLOCK=4)  # fmt: skip
    assert found.amax(1).tolist() == top[:3].tolist()
