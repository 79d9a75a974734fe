"""LLaVA-1.5: every picture at the one size that its tower takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from PIL.Image import Image, Resampling

from foreword.errors import CheckpointError
from foreword.media.base import ImageLayout, ImageProcessor
from foreword.media.options import PreprocessorReader, ImageSize
from foreword.media.resize import center_crop, pad_to_square, to_chw, resize, scale_to_shortest_edge
from foreword.media.tower import read_tower_info

__all__ = ["DEFAULT_IMAGE_SIZE", "LlavaProcessor"]

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
    def from_config(cls, placeholder_id: int, placeholder_text: str, config: dict[str, Any], options: PreprocessorReader) -> Self:
        """config  of the model"""
        tower = read_tower_info(config)
        siglip = options.processor_family == "Siglip"
        size: ImageSize | None = options.get_size("size", (DEFAULT_IMAGE_SIZE, DEFAULT_IMAGE_SIZE) if siglip else DEFAULT_IMAGE_SIZE)
        size = size if options.get_bool("do_resize", True) else None
        crop_size = options.get_size("crop_size", DEFAULT_IMAGE_SIZE)
        crop = options.get_bool("do_center_crop", not siglip)
        _check_image_size(options, "crop_size" if crop else "size", _to_square(crop_size) if crop else size, tower.image_size)
        margin = _read_pad_colour(options) if options.get_bool("do_pad", False) and options.processor_family == "Llava" else None
        return cls(placeholder_id, placeholder_text, tower.num_tokens, tower.image_size, margin, size, crop, options.get_resample())

    def layout(self, height: int, width: int) -> ImageLayout:
        return ImageLayout(self.num_tokens, (1, 1, self.num_tokens), (1, 3, self.image_size, self.image_size))

    @property
    def max_pixel_bytes(self) -> int:
        return 3 * self.image_size * self.image_size

    def to_pixels(self, image: Image) -> bytes:
        if self.pad_colour is not None:
            image = pad_to_square(image, self.pad_colour)
        if self.resize_to is not None:
            size = self.resize_to if isinstance(self.resize_to, tuple) else scale_to_shortest_edge((image.height, image.width), self.resize_to)
            image = resize(image, size, self.resample)
        return to_chw(center_crop(image, (self.image_size, self.image_size)) if self.do_center_crop else image)


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
    if not isinstance(mean, list) or len(mean) != 3 or not all(isinstance(item, int | float) and 0 <= item <= 1 for item in mean):
        raise options.error("image_mean", "a list of 3 numbers from 0 to 1, the colour of margins")
    red, green, blue = (int(item * 255) for item in mean)
    return red, green, blue
