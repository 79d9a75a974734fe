"""From the bytes of a file to RGB. What happens here happens in a process that may fall: `media.worker`."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from PIL import (
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)
from PIL.Image import Transpose

from foreword.multimodal.limits import MAX_ASPECT_RATIO

__all__ = ["FORMATS", "ImageError", "decode", "read_size"]

FORMATS: Final = tuple(
    plugin.format
    for plugin in (
        PngImagePlugin.PngImageFile,
        JpegImagePlugin.JpegImageFile,
        WebPImagePlugin.WebPImageFile,
        GifImagePlugin.GifImageFile,
    )
)
# Pillow imports these when it needs them, too late for a process that may open no file: JPEG with several pictures, EXIF.
PRELOADED_PLUGINS: Final = (MpoImagePlugin, TiffImagePlugin)
MARKUP = re.compile(rb"(?:\xef\xbb\xbf)?\s*<(?:!DOCTYPE|\?xml|!--|html|svg|head|body)", re.IGNORECASE)
EXIF_ORIENTATION = 0x0112  # an EXIF tag
ORIENTATION_TRANSPOSES: Final = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}
WHITE = (255, 255, 255, 255)
STRIP_PIXELS = 1 << 20  # laid over white at a time


class ImageError(Exception):
    """A file that no model sees, and why: for the caller's eyes."""


def decode(data: bytes, max_pixels: int) -> Image.Image:
    """The first frame as RGB, upright. Raises Refused. For one thread alone: Pillow has settings for all."""
    with _open_image(data, max_pixels) as image:
        image.load()
        _check_size(image.width, image.height, max_pixels)
        return _apply_orientation(_to_rgb(image), image)


def read_size(data: bytes, max_pixels: int) -> tuple[int, int]:
    """(height, width) as the file's head says, which tells nothing of how it is turned. Raises Refused. For one thread, too."""
    with _open_image(data, max_pixels) as image:
        return image.height, image.width


@contextmanager
def _open_image(data: bytes, max_pixels: int) -> Iterator[Image.Image]:
    """Not decoded yet. Whatever is raised until it is closed becomes Refused."""
    _check_webp_canvas(data, max_pixels)
    try:
        with _pillow_limits(max_pixels), Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_size(image.width, image.height, max_pixels)
            yield image
    except ImageError:
        raise
    except UnidentifiedImageError:
        raise ImageError(_describe_unknown(data)) from None
    except Image.DecompressionBombError:
        raise ImageError(f"its pixels are more than {max_pixels} (--max-image-pixels)") from None
    except MemoryError:
        raise ImageError("it takes too much memory to decode") from None
    except Exception as error:  # whatever the decoders of four formats make of a broken file
        raise ImageError(f"it is truncated or broken: {str(error) or type(error).__name__:.200}") from None


@contextmanager
def _pillow_limits(max_pixels: int) -> Iterator[None]:
    """Pillow looks at the size as soon as it knows one, and says nothing but by exceptions."""
    before = Image.MAX_IMAGE_PIXELS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Image.MAX_IMAGE_PIXELS = max_pixels
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = before


def _describe_unknown(data: bytes) -> str:
    if not data:
        return "it is empty"
    what = (
        "it is a text in HTML or XML (an SVG?)"
        if MARKUP.match(data)
        else "it is in another format, or broken"
    )
    return f"{what}; PNG, JPEG, WebP and GIF are supported"


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise ImageError(f"it has {width} x {height} pixels, more than {max_pixels} (--max-image-pixels)")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise ImageError(
            f"at {width} x {height} pixels one side is more than {MAX_ASPECT_RATIO} times the other"
        )


def _check_webp_canvas(data: bytes, max_pixels: int) -> None:
    """Of an extended WebP file: its decoder takes memory for the canvas as soon as it is opened."""
    if data[:4] == b"RIFF" and data[8:16] == b"WEBPVP8X" and len(data) >= 30:
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        _check_size(width, height, max_pixels)


def _to_rgb(image: Image.Image) -> Image.Image:
    """As transformers' processors do it: what is transparent is laid over white.

    16-bit grey is an exception: they clip it, so that all but the darkest is white; here the upper byte is taken, as everywhere
    else in 16-bit files.
    """
    if image.mode.startswith("I"):
        return image.point(lambda value: value * (1 / 256)).convert("L").convert("RGB")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        return _composite_on_white(image)
    return image.convert("RGB")


def _composite_on_white(image: Image.Image) -> Image.Image:
    """Strip by strip, because it takes several pictures of the same size."""
    result = Image.new("RGB", image.size)
    step = max(1, STRIP_PIXELS // image.width)
    for top in range(0, image.height, step):
        strip = image.crop((0, top, image.width, min(top + step, image.height))).convert("RGBA")
        result.paste(
            Image.alpha_composite(Image.new("RGBA", strip.size, WHITE), strip).convert("RGB"), (0, top)
        )
    return result


def _apply_orientation(image: Image.Image, source: Image.Image) -> Image.Image:
    """Turned as `source` says. Metadata that cannot be read says nothing."""
    try:
        turn = ORIENTATION_TRANSPOSES.get(source.getexif().get(EXIF_ORIENTATION, 1))
    except Exception:  # EXIF may hold anything
        return image
    return image if turn is None else image.transpose(turn)
