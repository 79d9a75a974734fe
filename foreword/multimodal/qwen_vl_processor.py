"""Image processor of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: native resolution, in whole merged patches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

from PIL.Image import Image, Resampling

from foreword.errors import CheckpointError, shown
from foreword.multimodal.image_processor import ImageLayout, ImageProcessor, resize, to_chw
from foreword.multimodal.preprocessor_config import PreprocessorReader, is_int

TEMPORAL_PATCH_SIZE = 2  # an image is a video of two equal frames; the vision encoder repeats it
MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280  # defaults
SIZE_KEYS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}  # option -> its name inside `size`


@dataclass(frozen=True, slots=True)
class QwenVLProcessor(ImageProcessor):
    """Reproduces transformers' Qwen2VLImageProcessor."""

    factor: int  # side of a token in pixels: patch_size * merge_size
    min_pixels: int
    max_pixels: int
    resample: Resampling

    @classmethod
    def from_config(
        cls, placeholder_id: int, placeholder_text: str, config: dict[str, Any], options: PreprocessorReader
    ) -> Self:
        """`config` is the model's config.json."""
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
        shape = (1, 3, rows * self.factor, columns * self.factor)
        return ImageLayout(rows * columns, (1, rows, columns), shape)

    @property
    def max_pixel_bytes(self) -> int:
        return 3 * self.max_pixels

    def to_pixels(self, image: Image) -> bytes:
        rows, columns = self._token_grid(image.height, image.width)
        return to_chw(resize(image, (rows * self.factor, columns * self.factor), self.resample))

    def _token_grid(self, height: int, width: int) -> tuple[int, int]:
        """(rows, columns) of tokens, nearest to the image's size within the limits of pixels."""
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
    """(min_pixels, max_pixels), under either of their names."""
    size = options.get("size", {})
    if not isinstance(size, dict) or not size.keys() <= {*SIZE_KEYS, *SIZE_KEYS.values()}:
        raise options.error("size", 'like {"shortest_edge": ..., "longest_edge": ...}, in pixels')
    low, high = (
        options.get(name, size.get(edge, size.get(name, default)))
        for (name, edge), default in zip(SIZE_KEYS.items(), (MIN_PIXELS, MAX_PIXELS), strict=True)
    )
    if not is_int(low) or not is_int(high) or low > high:
        raise CheckpointError(
            f"{options.source}: pixels must be integers, min {shown(low, 40)} to max {shown(high, 40)}",
            "model",
        )
    return low, high


def _check_consistent(config: dict[str, Any], options: PreprocessorReader, expected: dict[str, int]) -> None:
    """Raises CheckpointError if the processor's options contradict config.json."""
    vision = config.get("vision_config")
    for key, value in expected.items():
        other = vision.get(key, value) if isinstance(vision, dict) else value
        if other != value:
            message = f"{options.source}: {key} is {value}, but {shown(other, 40)} in config.json"
            raise CheckpointError(message, "model")
