"""Positions in several directions (M-RoPE, arXiv 2409.12191): time, row and column of each token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foreword.core.pictures import PromptImage

__all__ = ["MRopePositions"]


class MRopePositions:
    """Where the tokens of one request stand.

    A text token stands at the same place in all three directions. The tokens of a picture share their time and differ in row
    and column; what follows goes on behind the furthest of them, so that positions lag behind indices from then on.

    shift  a token behind the last picture stands at its index + shift
    """

    __slots__ = ("_prompt", "offset")

    def __init__(self, images: Sequence[PromptImage]) -> None:
        parts: list[NDArray[np.int64]] = []
        index = position = 0
        for picture in images:
            parts.append(_text_positions(position, picture.start - index))
            position += picture.start - index
            parts.append(_image_positions(position, picture.grid_thw))
            position += max(picture.grid_thw)
            index = picture.end
        self._prompt = np.concatenate(parts) if parts else np.empty((0, 3), np.int64)
        self.offset = position - index

    def rows(self, start: int, end: int) -> NDArray[np.int64]:
        """int64 [end - start, 3]: time, row, column of the tokens from index `start` to `end`."""
        if start >= len(self._prompt):  # a row behind the prompt, as most are
            return _text_positions(start + self.offset, end - start)
        known = self._prompt[start:end]
        first = start + len(known)
        return np.concatenate((known, _text_positions(first + self.offset, end - first)))


def _text_positions(first: int, count: int) -> NDArray[np.int64]:
    return np.arange(first, first + count, dtype=np.int64).repeat(3).reshape(count, 3)


def _image_positions(first: int, grid: tuple[int, int, int]) -> NDArray[np.int64]:
    return first + np.indices(grid, dtype=np.int64).reshape(3, -1).T
