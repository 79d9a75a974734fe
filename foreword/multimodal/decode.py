"""Decodes and preprocesses images: the worker process of `multimodal.image_loader`.

A job is two messages: SIZE or PIXELS, then a file. The reply is {"size": [height, width]} or {"reason": ...}.
After the size come the pixels, for PIXELS only. For SIZE, the size is the header's, before EXIF rotation.
"""

from __future__ import annotations

import io
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
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

from foreword.multimodal.image_processor import ImageProcessor
from foreword.multimodal.image_source import MAX_ASPECT_RATIO, MediaLimits
from foreword.workers.worker import serve

FORMATS: Final = tuple(
    plugin.format
    for plugin in (
        PngImagePlugin.PngImageFile,
        JpegImagePlugin.JpegImageFile,
        WebPImagePlugin.WebPImageFile,
        GifImagePlugin.GifImageFile,
    )
)
# Pillow imports these lazily, but a worker cannot open files: multi-picture JPEG, EXIF.
PRELOADED_PLUGINS: Final = (MpoImagePlugin, TiffImagePlugin)
MARKUP = re.compile(rb"(?:\xef\xbb\xbf)?\s*<(?:!DOCTYPE|\?xml|!--|html|svg|head|body)", re.IGNORECASE)
EXIF_ORIENTATION = 0x0112  # EXIF tag
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
STRIP_PIXELS = 1 << 20  # pixels composited at a time
SIZE: Final = b"size"
PIXELS: Final = b"pixels"
MAX_COMMAND_BYTES: Final = 16


class ImageError(Exception):
    """The file is rejected; the text is the reason for the user."""


def decode(data: bytes, max_pixels: int) -> Image.Image:
    """The first frame as upright RGB. Raises ImageError. Not thread-safe: Pillow's limit is global."""
    with _open_image(data, max_pixels) as image:
        image.load()
        _check_size(image.width, image.height, max_pixels)
        return _apply_orientation(_to_rgb(image), image)


def read_size(data: bytes, max_pixels: int) -> tuple[int, int]:
    """(height, width) in the file's header, before EXIF rotation. Raises ImageError. Not thread-safe."""
    with _open_image(data, max_pixels) as image:
        return image.height, image.width


@contextmanager
def _open_image(data: bytes, max_pixels: int) -> Iterator[Image.Image]:
    """Opens an image without decoding it; all exceptions in the block become ImageError."""
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
        raise ImageError(f"it has more than {max_pixels} pixels (--max-image-pixels)") from None
    except MemoryError:
        raise ImageError("it takes too much memory to decode") from None
    except Exception as error:  # decoders of broken files raise anything
        raise ImageError(f"it is truncated or broken: {str(error) or type(error).__name__:.200}") from None


@contextmanager
def _pillow_limits(max_pixels: int) -> Iterator[None]:
    """Set Pillow's limit of pixels, and silence its warnings."""
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
    reason = "it is HTML or XML (an SVG?)" if MARKUP.match(data) else "it is in another format, or broken"
    return f"{reason}; PNG, JPEG, WebP and GIF are supported"


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise ImageError(f"it has {width} x {height} pixels, more than {max_pixels} (--max-image-pixels)")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        ratio = f"one side is more than {MAX_ASPECT_RATIO} times the other"
        raise ImageError(f"it has {width} x {height} pixels: {ratio}")


def _check_webp_canvas(data: bytes, max_pixels: int) -> None:
    """Check an extended WebP file before its decoder allocates the canvas at opening."""
    if data[:4] == b"RIFF" and data[8:16] == b"WEBPVP8X" and len(data) >= 30:
        width, height = (int.from_bytes(data[offset : offset + 3], "little") + 1 for offset in (24, 27))
        _check_size(width, height, max_pixels)


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert to RGB like transformers, with a white background for transparent pixels.

    Exception: transformers clips 16-bit grey, so that almost all becomes white; here the upper byte is used.
    """
    if image.mode.startswith("I"):
        return image.point(lambda value: value * (1 / 256)).convert("L").convert("RGB")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        return _composite_on_white(image)
    return image.convert("RGB")


def _composite_on_white(image: Image.Image) -> Image.Image:
    """Composite in strips, because it allocates several copies."""
    result = Image.new("RGB", image.size)
    step = max(1, STRIP_PIXELS // image.width)
    for top in range(0, image.height, step):
        strip = image.crop((0, top, image.width, min(top + step, image.height))).convert("RGBA")
        result.paste(
            Image.alpha_composite(Image.new("RGBA", strip.size, WHITE), strip).convert("RGB"), (0, top)
        )
    return result


def _apply_orientation(image: Image.Image, source: Image.Image) -> Image.Image:
    """Rotate by the EXIF orientation of `source`; unreadable metadata is ignored."""
    try:
        transpose = ORIENTATION_TRANSPOSES.get(source.getexif().get(EXIF_ORIENTATION, 1))
    except Exception:  # broken EXIF raises anything
        return image
    return image if transpose is None else image.transpose(transpose)


def start(setup: tuple[ImageProcessor, MediaLimits]) -> Callable[[Connection], None]:
    """Returns the handler of jobs."""
    processor, limits = setup
    Image.preinit()  # imports Pillow's plugins: later, no file can be opened

    def handle(connection: Connection) -> None:
        command = connection.recv_bytes(MAX_COMMAND_BYTES)
        data = connection.recv_bytes(limits.max_bytes)
        pixels = None
        try:
            if command == SIZE:
                size = read_size(data, limits.max_pixels)
            else:
                image = decode(data, limits.max_pixels)
                size, pixels = (image.height, image.width), processor.to_pixels(image)
        except ImageError as error:
            reply: dict[str, object] = {"reason": str(error)}
        except MemoryError:
            reply = {"reason": "it takes too much memory to preprocess"}
        else:
            reply = {"size": size}
        connection.send_bytes(json.dumps(reply).encode())
        if pixels is not None:
            connection.send_bytes(pixels)

    return handle


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1]), start))
