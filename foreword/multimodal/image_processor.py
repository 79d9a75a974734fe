"""The interface of image processors, and the image transforms that all of them use."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from PIL.Image import Image, Resampling

from foreword.core.images import PromptImage

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """Shape of an image after preprocessing; the fields are those of `PromptImage`."""

    num_tokens: int
    grid: tuple[int, int, int]
    shape: tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class ImageProcessor(ABC):
    """Preprocesses images for one checkpoint. A subclass reproduces a transformers processor bit by bit."""

    placeholder_id: int  # token that represents an image in a prompt
    placeholder_text: str

    @abstractmethod
    def layout(self, height: int, width: int) -> ImageLayout:
        """The layout of an image of this size."""

    @property
    @abstractmethod
    def max_pixel_bytes(self) -> int:
        """Upper bound of an image's bytes; rounding to whole patches may exceed it slightly."""

    @abstractmethod
    def to_pixels(self, image: Image) -> bytes:
        """uint8 pixels of an RGB image in the shape of its layout, not normalized."""

    def preprocess(self, image: Image) -> PromptImage:
        """The prompt image of an RGB image."""
        return self.make_image((image.height, image.width), self.to_pixels(image))

    def make_image(self, size: tuple[int, int], pixels: bytes) -> PromptImage:
        """The prompt image of `to_pixels` of an image of `size` (height, width)."""
        layout = self.layout(*size)
        assert len(pixels) == math.prod(layout.shape), "pixels do not fit their shape"
        digest = hashlib.blake2b(repr((layout.shape, size)).encode(), digest_size=DIGEST_BYTES)
        digest.update(pixels)
        return PromptImage(digest.digest(), layout.num_tokens, layout.grid, size, layout.shape, pixels)


def resize(image: Image, size: tuple[int, int], resample: Resampling) -> Image:
    """`size` is (height, width)."""
    return image.resize(size[::-1], resample)


def to_chw(image: Image) -> bytes:
    """uint8 [3, height, width]"""
    return b"".join(band.tobytes() for band in image.split())
