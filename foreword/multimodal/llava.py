"""LLaVA-1.5: every picture at the one size that its tower takes.

LLaVA-NeXT: the whole picture once at the tower's size, and then tile by tile at a resolution that suits its shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

from PIL.Image import Image, Resampling

from foreword.core.images import choose_resolution, compute_tiling
from foreword.errors import CheckpointError
from foreword.multimodal.base import ImageLayout, ImageProcessor
from foreword.multimodal.preprocessor_config import (
    ImageSize,
    PreprocessorReader,
    VisionTowerInfo,
    is_int,
    read_tower_info,
)
from foreword.multimodal.transforms import (
    center_crop,
    pad,
    pad_to_square,
    resize,
    scale_to_shortest_edge,
    to_chw,
)

__all__ = ["DEFAULT_IMAGE_SIZE", "LlavaNextProcessor", "LlavaProcessor"]

DEFAULT_IMAGE_SIZE = 224  # of all processors that LLaVA is used with


@dataclass(frozen=True, slots=True)
class LlavaProcessor(ImageProcessor):
    """num_tokens of every picture

    side    of the square that the tower takes, in pixels
    margin  colour with which a picture is made square before anything else; None: it stays as it is
    size    that it is resized to; None: it is not
    crop    whether its middle is cut out
    """

    num_tokens: int
    image_size: int
    pad_colour: tuple[int, int, int] | None
    resize_to: ImageSize | None
    do_center_crop: bool
    resample: Resampling

    @classmethod
    def from_config(
        cls, placeholder_id: int, placeholder_text: str, config: dict[str, Any], options: PreprocessorReader
    ) -> Self:
        """config  of the model"""
        tower = read_tower_info(config)
        siglip = options.processor_family == "Siglip"
        size: ImageSize | None = options.get_size(
            "size", (DEFAULT_IMAGE_SIZE, DEFAULT_IMAGE_SIZE) if siglip else DEFAULT_IMAGE_SIZE
        )
        size = size if options.get_bool("do_resize", True) else None
        crop_size = options.get_size("crop_size", DEFAULT_IMAGE_SIZE)
        crop = options.get_bool("do_center_crop", not siglip)
        _check_image_size(
            options,
            "crop_size" if crop else "size",
            _to_square(crop_size) if crop else size,
            tower.image_size,
        )
        margin = (
            _read_pad_colour(options)
            if options.get_bool("do_pad", False) and options.processor_family == "Llava"
            else None
        )
        return cls(
            placeholder_id,
            placeholder_text,
            tower.num_tokens,
            tower.image_size,
            margin,
            size,
            crop,
            options.get_resample(),
        )

    def layout(self, height: int, width: int) -> ImageLayout:
        return ImageLayout(self.num_tokens, (1, 1, self.num_tokens), (1, 3, self.image_size, self.image_size))

    @property
    def max_pixel_bytes(self) -> int:
        return 3 * self.image_size * self.image_size

    def to_pixels(self, image: Image) -> bytes:
        if self.pad_colour is not None:
            image = pad_to_square(image, self.pad_colour)
        if self.resize_to is not None:
            size = (
                self.resize_to
                if isinstance(self.resize_to, tuple)
                else scale_to_shortest_edge((image.height, image.width), self.resize_to)
            )
            image = resize(image, size, self.resample)
        return to_chw(
            center_crop(image, (self.image_size, self.image_size)) if self.do_center_crop else image
        )


def _to_square(size: ImageSize) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)


def _check_image_size(options: PreprocessorReader, key: str, size: ImageSize | None, image_size: int) -> None:
    if size != (image_size, image_size):
        raise CheckpointError(
            f"{options.source}: pictures must end up at the {image_size} x {image_size} pixels of the model's tower; {key} gives {size}",
            "model",
        )


def _read_pad_colour(options: PreprocessorReader) -> tuple[int, int, int]:
    """The mean colour."""
    mean = options.get("image_mean", [0.48145466, 0.4578275, 0.40821073])
    if (
        not isinstance(mean, list)
        or len(mean) != 3
        or not all(isinstance(item, int | float) and 0 <= item <= 1 for item in mean)
    ):
        raise options.error("image_mean", "a list of 3 numbers from 0 to 1, the colour of margins")
    red, green, blue = (int(item * 255) for item in mean)
    return red, green, blue


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
    def from_config(
        cls, placeholder_id: int, placeholder_text: str, config: dict[str, Any], options: PreprocessorReader
    ) -> Self:
        """config  of the model"""
        tower = read_tower_info(config)
        _check_sizes(options, tower.image_size)
        for key in ("do_resize", "do_center_crop", "do_pad"):
            options.get_bool(
                key, True
            )  # tiles have their size already, and one picture is as large as the largest
        own, wanted = (
            options.get("image_grid_pinpoints", DEFAULT_PINPOINTS),
            config.get("image_grid_pinpoints") or DEFAULT_PINPOINTS,
        )
        if own != wanted:
            raise CheckpointError(
                f"{options.source}: image_grid_pinpoints are not those of config.json", "model"
            )
        return cls(
            placeholder_id,
            placeholder_text,
            tower,
            _read_pinpoints(options, own, tower.image_size),
            options.get_resample(),
        )

    def layout(self, height: int, width: int) -> ImageLayout:
        side = self.tower.image_size
        tiles = compute_tiling((height, width), self.pinpoints, side, self.tower.grid_size)
        num_tokens = self.tower.num_tokens + tiles.num_tokens
        return ImageLayout(num_tokens, (1, 1, num_tokens), (1 + math.prod(tiles.tile_grid), 3, side, side))

    @property
    def max_pixel_bytes(self) -> int:
        return 3 * (self.tower.image_size**2 + max(height * width for height, width in self.pinpoints))

    def to_pixels(self, image: Image) -> bytes:
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
            raise CheckpointError(
                f"{options.source}: {key} must be the {image_size} pixels of the model's tower, got {size}",
                "model",
            )


def _read_pinpoints(
    options: PreprocessorReader, values: object, image_size: int
) -> tuple[tuple[int, int], ...]:
    if (
        not isinstance(values, list)
        or not 1 <= len(values) <= MAX_PINPOINTS
        or not all(_is_pinpoint(one, image_size) for one in values)
    ):
        raise options.error(
            "image_grid_pinpoints", f"(height, width) pairs, multiples of the tower's {image_size} pixels"
        )
    return tuple((height, width) for height, width in values)


def _is_pinpoint(value: object, image_size: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(is_int(length) and length % image_size == 0 for length in value)
        and value[0] * value[1] <= MAX_TILES * image_size * image_size
    )
