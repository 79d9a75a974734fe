"""Steps that processors share. Images are RGB; sizes are (height, width)."""

from __future__ import annotations

from PIL import Image
from PIL.Image import Resampling

__all__ = ["center_crop", "pad", "pad_to_square", "resize", "scale_to_shortest_edge", "to_chw"]


def scale_to_shortest_edge(size: tuple[int, int], shortest_edge: int) -> tuple[int, int]:
    """The size at which the shorter side is `shortest`, and the ratio is kept."""
    height, width = size
    if width <= height:
        return int(shortest_edge * height / width), shortest_edge
    return shortest_edge, int(shortest_edge * width / height)


def resize(image: Image.Image, size: tuple[int, int], resample: Resampling) -> Image.Image:
    height, width = size
    return image.resize((width, height), resample)


def center_crop(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Its middle; black around it where it is too small, the odd line above or to the left."""
    height, width = size
    top, left = _center_offset(image.height, height), _center_offset(image.width, width)
    return image.crop((left, top, left + width, top + height))


def _center_offset(length: int, target: int) -> int:
    """Where the middle begins."""
    return (length - target) // 2 if length >= target else -((target - length + 1) // 2)


def pad(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """In the middle of a black one, at least as large; the odd line is below or to the right."""
    height, width = size
    left, top = (width - image.width) // 2, (height - image.height) // 2
    return image.crop((-left, -top, width - left, height - top))


def pad_to_square(image: Image.Image, colour: tuple[int, int, int]) -> Image.Image:
    """With margins of `colour` on both sides of the shorter dimension."""
    side = max(image.size)
    if image.width == image.height:
        return image
    square = Image.new("RGB", (side, side), colour)
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def to_chw(image: Image.Image) -> bytes:
    """uint8 [3, height, width]"""
    return b"".join(band.tobytes() for band in image.split())
