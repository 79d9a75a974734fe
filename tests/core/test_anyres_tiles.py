"""Anyres tiles against transformers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_next.modeling_llava_next import unpad_image
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

from foreword.core.anyres_tiles import choose_resolution, compute_tiling

RESOLUTIONS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
SIZES = st.tuples(st.integers(1, 3000), st.integers(1, 3000))
LISTS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=6)


@given(SIZES, LISTS)
def test_choose_resolution_like_transformers(size: tuple[int, int], tiles: list[tuple[int, int]]) -> None:
    resolutions = [(336 * rows, 336 * columns) for rows, columns in tiles]
    assert choose_resolution(size, resolutions) == select_best_resolution(size, resolutions)


@given(SIZES)
def test_compute_tiling_like_transformers(size: tuple[int, int]) -> None:
    """Matches both the model and the processor of transformers."""
    made = compute_tiling(size, RESOLUTIONS, tile_size=336, features_per_side=24)
    assert made.tile_grid == tuple(
        length // 336 for length in select_best_resolution(size, list(RESOLUTIONS))
    )
    rows, columns = 24 * made.tile_grid[0], 24 * made.tile_grid[1]
    kept = unpad_image(Shape(rows, columns), size)
    assert kept == (*made.padding, *made.feature_grid)
    counted = LlavaNextProcessor._get_unpadded_features(None, *size, 24, 24, *made.tile_grid)
    assert sum(counted) == made.num_tokens


class Shape:
    """A fake tensor [channels, rows, columns]; slicing returns (first row, first column, rows, columns)."""

    def __init__(self, rows: int, columns: int) -> None:
        self.shape = (1, rows, columns)

    def __getitem__(self, key: tuple[slice, ...]) -> tuple[int, int, int, int]:
        (top, bottom, _), (left, right, _) = (
            one.indices(length)
            for one, length in zip((*key[1:], slice(None))[:2], self.shape[1:], strict=True)
        )
        return top, left, bottom - top, right - left
