"""Images of a prompt: placeholders, M-RoPE positions against a token-by-token loop, anyres tiles."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_next.modeling_llava_next import unpad_image
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

from foreword.core.images import (
    MRopePositions,
    PromptImage,
    choose_resolution,
    compute_tiling,
    expand_placeholders,
)
from foreword.errors import InvalidRequest

PLACEHOLDER = 9

RESOLUTIONS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
SIZES = st.tuples(st.integers(1, 3000), st.integers(1, 3000))
LISTS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=6)


def make_image(num_tokens: int, digest: bytes = b"") -> PromptImage:
    return PromptImage(digest, num_tokens, (1, 1, num_tokens), (4, 2), (1, 3, 4, 2), bytes(24))


@given(st.lists(st.lists(st.integers(0, 8), max_size=3), min_size=1, max_size=4), st.data())
def test_expand_placeholders_keeps_the_text(texts: list[list[int]], data: st.DataObject) -> None:
    """Each placeholder becomes a run of its image's length; the text is unchanged."""
    images = [make_image(data.draw(st.integers(1, 5)), bytes([number])) for number in range(len(texts) - 1)]
    prompt = [*texts[0], *(token_id for text in texts[1:] for token_id in (PLACEHOLDER, *text))]
    ids, found = expand_placeholders(prompt, PLACEHOLDER, images)
    assert [image.digest for image in found] == [image.digest for image in images]
    covered = [index for image in found for index in range(image.start, image.end)]
    assert [index for index, token_id in enumerate(ids) if token_id == PLACEHOLDER] == covered
    assert [token_id for token_id in ids if token_id != PLACEHOLDER] == [
        token_id for text in texts for token_id in text
    ]


def test_image_without_placeholder_is_refused() -> None:
    with pytest.raises(AssertionError, match="without a placeholder"):
        expand_placeholders([1, PLACEHOLDER], PLACEHOLDER, [make_image(2), make_image(2)])


def test_image_must_lie_in_the_prompt() -> None:
    image = make_image(3)
    for start, prompt_len in ((0, 3), (2, 5), (0, 9)):
        replace(image, start=start).check_bounds(prompt_len)
    for start, prompt_len in ((-1, 5), (1, 3), (3, 5)):
        with pytest.raises(InvalidRequest, match=f"image at token {start} exceeds the prompt"):
            replace(image, start=start).check_bounds(prompt_len)


def test_without_pixels_keeps_the_rest() -> None:
    """Images sent to the engine a second time carry no pixels."""
    image = make_image(2, b"d")
    assert (
        image.without_pixels().pixels is None
        and image.without_pixels().digest == image.digest
        and image.without_pixels().without_pixels() == image.without_pixels()
    )
    assert image.num_bytes == len(image.pixels or b"") and "pixels" not in repr(image)


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


def make_grid_image(start: int, grid: tuple[int, int, int]) -> PromptImage:
    return PromptImage(b"", grid[0] * grid[1] * grid[2], grid, (1, 1), (1, 3, 1, 1), b"", start)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[PromptImage], int]:
    """Images of a prompt, and the prompt's length."""
    images: list[PromptImage] = []
    length = draw(st.integers(0, 3))
    for _ in range(draw(st.integers(0, 3))):
        images.append(make_grid_image(length, (1, draw(st.integers(1, 4)), draw(st.integers(1, 5)))))
        length = images[-1].end + draw(st.integers(0, 3))
    return images, length


def walk_positions(images: Sequence[PromptImage], length: int) -> list[tuple[int, int, int]]:
    found: list[tuple[int, int, int]] = []
    after = 0
    starts = {one.start: one for one in images}
    while len(found) < length:
        one = starts.get(len(found))
        if one is None:
            found.append((after, after, after))
            after += 1
            continue
        _, rows, columns = one.grid_thw
        found += [(after, after + row, after + column) for row in range(rows) for column in range(columns)]
        after = max(max(place) for place in found) + 1
    return found


@given(prompts(), st.data())
def test_rows_match_a_token_by_token_walk(prompt: tuple[list[PromptImage], int], data: st.DataObject) -> None:
    """Any range matches the loop, also across the end of the prompt."""
    images, length = prompt
    expected = np.array(walk_positions(images, length + 9)).reshape(-1, 3)
    start = data.draw(st.integers(0, length + 9))
    end = data.draw(st.integers(start, length + 9))
    assert (MRopePositions(images).rows(start, end) == expected[start:end]).all()


def test_offset_is_position_minus_index() -> None:
    """After an image of 2 rows and 3 columns, text continues 3 positions after its start, not 6."""
    positions = MRopePositions([make_grid_image(1, (1, 2, 3))])
    assert positions.rows(0, 9).tolist() == [
        [0, 0, 0],
        [1, 1, 1],
        [1, 1, 2],
        [1, 1, 3],
        [1, 2, 1],
        [1, 2, 2],
        [1, 2, 3],
        [4, 4, 4],
        [5, 5, 5],
    ]


@given(prompts())
def test_positions_never_exceed_indices(prompt: tuple[list[PromptImage], int]) -> None:
    """RoPE tables have one row per index: no position may exceed them."""
    images, length = prompt
    assert (MRopePositions(images).rows(0, length + 5) <= np.arange(length + 5)[:, None]).all()
