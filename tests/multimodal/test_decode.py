"""Every kind of file that is taken becomes the RGB that it shows; every other is refused in words."""

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


def shown(data: bytes) -> np.ndarray:
    """As transformers' processors see a file that was opened with Pillow and turned upright."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    return np.asarray(convert_to_rgb(image, return_numpy=True))


def see_through(image: Image.Image) -> Image.Image:
    """With an alpha band of every value."""
    ramp = np.resize(np.arange(256, dtype=np.uint8), (image.height, image.width))
    image.putalpha(Image.fromarray(ramp))
    return image


def _palette() -> Image.Image:
    return random_drawing(30, 40).quantize(16)


def _animated() -> bytes:
    frames = [random_drawing(30, 40, seed).quantize(16) for seed in range(3)]
    return encode_image(frames[0], "GIF", save_all=True, append_images=frames[1:])


def _turned(kind: str) -> Callable[[int], bytes]:
    def made(orientation: int) -> bytes:
        exif = Image.Exif()
        exif[0x0112] = orientation
        return encode_image(random_drawing(30, 40), kind, exif=exif)

    return made


SOUND: dict[str, bytes] = {
    "png": encode_image(random_drawing(30, 40)),
    "png-1x1": encode_image(random_drawing(1, 1)),
    "png-interlaced": encode_image(random_drawing(30, 40), interlace=1),
    "png-alpha": encode_image(see_through(random_drawing(30, 40))),
    "png-grey": encode_image(random_drawing(30, 40, bands=1)),
    "png-grey-alpha": encode_image(see_through(random_drawing(30, 40, bands=1))),
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
    "webp-lossless-alpha": encode_image(
        see_through(random_drawing(30, 40)), "WEBP", lossless=True, exact=True
    ),
    "webp-animated": encode_image(
        random_drawing(30, 40), "WEBP", save_all=True, append_images=[random_drawing(30, 40, 1)]
    ),
    "gif": encode_image(_palette(), "GIF"),
    "gif-transparent": encode_image(_palette(), "GIF", transparency=2),
    "gif-animated": _animated(),
    **{f"jpeg-turned-{turn}": _turned("JPEG")(turn) for turn in range(10)},
    "png-turned": _turned("PNG")(6),
    "webp-turned": _turned("WEBP")(8),
}


@pytest.mark.parametrize("name", SOUND)
def test_files_become_what_they_show(name: str) -> None:
    image = decode(SOUND[name], LIMIT)
    assert image.mode == "RGB"
    assert np.array_equal(np.asarray(image), shown(SOUND[name]))


def test_turned_pictures_are_upright() -> None:
    """In numbers that do not come from Pillow: what the camera saw on its side stands."""
    image = decode(_turned("PNG")(6), LIMIT)
    assert np.array_equal(np.asarray(image), np.rot90(np.asarray(random_drawing(30, 40)), -1))


def test_broken_metadata_turns_nothing() -> None:
    exif = b"Exif\0\0II*\0\xff\xff\xff\xff" + bytes(range(40))
    image = decode(encode_image(random_drawing(30, 40), "JPEG", exif=exif), LIMIT)
    assert image.size == (40, 30)


def test_transparency_shows_white_and_not_what_is_behind_it() -> None:
    hidden = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert decode(encode_image(hidden), LIMIT).getcolors() == [(64, (255, 255, 255))]


def test_transparency_in_strips_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = decode(SOUND["png-alpha"], LIMIT)
    monkeypatch.setattr("foreword.multimodal.decode.STRIP_PIXELS", 90)
    assert decode(SOUND["png-alpha"], LIMIT).tobytes() == whole.tobytes()


def test_grey_of_16_bits_keeps_its_shades() -> None:
    """transformers would clip it: everything but the darkest shades white."""
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    values = np.asarray(decode(encode_image(Image.fromarray(ramp)), LIMIT))
    assert np.array_equal(values[:, :, 0], ramp >> 8)
    assert np.array_equal(values[:, :, 0], values[:, :, 2])


def _bomb(kind: bytes) -> bytes:
    """A text in a PNG that becomes 200 MB."""
    text = zlib.compress(bytes(200_000_000), 9)
    head = {b"zTXt": b"Comment\0\0", b"iCCP": b"profile\0\0", b"iTXt": b"Comment\0\1\0\0\0"}[kind]
    return png(2, 2, zlib.compress(bytes(14)), png_chunk(kind, head + text))


def _canvas(width: int, height: int) -> bytes:
    """A WebP file that claims a canvas."""
    head = (
        b"VP8X"
        + struct.pack("<I", 10)
        + b"\x02\0\0\0"
        + (width - 1).to_bytes(3, "little")
        + (height - 1).to_bytes(3, "little")
    )
    return b"RIFF" + struct.pack("<I", len(head) + 4) + b"WEBP" + head


REFUSED: dict[str, tuple[bytes | Callable[[], bytes], str]] = {
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
    "300-megapixels": (lambda: black_png(20_000, 15_000), r"more than 1000000 \(--max-image-pixels\)"),
    "gif-huge": (b"GIF89a" + struct.pack("<HH", 65535, 65535) + SOUND["gif"][10:], "more than 1000000"),
    "webp-huge": (_canvas(16384, 16384), "16384 x 16384 pixels"),
    "1300-kilopixels": (lambda: black_png(1300, 1000), r"^it has 1300 x 1000 pixels, more than 1000000"),
    "narrow": (
        encode_image(random_drawing(1, 201)),
        "^at 201 x 1 pixels one side is more than 200 times the other",
    ),
    "zTXt": (lambda: _bomb(b"zTXt"), "broken: Decompressed data too large"),
    "iTXt": (lambda: _bomb(b"iTXt"), "broken: Decompressed data too large"),
    "iCCP": (lambda: _bomb(b"iCCP"), "broken: Decompressed data too large"),
    "crc": (SOUND["png"][:-20] + b"\xff" + SOUND["png"][-19:], "broken"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_picture_is_refused(name: str) -> None:
    data, message = REFUSED[name]
    with pytest.raises(ImageError, match=message):
        decode(data if isinstance(data, bytes) else data(), LIMIT)


@pytest.mark.parametrize(
    "name", ["png", "png-interlaced", "jpeg", "jpeg-progressive", "webp", "webp-lossless-alpha", "gif"]
)
def test_truncated_files_are_refused(name: str) -> None:
    """Wherever they end, unless only what follows the last pixel is missing: then the picture is whole."""
    data = SOUND[name]
    for end in range(0, len(data), 7):
        try:
            image = decode(data[:end], LIMIT)
        except ImageError:
            continue
        assert end > len(data) - 25
        assert np.array_equal(np.asarray(image), shown(data))


def test_a_frame_larger_than_its_canvas_counts() -> None:
    """GIF: the frame has the last word on the size."""
    data = bytearray(encode_image(random_drawing(30, 40).quantize(4), "GIF"))
    at = data.index(b"\x2c")
    data[at + 5 : at + 9] = struct.pack("<HH", 60_000, 60_000)
    with pytest.raises(ImageError, match="more than 1000000"):
        decode(bytes(data), LIMIT)


def test_nothing_is_said_beside_the_exception(
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
    assert before == Image.MAX_IMAGE_PIXELS, "another user of Pillow in this process keeps its limit"
    assert capfd.readouterr() == ("", "")


def test_four_formats() -> None:
    assert set(FORMATS) == {"PNG", "JPEG", "WEBP", "GIF"}
