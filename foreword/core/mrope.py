"""M-RoPE positions (arXiv 2409.12191): time, row and column of a prompt's tokens, which images shift."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foreword.core.images import PromptImage


class MRopePositions:
    """Time, row and column of each token of one request.

    A text token has three equal coordinates. Tokens of an image share their time, not row and column.
    Text after an image continues at max(position) + 1, so later positions are smaller than token indices.
    """

    __slots__ = ("_prompt", "offset")

    def __init__(self, images: Sequence[PromptImage]) -> None:
        parts: list[NDArray[np.int64]] = []
        index = position = 0
        for image in images:
            parts.append(_text_positions(position, image.start - index))
            position += image.start - index
            grid = np.indices(image.grid_thw, dtype=np.int64)
            parts.append(position + grid.reshape(3, -1).T)
            position += max(image.grid_thw)
            index = image.end
        self._prompt = np.concatenate(parts) if parts else np.empty((0, 3), np.int64)
        self.offset = position - index  # position minus index of a token after the last image

    def rows(self, start: int, end: int) -> NDArray[np.int64]:
        """int64 [end - start, 3]: time, row, column of the tokens from index `start` to `end`."""
        if start >= len(self._prompt):
            return _text_positions(start + self.offset, end - start)
        known = self._prompt[start:end]
        first = start + len(known)
        return np.concatenate((known, _text_positions(first + self.offset, end - first)))


def _text_positions(first: int, count: int) -> NDArray[np.int64]:
    return np.arange(first, first + count, dtype=np.int64).repeat(3).reshape(count, 3)
