"""LLaVA-1.5: every picture at the one size that its tower takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from PIL.Image import Image, Resampling

from foreword.errors import CheckpointError
from foreword.media.base import Layout, Processor
from foreword.media.options import Options, Size
from foreword.media.resize import cropped, padded_square, planes, resized, scaled
from foreword.media.tower import read_tower

__all__ = ["DEFAULT_SIDE", "LlavaProcessor"]

DEFAULT_SIDE = 224  # of all processors that LLaVA is used with


@dataclass(frozen=True, slots=True)
class LlavaProcessor(Processor):
    """num_tokens of every picture

    side    of the square that the tower takes, in pixels
    margin  colour with which a picture is made square before anything else; None: it stays as it is
    size    that it is resized to; None: it is not
    crop    whether its middle is cut out
    """

    num_tokens: int
    side: int
    margin: tuple[int, int, int] | None
    size: Size | None
    crop: bool
    resample: Resampling

    @classmethod
    def read(cls, placeholder: int, text: str, config: dict[str, Any], options: Options) -> Self:
        """config  of the model"""
        tower = read_tower(config)
        siglip = options.kind == "Siglip"
        size: Size | None = options.size("size", (DEFAULT_SIDE, DEFAULT_SIDE) if siglip else DEFAULT_SIDE)
        size = size if options.flag("do_resize", True) else None
        crop_size = options.size("crop_size", DEFAULT_SIDE)
        crop = options.flag("do_center_crop", not siglip)
        _check_side(options, "crop_size" if crop else "size", _square(crop_size) if crop else size, tower.side)
        margin = _margin(options) if options.flag("do_pad", False) and options.kind == "Llava" else None
        return cls(placeholder, text, tower.num_tokens, tower.side, margin, size, crop, options.resample())

    def layout(self, height: int, width: int) -> Layout:
        return Layout(self.num_tokens, (1, 1, self.num_tokens), (1, 3, self.side, self.side))

    @property
    def max_bytes(self) -> int:
        return 3 * self.side * self.side

    def pixels(self, image: Image) -> bytes:
        if self.margin is not None:
            image = padded_square(image, self.margin)
        if self.size is not None:
            size = self.size if isinstance(self.size, tuple) else scaled((image.height, image.width), self.size)
            image = resized(image, size, self.resample)
        return planes(cropped(image, (self.side, self.side)) if self.crop else image)


def _square(size: Size) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)


def _check_side(options: Options, key: str, size: Size | None, side: int) -> None:
    if size != (side, side):
        raise CheckpointError(
            f"{options.source}: pictures must end up at the {side} x {side} pixels of the model's tower; {key} gives {size}",
            "model",
        )


def _margin(options: Options) -> tuple[int, int, int]:
    """The mean colour."""
    mean = options.raw("image_mean", [0.48145466, 0.4578275, 0.40821073])
    if not isinstance(mean, list) or len(mean) != 3 or not all(isinstance(item, int | float) and 0 <= item <= 1 for item in mean):
        raise options.bad("image_mean", "a list of 3 numbers from 0 to 1, the colour of margins")
    red, green, blue = (int(item * 255) for item in mean)
    return red, green, blue
