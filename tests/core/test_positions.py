"""M-RoPE's positions against a loop that walks the tokens one by one."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foreword.core.images import MRopePositions, PromptImage


def picture(start: int, grid: tuple[int, int, int]) -> PromptImage:
    return PromptImage(b"", grid[0] * grid[1] * grid[2], grid, (1, 1), (1, 3, 1, 1), b"", start)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[PromptImage], int]:
    """Pictures in a prompt, and its length."""
    pictures: list[PromptImage] = []
    length = draw(st.integers(0, 3))
    for _ in range(draw(st.integers(0, 3))):
        pictures.append(picture(length, (1, draw(st.integers(1, 4)), draw(st.integers(1, 5)))))
        length = pictures[-1].end + draw(st.integers(0, 3))
    return pictures, length


def one_by_one(pictures: Sequence[PromptImage], length: int) -> list[tuple[int, int, int]]:
    found: list[tuple[int, int, int]] = []
    after = 0
    starts = {one.start: one for one in pictures}
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
def test_rows(prompt: tuple[list[PromptImage], int], data: st.DataObject) -> None:
    """Any rows, also across the end of the prompt, are those that a walk finds."""
    pictures, length = prompt
    expected = np.array(one_by_one(pictures, length + 9)).reshape(-1, 3)
    start = data.draw(st.integers(0, length + 9))
    end = data.draw(st.integers(start, length + 9))
    assert (MRopePositions(pictures).rows(start, end) == expected[start:end]).all()


def test_lag() -> None:
    """Behind a picture of 2 rows and 3 columns, text goes on 3 places after its beginning, not 6."""
    positions = MRopePositions([picture(1, (1, 2, 3))])
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
def test_never_ahead_of_the_index(prompt: tuple[list[PromptImage], int]) -> None:
    """Tables of cosines have a line for each index: no position may lie beyond them."""
    pictures, length = prompt
    assert (MRopePositions(pictures).rows(0, length + 5) <= np.arange(length + 5)[:, None]).all()
