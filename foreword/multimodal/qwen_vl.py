"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: pictures at about their own size, in whole patches that are merged by squares."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

from PIL.Image import Image, Resampling

from foreword.errors import CheckpointError
from foreword.multimodal.base import ImageLayout, ImageProcessor
from foreword.multimodal.preprocessor_config import PreprocessorReader, is_int
from foreword.multimodal.transforms import resize, to_chw

__all__ = ["QwenVLProcessor"]

TEMPORAL_PATCH_SIZE = 2  # a picture is a video of two equal ones, which the tower makes itself
MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280  # where the file does not say
SIZE_KEYS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}  # the other name, within `size`


@dataclass(frozen=True, slots=True)
class QwenVLProcessor(ImageProcessor):
    """factor  pixels that a token stands for, in each direction: patch_size * merge_size"""

    factor: int
    min_pixels: int
    max_pixels: int
    resample: Resampling

    @classmethod
    def from_config(
        cls, placeholder_id: int, placeholder_text: str, config: dict[str, Any], options: PreprocessorReader
    ) -> Self:
        """config  of the model"""
        patch, merge = options.get_int("patch_size", 14), options.get_int("merge_size", 2)
        frames = options.get_int("temporal_patch_size", TEMPORAL_PATCH_SIZE)
        _check_consistent(
            config, options, {"patch_size": patch, "spatial_merge_size": merge, "temporal_patch_size": frames}
        )
        if not options.get_bool("do_resize", True):
            raise CheckpointError(f"{options.source}: do_resize false is not supported", "model")
        low, high = _read_pixel_limits(options)
        return cls(placeholder_id, placeholder_text, patch * merge, low, high, options.get_resample())

    def layout(self, height: int, width: int) -> ImageLayout:
        rows, columns = self._token_grid(height, width)
        return ImageLayout(
            rows * columns, (1, rows, columns), (1, 3, rows * self.factor, columns * self.factor)
        )

    @property
    def max_pixel_bytes(self) -> int:
        return 3 * self.max_pixels

    def to_pixels(self, image: Image) -> bytes:
        rows, columns = self._token_grid(image.height, image.width)
        return to_chw(resize(image, (rows * self.factor, columns * self.factor), self.resample))

    def _token_grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens: as near to the picture's size as the bounds of pixels allow."""
        factor = self.factor
        rows, columns = round(height / factor), round(width / factor)
        if rows * columns * factor**2 > self.max_pixels:
            shrink = math.sqrt((height * width) / self.max_pixels)
            return max(1, math.floor(height / shrink / factor)), max(1, math.floor(width / shrink / factor))
        if rows * columns * factor**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            return math.ceil(height * grow / factor), math.ceil(width * grow / factor)
        return rows, columns


def _read_pixel_limits(options: PreprocessorReader) -> tuple[int, int]:
    """(min_pixels, max_pixels); they have two names and two places."""
    size = options.get("size", {})
    if not isinstance(size, dict) or not size.keys() <= {*SIZE_KEYS, *SIZE_KEYS.values()}:
        raise options.error("size", 'like {"shortest_edge": ..., "longest_edge": ...}, in pixels')
    low, high = (
        options.get(name, size.get(edge, size.get(name, default)))
        for (name, edge), default in zip(SIZE_KEYS.items(), (MIN_PIXELS, MAX_PIXELS), strict=True)
    )
    if not is_int(low) or not is_int(high) or low > high:
        raise CheckpointError(
            f"{options.source}: pixels must be whole numbers, min {low!r:.40} to max {high!r:.40}", "model"
        )
    return low, high


def _check_consistent(config: dict[str, Any], options: PreprocessorReader, expected: dict[str, int]) -> None:
    """The file of the processor and the model's own must agree."""
    vision = config.get("vision_config")
    for key, value in expected.items():
        own = vision.get(key, value) if isinstance(vision, dict) else value
        if own != value:
            raise CheckpointError(
                f"{options.source}: {key} is {value}, but {own!r:.40} in config.json", "model"
            )
