"""LLaVA-NeXT: the whole picture once at the tower's size, and then tile by tile at a resolution that suits its shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

from PIL import Image
from PIL.Image import Resampling

from foreword.core.anyres import choose_resolution, compute_tiling
from foreword.errors import CheckpointError
from foreword.media.base import ImageLayout, ImageProcessor
from foreword.media.llava import DEFAULT_IMAGE_SIZE
from foreword.media.options import PreprocessorReader, is_int
from foreword.media.resize import pad, to_chw, resize
from foreword.media.tower import VisionTowerInfo, read_tower_info

__all__ = ["LlavaNextProcessor"]

DEFAULT_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
MAX_PINPOINTS = 1024
MAX_TILES = 1024


@dataclass(frozen=True, slots=True)
class LlavaNextProcessor(ImageProcessor):
    """pinpoints  resolutions (height, width) that pictures are laid on, multiples of the tower's side"""

    tower: VisionTowerInfo
    pinpoints: tuple[tuple[int, int], ...]
    resample: Resampling

    @classmethod
    def from_config(cls, placeholder_id: int, placeholder_text: str, config: dict[str, Any], options: PreprocessorReader) -> Self:
        """config  of the model"""
        tower = read_tower_info(config)
        _check_sizes(options, tower.image_size)
        for key in ("do_resize", "do_center_crop", "do_pad"):
            options.get_bool(key, True)  # tiles have their size already, and one picture is as large as the largest
        own, wanted = options.get("image_grid_pinpoints", DEFAULT_PINPOINTS), config.get("image_grid_pinpoints") or DEFAULT_PINPOINTS
        if own != wanted:
            raise CheckpointError(f"{options.source}: image_grid_pinpoints are not those of config.json", "model")
        return cls(placeholder_id, placeholder_text, tower, _read_pinpoints(options, own, tower.image_size), options.get_resample())

    def layout(self, height: int, width: int) -> ImageLayout:
        side = self.tower.image_size
        tiles = compute_tiling((height, width), self.pinpoints, side, self.tower.grid_size)
        num_tokens = self.tower.num_tokens + tiles.num_tokens
        return ImageLayout(num_tokens, (1, 1, num_tokens), (1 + math.prod(tiles.tile_grid), 3, side, side))

    @property
    def max_pixel_bytes(self) -> int:
        return 3 * (self.tower.image_size**2 + max(height * width for height, width in self.pinpoints))

    def to_pixels(self, image: Image.Image) -> bytes:
        side, size = self.tower.image_size, (image.height, image.width)
        best = choose_resolution(size, self.pinpoints)
        canvas = pad(resize(image, _fit_inside(size, best), self.resample), best)
        tiles = [
            canvas.crop((left, top, left + side, top + side))
            for top in range(0, best[0], side)
            for left in range(0, best[1], side)
        ]
        return b"".join(to_chw(tile) for tile in (resize(image, (side, side), self.resample), *tiles))


def _fit_inside(size: tuple[int, int], canvas_size: tuple[int, int]) -> tuple[int, int]:
    """The largest size of the same shape that fits into `best`."""
    (height, width), (rows, columns) = size, canvas_size
    by_width, by_height = columns / width, rows / height
    if by_width < by_height:
        return min(math.ceil(height * by_width), rows), columns
    return rows, min(math.ceil(width * by_height), columns)


def _check_sizes(options: PreprocessorReader, image_size: int) -> None:
    for key in ("size", "crop_size"):
        size = options.get_size(key, DEFAULT_IMAGE_SIZE)
        if size not in (image_size, (image_size, image_size)):
            raise CheckpointError(f"{options.source}: {key} must be the {image_size} pixels of the model's tower, got {size}", "model")


def _read_pinpoints(options: PreprocessorReader, values: object, image_size: int) -> tuple[tuple[int, int], ...]:
    if (
        not isinstance(values, list)
        or not 1 <= len(values) <= MAX_PINPOINTS
        or not all(_is_pinpoint(one, image_size) for one in values)
    ):
        raise options.error("image_grid_pinpoints", f"(height, width) pairs, multiples of the tower's {image_size} pixels")
    return tuple((height, width) for height, width in values)


def _is_pinpoint(value: object, image_size: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(is_int(length) and length % image_size == 0 for length in value)
        and value[0] * value[1] <= MAX_TILES * image_size * image_size
    )
