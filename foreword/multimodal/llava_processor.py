"""Image processors of LLaVA-1.5 (one tile of fixed size) and LLaVA-NeXT (a thumbnail and a grid of tiles)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

from PIL import Image as PILImage
from PIL.Image import Image, Resampling

from foreword.core.images import DEFAULT_PINPOINTS, choose_resolution, compute_tiling, parse_pinpoints
from foreword.errors import CheckpointError
from foreword.multimodal.image_processor import ImageLayout, ImageProcessor, resize, to_chw
from foreword.multimodal.preprocessor_config import (
    ImageSize,
    PreprocessorReader,
    VisionTowerInfo,
    read_tower_info,
)

DEFAULT_IMAGE_SIZE = 224  # default of all image processors used with LLaVA


@dataclass(frozen=True, slots=True)
class LlavaProcessor(ImageProcessor):
    """Pads to a square, resizes, crops the centre; each step is optional."""

    num_tokens: int  # per image
    image_size: int  # side of the vision encoder's input in pixels
    pad_colour: tuple[int, int, int] | None
    resize_to: ImageSize | None
    do_center_crop: bool
    resample: Resampling

    @classmethod
    def from_config(
        cls, placeholder_id: int, placeholder_text: str, config: dict[str, Any], options: PreprocessorReader
    ) -> Self:
        """`config` is the model's config.json."""
        tower, family = read_tower_info(config), options.processor_family
        default_size = (DEFAULT_IMAGE_SIZE, DEFAULT_IMAGE_SIZE) if family == "Siglip" else DEFAULT_IMAGE_SIZE
        size = options.get_size("size", default_size)
        resize_to = size if options.get_bool("do_resize", True) else None
        crop_size = options.get_size("crop_size", DEFAULT_IMAGE_SIZE)
        crop = options.get_bool("do_center_crop", family != "Siglip")
        if crop:
            square = crop_size if isinstance(crop_size, tuple) else (crop_size, crop_size)
            _check_final_size(options, "crop_size", square, tower.image_size)
        else:
            _check_final_size(options, "size", resize_to, tower.image_size)
        do_pad = options.get_bool("do_pad", False) and family == "Llava"
        pad_colour = _read_pad_colour(options) if do_pad else None
        shape = tower.num_tokens, tower.image_size
        resample = options.get_resample()
        return cls(placeholder_id, placeholder_text, *shape, pad_colour, resize_to, crop, resample)

    def layout(self, height: int, width: int) -> ImageLayout:
        return ImageLayout(self.num_tokens, (1, 1, self.num_tokens), (1, 3, self.image_size, self.image_size))

    @property
    def max_pixel_bytes(self) -> int:
        return 3 * self.image_size * self.image_size

    def to_pixels(self, image: Image) -> bytes:
        if self.pad_colour is not None:
            image = _pad_to_square(image, self.pad_colour)
        if isinstance(self.resize_to, tuple):
            image = resize(image, self.resize_to, self.resample)
        elif self.resize_to is not None:
            size = _scale_to_shortest_edge((image.height, image.width), self.resize_to)
            image = resize(image, size, self.resample)
        return to_chw(_center_crop(image, self.image_size) if self.do_center_crop else image)


def _check_final_size(options: PreprocessorReader, key: str, size: ImageSize | None, image_size: int) -> None:
    if size != (image_size, image_size):
        raise CheckpointError(
            f"{options.source}: {key} must give {image_size} x {image_size} pixels, "
            f"the size of the vision encoder, got {size}",
            "model",
        )


def _read_pad_colour(options: PreprocessorReader) -> tuple[int, int, int]:
    """The mean colour, as in transformers."""
    mean = options.get("image_mean", [0.48145466, 0.4578275, 0.40821073])
    is_list = isinstance(mean, list) and len(mean) == 3
    if not is_list or not all(isinstance(value, int | float) and 0 <= value <= 1 for value in mean):
        raise options.error("image_mean", "a list of 3 numbers from 0 to 1, which do_pad uses as colour")
    red, green, blue = (int(value * 255) for value in mean)
    return red, green, blue


def _scale_to_shortest_edge(size: tuple[int, int], shortest_edge: int) -> tuple[int, int]:
    """(height, width) with this shorter side and the same aspect ratio."""
    height, width = size
    if width <= height:
        return int(shortest_edge * height / width), shortest_edge
    return shortest_edge, int(shortest_edge * width / height)


def _center_crop(image: Image, side: int) -> Image:
    """The central square, padded with black if the image is smaller; an odd row or column goes top left."""
    top, left = (
        (length - side) // 2 if length >= side else -((side - length + 1) // 2)
        for length in (image.height, image.width)
    )
    return image.crop((left, top, left + side, top + side))


def _pad_to_square(image: Image, colour: tuple[int, int, int]) -> Image:
    side = max(image.size)
    if image.width == image.height:
        return image
    square = PILImage.new("RGB", (side, side), colour)
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


@dataclass(frozen=True, slots=True)
class LlavaNextProcessor(ImageProcessor):
    """Resizes an image to one tile, and pads it to a grid of tiles at the best resolution."""

    tower: VisionTowerInfo
    pinpoints: tuple[tuple[int, int], ...]  # resolutions (height, width), multiples of the tile's side
    resample: Resampling

    @classmethod
    def from_config(
        cls, placeholder_id: int, placeholder_text: str, config: dict[str, Any], options: PreprocessorReader
    ) -> Self:
        """`config` is the model's config.json."""
        tower = read_tower_info(config)
        for key in ("size", "crop_size"):
            size = options.get_size(key, DEFAULT_IMAGE_SIZE)
            if size not in (tower.image_size, (tower.image_size, tower.image_size)):
                message = f"{key} must be the {tower.image_size} pixels of the vision encoder, got {size}"
                raise CheckpointError(f"{options.source}: {message}", "model")
        for key in ("do_resize", "do_center_crop", "do_pad"):
            options.get_bool(key, True)  # no effect: tiles have their final size
        pinpoints = options.get("image_grid_pinpoints", DEFAULT_PINPOINTS)
        if pinpoints != (config.get("image_grid_pinpoints") or DEFAULT_PINPOINTS):
            message = f"{options.source}: image_grid_pinpoints are not those of config.json"
            raise CheckpointError(message, "model")
        checked = parse_pinpoints(pinpoints, tower.image_size)
        if not checked:
            expected = f"(height, width) pairs, multiples of the vision encoder's {tower.image_size} pixels"
            raise options.error("image_grid_pinpoints", expected)
        return cls(placeholder_id, placeholder_text, tower, checked, options.get_resample())

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
        canvas = _pad(resize(image, _fit_inside(size, best), self.resample), best)
        tiles = [
            canvas.crop((left, top, left + side, top + side))
            for top in range(0, best[0], side)
            for left in range(0, best[1], side)
        ]
        return b"".join(to_chw(tile) for tile in (resize(image, (side, side), self.resample), *tiles))


def _fit_inside(size: tuple[int, int], canvas_size: tuple[int, int]) -> tuple[int, int]:
    """The largest (height, width) with this aspect ratio inside the canvas."""
    (height, width), (rows, columns) = size, canvas_size
    by_width, by_height = columns / width, rows / height
    if by_width < by_height:
        return min(math.ceil(height * by_width), rows), columns
    return rows, min(math.ceil(width * by_height), columns)


def _pad(image: Image, size: tuple[int, int]) -> Image:
    """Pad with black to (height, width); an odd row or column goes bottom right."""
    height, width = size
    left, top = (width - image.width) // 2, (height - image.height) // 2
    return image.crop((-left, -top, width - left, height - top))
