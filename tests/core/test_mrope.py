"""M-RoPE positions against a token-by-token loop."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foreword.core.images import PromptImage
from foreword.core.mrope import MRopePositions


def make_image(start: int, grid: tuple[int, int, int]) -> PromptImage:
    return PromptImage(b"", grid[0] * grid[1] * grid[2], grid, (1, 1), (1, 3, 1, 1), b"", start)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[PromptImage], int]:
    """Images of a prompt, and the prompt's length."""
    images: list[PromptImage] = []
    length = draw(st.integers(0, 3))
    for _ in range(draw(st.integers(0, 3))):
        images.append(make_image(length, (1, draw(st.integers(1, 4)), draw(st.integers(1, 5)))))
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
    positions = MRopePositions([make_image(1, (1, 2, 3))])
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
