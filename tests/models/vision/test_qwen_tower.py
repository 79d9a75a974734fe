"""Patch order, windows, attention pieces and interpolated positions, against plain loops."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from foreword.models.vision.qwen3_vl import interpolate_pos_embed
from foreword.models.vision.qwen_tower import (
    ATTN_CHUNK_PAIRS,
    PatchGrid,
    attention_chunks,
    extract_patches,
    partition_windows,
)

cells = st.builds(PatchGrid, st.integers(1, 9), st.integers(1, 9), st.integers(1, 3))


@given(cells=cells)
def test_patches_are_ordered_by_cell(cells: PatchGrid):
    expected = [
        [0, row * cells.merge_size + y, column * cells.merge_size + x]
        for row in range(cells.rows)
        for column in range(cells.columns)
        for y in range(cells.merge_size)
        for x in range(cells.merge_size)
    ]
    assert cells.patch_positions().tolist() == expected
    assert cells.num_patches == len(expected)


@given(cells=cells, size=st.integers(1, 4))
def test_patch_has_the_pixels_of_its_position(cells: PatchGrid, size: int):
    height, width = cells.rows * cells.merge_size * size, cells.columns * cells.merge_size * size
    pixels = torch.arange(3.0 * height * width).view(3, height, width)
    for patch, (_, row, column) in zip(
        extract_patches(pixels, size, cells), cells.patch_positions().tolist(), strict=True
    ):
        own = pixels[:, row * size : (row + 1) * size, column * size : (column + 1) * size]
        assert torch.equal(patch, own.flatten())


@given(cells=cells, side=st.integers(1, 5))
def test_windows_partition_the_image(cells: PatchGrid, side: int):
    order, starts = partition_windows(cells, side)
    assert sorted(order.tolist()) == list(range(cells.rows * cells.columns))
    assert starts[0] == 0 and starts[-1] == cells.num_patches
    windows = [order[a // cells.merge_size**2 : b // cells.merge_size**2] for a, b in pairwise(starts)]
    places = [
        {(one // cells.columns // side, one % cells.columns // side) for one in window.tolist()}
        for window in windows
    ]
    assert all(len(window) == 1 for window in places), "a window has cells of another one"
    assert [min(window) for window in places] == sorted({min(window) for window in places}), (
        "windows come line by line"
    )
    assert all(window.tolist() == sorted(window.tolist()) for window in windows)


@pytest.mark.full
@pytest.mark.parametrize(
    "starts", [(0, 4), (0, 3000), (0, ATTN_CHUNK_PAIRS + 1), (0, 64, 128, 130), (0, 1, 2)]
)
def test_attention_pieces_cover_every_pair_once(starts: tuple[int, ...]):
    pieces = list(attention_chunks(starts))
    covered = [row for piece in pieces for row in (piece.queries.start, piece.queries.stop)]
    assert covered[0] == 0 and covered[-1] == starts[-1] and covered[1:-1:2] == covered[2:-1:2]
    for piece in pieces:
        assert piece.cu_seqlens_q[-1] == piece.queries.stop - piece.queries.start
        assert piece.cu_seqlens_k[-1] == piece.keys.stop - piece.keys.start == starts[-1]
        assert len(starts) > 2 or piece.cu_seqlens_q[-1] * starts[-1] <= max(ATTN_CHUNK_PAIRS, starts[-1])


@given(cells=cells, side=st.integers(1, 6))
def test_positions_are_interpolated_bilinearly(cells: PatchGrid, side: int):
    learned = torch.randn(side * side, 4, generator=torch.Generator().manual_seed(0))
    size = (cells.rows * cells.merge_size, cells.columns * cells.merge_size)
    grid = F.interpolate(
        learned.T.view(1, 4, side, side).double(), size=size, mode="bilinear", align_corners=True
    )[0]
    _, rows, columns = cells.patch_positions().unbind(1)
    torch.testing.assert_close(
        interpolate_pos_embed(learned, side, cells).double(), grid[:, rows, columns].T, atol=2e-6, rtol=0
    )
