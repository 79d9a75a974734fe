"""Image files, made by Pillow or by hand."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

CELL = 8
PNG_HEAD = b"\x89PNG\r\n\x1a\n"


def random_drawing(height: int, width: int, seed: int = 0, bands: int = 3) -> Image.Image:
    """Coloured cells with some noise."""
    rng = np.random.default_rng(seed)
    shape = (height, width, bands)
    cells = rng.integers(0, 256, (-(-height // CELL), -(-width // CELL), bands))
    large = np.kron(cells, np.ones((CELL, CELL, 1), int))[:height, :width]
    pixels = np.clip(large + rng.integers(-20, 21, shape), 0, 255).astype(np.uint8)
    return Image.fromarray(pixels if bands > 1 else pixels[:, :, 0])


def encode_image(image: Image.Image, image_format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, image_format, **options)
    return file.getvalue()


def png_chunk(chunk_type: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + chunk_type + data + struct.pack(">I", zlib.crc32(chunk_type + data))


def png(width: int, height: int, data: bytes, *extra: bytes, depth: int = 8, colour: int = 2) -> bytes:
    """A PNG file with this compressed `data`, after the extra chunks."""
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return PNG_HEAD + head + b"".join(extra) + png_chunk(b"IDAT", data) + png_chunk(b"IEND", b"")


def black_png(width: int, height: int) -> bytes:
    """A black image of 1 bit per pixel: a small file with many pixels."""
    row = b"\0" * (1 + -(-width // 8))
    packer = zlib.compressobj(9)
    data = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    return png(width, height, data, depth=1, colour=0)
