"""LLaVA-NeXT: the whole picture once at the tower's size, and then tile by tile at a resolution that suits its shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

from PIL import Image
from PIL.Image import Resampling

from foreword.core.anyres import best_resolution, tiling
from foreword.errors import CheckpointError
from foreword.media.base import Layout, Processor
from foreword.media.llava import DEFAULT_SIDE
from foreword.media.options import Options, is_whole
from foreword.media.resize import padded, planes, resized
from foreword.media.tower import TowerFacts, read_tower

__all__ = ["LlavaNextProcessor"]

PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
MAX_PINPOINTS = 1024
MAX_TILES = 1024


@dataclass(frozen=True, slots=True)
class LlavaNextProcessor(Processor):
    """pinpoints  resolutions (height, width) that pictures are laid on, multiples of the tower's side"""

    tower: TowerFacts
    pinpoints: tuple[tuple[int, int], ...]
    resample: Resampling

    @classmethod
    def read(cls, placeholder: int, text: str, config: dict[str, Any], options: Options) -> Self:
        """config  of the model"""
        tower = read_tower(config)
        _check_sizes(options, tower.side)
        for key in ("do_resize", "do_center_crop", "do_pad"):
            options.flag(key, True)  # tiles have their size already, and one picture is as large as the largest
        own, wanted = options.raw("image_grid_pinpoints", PINPOINTS), config.get("image_grid_pinpoints") or PINPOINTS
        if own != wanted:
            raise CheckpointError(f"{options.source}: image_grid_pinpoints are not those of config.json", "model")
        return cls(placeholder, text, tower, _pinpoints(options, own, tower.side), options.resample())

    def layout(self, height: int, width: int) -> Layout:
        side = self.tower.side
        tiles = tiling((height, width), self.pinpoints, side, self.tower.grid)
        num_tokens = self.tower.num_tokens + tiles.num_tokens
        return Layout(num_tokens, (1, 1, num_tokens), (1 + math.prod(tiles.tiles), 3, side, side))

    @property
    def max_bytes(self) -> int:
        return 3 * (self.tower.side**2 + max(height * width for height, width in self.pinpoints))

    def pixels(self, image: Image.Image) -> bytes:
        side, size = self.tower.side, (image.height, image.width)
        best = best_resolution(size, self.pinpoints)
        canvas = padded(resized(image, _inside(size, best), self.resample), best)
        tiles = [
            canvas.crop((left, top, left + side, top + side))
            for top in range(0, best[0], side)
            for left in range(0, best[1], side)
        ]
        return b"".join(planes(tile) for tile in (resized(image, (side, side), self.resample), *tiles))


def _inside(size: tuple[int, int], best: tuple[int, int]) -> tuple[int, int]:
    """The largest size of the same shape that fits into `best`."""
    (height, width), (rows, columns) = size, best
    by_width, by_height = columns / width, rows / height
    if by_width < by_height:
        return min(math.ceil(height * by_width), rows), columns
    return rows, min(math.ceil(width * by_height), columns)


def _check_sizes(options: Options, side: int) -> None:
    for key in ("size", "crop_size"):
        size = options.size(key, DEFAULT_SIDE)
        if size not in (side, (side, side)):
            raise CheckpointError(f"{options.source}: {key} must be the {side} pixels of the model's tower, got {size}", "model")


def _pinpoints(options: Options, values: object, side: int) -> tuple[tuple[int, int], ...]:
    if (
        not isinstance(values, list)
        or not 1 <= len(values) <= MAX_PINPOINTS
        or not all(_is_pinpoint(one, side) for one in values)
    ):
        raise options.bad("image_grid_pinpoints", f"(height, width) pairs, multiples of the tower's {side} pixels")
    return tuple((height, width) for height, width in values)


def _is_pinpoint(value: object, side: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(is_whole(length) and length % side == 0 for length in value)
        and value[0] * value[1] <= MAX_TILES * side * side
    )
