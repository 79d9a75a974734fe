"""What a model wants of a picture before its tower sees it: the size, the cut, and how many tokens stand for it."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from PIL.Image import Image

from foreword.core.images import PromptImage

__all__ = ["ImageLayout", "ImageProcessor"]

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """What becomes of a picture of a certain size; the fields are those of `Picture`."""

    num_tokens: int
    grid: tuple[int, int, int]
    shape: tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class ImageProcessor(ABC):
    """Of one checkpoint.

    placeholder       id of the token that stands for a picture in prompts
    placeholder_text  how the chat template writes it
    """

    placeholder_id: int
    placeholder_text: str

    @abstractmethod
    def layout(self, height: int, width: int) -> ImageLayout:
        """For a picture of this size."""

    @property
    @abstractmethod
    def max_pixel_bytes(self) -> int:
        """That the pixels of a picture take at most; a few more where a bound cannot be kept by whole patches."""

    @abstractmethod
    def to_pixels(self, image: Image) -> bytes:
        """Of an RGB image: uint8, in the shape that `layout` says, not normalized."""

    def preprocess(self, image: Image) -> PromptImage:
        """For the prompt and the engine. `image` is RGB."""
        return self.make_image((image.height, image.width), self.to_pixels(image))

    def make_image(self, size: tuple[int, int], pixels: bytes) -> PromptImage:
        """From what `pixels` made of an image of `size` (height, width)."""
        layout = self.layout(*size)
        assert len(pixels) == math.prod(layout.shape), "pixels do not fit their shape"
        return PromptImage(
            _hash_pixels(pixels, layout.shape, size),
            layout.num_tokens,
            layout.grid,
            size,
            layout.shape,
            pixels,
        )


def _hash_pixels(pixels: bytes, shape: tuple[int, ...], size: tuple[int, int]) -> bytes:
    sums = hashlib.blake2b(repr((shape, size)).encode(), digest_size=DIGEST_BYTES)
    sums.update(pixels)
    return sums.digest()
