"""Decoding: all variants of four formats against Pillow and transformers, and rejected files."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb

from foreword.multimodal.decode import FORMATS, ImageError, decode
from tests.support.image_files import black_png, encode_image, png, png_chunk, random_drawing

LIMIT = 1_000_000


def reference_pixels(data: bytes) -> np.ndarray:
    """Pixels of transformers' processors, after Pillow's EXIF rotation."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    return np.asarray(convert_to_rgb(image, return_numpy=True))


def add_alpha(image: Image.Image) -> Image.Image:
    """Add an alpha band with all values."""
    ramp = np.resize(np.arange(256, dtype=np.uint8), (image.height, image.width))
    image.putalpha(Image.fromarray(ramp))
    return image


def _palette() -> Image.Image:
    return random_drawing(30, 40).quantize(16)


def _animated() -> bytes:
    frames = [random_drawing(30, 40, seed).quantize(16) for seed in range(3)]
    return encode_image(frames[0], "GIF", save_all=True, append_images=frames[1:])


def _rotated(image_format: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode_image(random_drawing(30, 40), image_format, exif=exif)


SOUND: dict[str, bytes] = {
    "png": encode_image(random_drawing(30, 40)),
    "png-1x1": encode_image(random_drawing(1, 1)),
    "png-interlaced": encode_image(random_drawing(30, 40), interlace=1),
    "png-alpha": encode_image(add_alpha(random_drawing(30, 40))),
    "png-grey": encode_image(random_drawing(30, 40, bands=1)),
    "png-grey-alpha": encode_image(add_alpha(random_drawing(30, 40, bands=1))),
    "png-bilevel": encode_image(random_drawing(30, 40, bands=1).convert("1")),
    "png-palette": encode_image(_palette()),
    "png-palette-transparent": encode_image(_palette(), transparency=3),
    "png-palette-alphas": encode_image(_palette(), transparency=bytes(range(0, 256, 16))),
    "png-colour-key": encode_image(Image.new("RGB", (9, 7), (10, 20, 30)), transparency=(10, 20, 30)),
    "png-grey-key": encode_image(random_drawing(30, 40, bands=1), transparency=100),
    "png-animated": encode_image(
        random_drawing(30, 40), save_all=True, append_images=[random_drawing(30, 40, 1)]
    ),
    "jpeg": encode_image(random_drawing(30, 40), "JPEG"),
    "jpeg-progressive": encode_image(random_drawing(30, 40), "JPEG", progressive=True),
    "jpeg-grey": encode_image(random_drawing(30, 40, bands=1), "JPEG"),
    "jpeg-cmyk": encode_image(random_drawing(30, 40).convert("CMYK"), "JPEG"),
    "jpeg-several": encode_image(
        random_drawing(30, 40), "MPO", save_all=True, append_images=[random_drawing(30, 40, 1)]
    ),
    "webp": encode_image(random_drawing(30, 40), "WEBP"),
    "webp-lossless-alpha": encode_image(add_alpha(random_drawing(30, 40)), "WEBP", lossless=True, exact=True),
    "webp-animated": encode_image(
        random_drawing(30, 40), "WEBP", save_all=True, append_images=[random_drawing(30, 40, 1)]
    ),
    "gif": encode_image(_palette(), "GIF"),
    "gif-transparent": encode_image(_palette(), "GIF", transparency=2),
    "gif-animated": _animated(),
    **{f"jpeg-rotated-{orientation}": _rotated("JPEG", orientation) for orientation in range(10)},
    "png-rotated": _rotated("PNG", 6),
    "webp-rotated": _rotated("WEBP", 8),
}


@pytest.mark.parametrize("name", SOUND)
def test_decoded_pixels_are_those_of_the_reference(name: str) -> None:
    image = decode(SOUND[name], LIMIT)
    assert image.mode == "RGB"
    assert np.array_equal(np.asarray(image), reference_pixels(SOUND[name]))


def test_rotated_image_is_decoded_upright() -> None:
    """Against numpy, not Pillow."""
    image = decode(_rotated("PNG", 6), LIMIT)
    assert np.array_equal(np.asarray(image), np.rot90(np.asarray(random_drawing(30, 40)), -1))


def test_broken_exif_is_ignored() -> None:
    exif = b"Exif\0\0II*\0\xff\xff\xff\xff" + bytes(range(40))
    image = decode(encode_image(random_drawing(30, 40), "JPEG", exif=exif), LIMIT)
    assert image.size == (40, 30)


def test_transparent_pixels_become_white() -> None:
    hidden = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert decode(encode_image(hidden), LIMIT).getcolors() == [(64, (255, 255, 255))]


def test_compositing_in_strips_gives_equal_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = decode(SOUND["png-alpha"], LIMIT)
    monkeypatch.setattr("foreword.multimodal.decode.STRIP_PIXELS", 90)
    assert decode(SOUND["png-alpha"], LIMIT).tobytes() == whole.tobytes()


def test_16_bit_grey_keeps_its_shades() -> None:
    """transformers clips it: almost all becomes white."""
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    values = np.asarray(decode(encode_image(Image.fromarray(ramp)), LIMIT))
    assert np.array_equal(values[:, :, 0], ramp >> 8)
    assert np.array_equal(values[:, :, 0], values[:, :, 2])


def _bomb(kind: bytes) -> bytes:
    """A PNG with a text chunk of 200 MB."""
    text = zlib.compress(bytes(200_000_000), 9)
    head = {b"zTXt": b"Comment\0\0", b"iCCP": b"profile\0\0", b"iTXt": b"Comment\0\1\0\0\0"}[kind]
    return png(2, 2, zlib.compress(bytes(14)), png_chunk(kind, head + text))


def _canvas(width: int, height: int) -> bytes:
    """A WebP file that claims a canvas of this size."""
    head = (
        b"VP8X"
        + struct.pack("<I", 10)
        + b"\x02\0\0\0"
        + (width - 1).to_bytes(3, "little")
        + (height - 1).to_bytes(3, "little")
    )
    return b"RIFF" + struct.pack("<I", len(head) + 4) + b"WEBP" + head


REJECTED: dict[str, tuple[bytes | Callable[[], bytes], str]] = {
    "empty": (b"", "it is empty"),
    "svg": (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "HTML or XML"),
    "svg-bare": (b"\n <svg/>", "HTML or XML"),
    "html": (b"<!DOCTYPE html><html></html>", "HTML or XML"),
    "text": (b"hello", "another format"),
    "pdf": (b"%PDF-1.7\n", "another format"),
    "bmp": (encode_image(random_drawing(4, 4), "BMP"), "another format"),
    "tiff": (encode_image(random_drawing(4, 4), "TIFF"), "another format"),
    "ico": (encode_image(random_drawing(16, 16), "ICO"), "another format"),
    "eps": (encode_image(random_drawing(4, 4), "EPS"), "another format"),
    "ppm": (encode_image(random_drawing(4, 4), "PPM"), "another format"),
    "png-head": (b"\x89PNG\r\n\x1a\n", "another format|broken"),
    "300-megapixels": (lambda: black_png(20_000, 15_000), r"more than 1000000 pixels \(--max-image-pixels\)"),
    "gif-huge": (b"GIF89a" + struct.pack("<HH", 65535, 65535) + SOUND["gif"][10:], "more than 1000000"),
    "webp-huge": (_canvas(16384, 16384), "16384 x 16384 pixels"),
    "1300-kilopixels": (lambda: black_png(1300, 1000), r"^it has 1300 x 1000 pixels, more than 1000000"),
    "narrow": (
        encode_image(random_drawing(1, 201)),
        "^it has 201 x 1 pixels: one side is more than 200 times the other",
    ),
    "zTXt": (lambda: _bomb(b"zTXt"), "broken: Decompressed data too large"),
    "iTXt": (lambda: _bomb(b"iTXt"), "broken: Decompressed data too large"),
    "iCCP": (lambda: _bomb(b"iCCP"), "broken: Decompressed data too large"),
    "crc": (SOUND["png"][:-20] + b"\xff" + SOUND["png"][-19:], "broken"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_rejected_file_names_the_reason(name: str) -> None:
    data, message = REJECTED[name]
    with pytest.raises(ImageError, match=message):
        decode(data if isinstance(data, bytes) else data(), LIMIT)


@pytest.mark.parametrize(
    "name", ["png", "png-interlaced", "jpeg", "jpeg-progressive", "webp", "webp-lossless-alpha", "gif"]
)
def test_truncated_file_is_rejected(name: str) -> None:
    """At each length, unless all pixels are complete."""
    data = SOUND[name]
    for end in range(0, len(data), 7):
        try:
            image = decode(data[:end], LIMIT)
        except ImageError:
            continue
        assert end > len(data) - 25
        assert np.array_equal(np.asarray(image), reference_pixels(data))


def test_gif_frame_larger_than_the_canvas_is_rejected() -> None:
    data = bytearray(encode_image(random_drawing(30, 40).quantize(4), "GIF"))
    at = data.index(b"\x2c")
    data[at + 5 : at + 9] = struct.pack("<HH", 60_000, 60_000)
    with pytest.raises(ImageError, match="more than 1000000"):
        decode(bytes(data), LIMIT)


def test_decode_errors_print_nothing(
    capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    before = Image.MAX_IMAGE_PIXELS
    broken: list[Any] = [
        SOUND[name][: len(SOUND[name]) // 2] for name in ("png", "jpeg", "webp", "gif", "jpeg-several")
    ]
    for data in broken:
        with pytest.raises(ImageError):
            decode(data, LIMIT)
    assert not recwarn
    assert before == Image.MAX_IMAGE_PIXELS, "Pillow's global limit must be restored"
    assert capfd.readouterr() == ("", "")


def test_supported_formats() -> None:
    assert set(FORMATS) == {"PNG", "JPEG", "WEBP", "GIF"}
