"""Where the tiles of a picture lie that is looked at in more detail than one tile has (anyres, as in LLaVA-NeXT).

The picture is scaled into the best of a few resolutions, its margins are filled up, and the result is cut into tiles of
the tower's size. A tile of the whole picture comes first. Features of the margins are dropped again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Tiling", "choose_resolution", "compute_tiling"]

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
