"""Anyres tiles of an image (LLaVA-NeXT): the best resolution and its grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Size = tuple[int, int]  # (height, width)
ROUND_DIGITS = 7  # digits kept before a length is truncated: 2.9999999999 counts as 3


@dataclass(frozen=True, slots=True)
class Tiling:
    """Anyres tiles of one image, without the overview tile. All fields are (rows, columns).

    The image is scaled into one of a few resolutions, padded, and cut into tiles of the encoder's size.
    An overview tile of the complete image comes first. Features of the padding are dropped.
    """

    tile_grid: Size
    padding: Size  # features dropped on each side
    feature_grid: Size  # features that remain

    @property
    def num_tokens(self) -> int:
        """Tokens after those of the overview tile: each row of features ends with a newline."""
        rows, columns = self.feature_grid
        return rows * (columns + 1)


def choose_resolution(size: Size, resolutions: Sequence[Size]) -> Size:
    """The resolution that keeps most of the image's pixels; of equals the smallest, then the first."""

    def kept_pixels(resolution: Size) -> tuple[int, int]:
        scale = min(resolution[1] / size[1], resolution[0] / size[0])
        pixels = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
        return pixels, -resolution[0] * resolution[1]

    return max(resolutions, key=kept_pixels)


def compute_tiling(size: Size, resolutions: Sequence[Size], tile_size: int, features_per_side: int) -> Tiling:
    """Tiles of `tile_size` pixels, with `features_per_side` features per side, for an image of this size."""
    best = choose_resolution(size, resolutions)
    tiles = (best[0] // tile_size, best[1] // tile_size)
    rows, columns = tiles[0] * features_per_side, tiles[1] * features_per_side
    padding = _padding(size, (rows, columns))
    return Tiling(tiles, padding, (rows - 2 * padding[0], columns - 2 * padding[1]))


def _padding(size: Size, area: Size) -> Size:
    """Rows or columns of the area that the image, scaled to fit, leaves empty on each side."""
    (height, width), (rows, columns) = size, area
    if width / height > columns / rows:
        return (rows - int(round(height * (columns / width), ROUND_DIGITS))) // 2, 0
    return 0, (columns - int(round(width * (rows / height), ROUND_DIGITS))) // 2
