"""Pictures of a prompt, as plain values: what a model's tower sees, and where its tokens stand.

Positions in several directions (M-RoPE, arXiv 2409.12191): time, row and column of each token.

Where the tiles of a picture lie that is looked at in more detail than one tile has (anyres, as in LLaVA-NeXT).

The picture is scaled into the best of a few resolutions, its margins are filled up, and the result is cut into tiles of
the tower's size. A tile of the whole picture comes first. Features of the margins are dropped again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "MRopePositions",
    "PromptImage",
    "Tiling",
    "choose_resolution",
    "compute_tiling",
    "expand_placeholders",
]


@dataclass(frozen=True, slots=True)
class PromptImage:
    """One picture, prepared for one model.

    digest      16 bytes over pixels, shape and size: equal digests mean equal features
    num_tokens  placeholders that stand for it in the prompt
    grid        (frames, rows, columns) of its tokens, for positions in several directions; one frame here
    size        (height, width) before it was resized, as it is looked at
    shape       of the pixels: (tiles, 3, height, width)
    pixels      uint8, resized and cut as the model wants them but not yet normalized; None: the engine has got them already
    start       index of its first placeholder in the prompt
    """

    digest: bytes
    num_tokens: int
    grid_thw: tuple[int, int, int]
    original_size: tuple[int, int]
    shape: tuple[int, int, int, int]
    pixels: bytes | None = field(repr=False)
    start: int = 0

    @property
    def end(self) -> int:
        """Index behind its last placeholder."""
        return self.start + self.num_tokens

    @property
    def num_bytes(self) -> int:
        """Of its pixels."""
        tiles, channels, height, width = self.shape
        return tiles * channels * height * width

    def without_pixels(self) -> PromptImage:
        """Without its pixels."""
        return self if self.pixels is None else replace(self, pixels=None)


def expand_placeholders(
    prompt_ids: Sequence[int], placeholder_id: int, images: Sequence[PromptImage]
) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
    """The prompt with as many placeholders for each picture as it has tokens, and the pictures where they stand.

    prompt_ids  with one placeholder for each picture, in their order; the caller has counted them
    """
    ids: list[int] = []
    found: list[PromptImage] = []
    for token_id in prompt_ids:
        if token_id != placeholder_id:
            ids.append(token_id)
            continue
        picture = replace(images[len(found)], start=len(ids))
        found.append(picture)
        ids.extend([placeholder_id] * picture.num_tokens)
    assert len(found) == len(images), "a picture without a placeholder"
    return tuple(ids), tuple(found)


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


Size = tuple[int, int]  # (height, width)
ROUND_DIGITS = 7  # kept before a length is cut to a whole number: 2.9999999999 is 3


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles of one picture, and what remains of their features, both without the first tile.

    tiles   (rows, columns)
    margin  (rows, columns) of features that are dropped on each side
    kept    (rows, columns) of features that remain
    """

    tile_grid: Size
    padding: Size
    feature_grid: Size

    @property
    def num_tokens(self) -> int:
        """Behind those of the first tile: each row of features ends with a newline."""
        rows, columns = self.feature_grid
        return rows * (columns + 1)


def choose_resolution(size: Size, resolutions: Sequence[Size]) -> Size:
    """The one that keeps most of the picture's pixels, of those the smallest, of those the first."""

    def worth(resolution: Size) -> tuple[int, int]:
        scale = min(resolution[1] / size[1], resolution[0] / size[0])
        pixels = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
        return pixels, -resolution[0] * resolution[1]

    return max(resolutions, key=worth)


def compute_tiling(size: Size, resolutions: Sequence[Size], tile_size: int, features_per_side: int) -> Tiling:
    """Of a picture of this size; `tile` pixels and `features` features are a tile's side."""
    best = choose_resolution(size, resolutions)
    tiles = (best[0] // tile_size, best[1] // tile_size)
    rows, columns = tiles[0] * features_per_side, tiles[1] * features_per_side
    margin = _padding(size, (rows, columns))
    return Tiling(tiles, margin, (rows - 2 * margin[0], columns - 2 * margin[1]))


def _padding(size: Size, filled: Size) -> Size:
    """What a picture of this size leaves free on each side of an area, above and below it or left and right of it."""
    (height, width), (rows, columns) = size, filled
    if width / height > columns / rows:
        return (rows - int(round(height * (columns / width), ROUND_DIGITS))) // 2, 0
    return 0, (columns - int(round(width * (rows / height), ROUND_DIGITS))) // 2
