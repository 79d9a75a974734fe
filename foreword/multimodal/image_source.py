"""The source of an image: a URL, or a file that a Python caller gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

from PIL.Image import Image

from foreword.errors import InvalidRequest

PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")


@dataclass(frozen=True, slots=True)
class ImageSource:
    """One image of a request: a URL or the bytes of its file."""

    where: str  # field of the request for errors, such as messages[0].content[1].image_url.url
    url: str | None = field(default=None, repr=False)  # data:, http:, https: or file:
    data: bytes | None = field(default=None, repr=False)  # PNG, JPEG, WebP or GIF

    def __post_init__(self) -> None:
        assert (self.url is None) != (self.data is None), "either url or data"


def read_image(image: object, where: str) -> ImageSource:
    """An image of a Python caller: a path, the bytes of a file, or PIL.Image. Raises InvalidRequest."""
    return ImageSource(where, data=_read_file(image, where))


def _read_file(image: object, where: str) -> bytes:
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, Image):
        return _encode_png(image)
    if not isinstance(image, str | Path):
        raise InvalidRequest(
            f"{where} must be a path, file bytes or PIL.Image, got {type(image).__name__}: {image!r:.80}",
            where,
        )
    try:
        return Path(image).read_bytes()
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise InvalidRequest(f"{where}: {image!s:.200} cannot be read: {reason}", where) from None


def _encode_png(image: Image) -> bytes:
    """A PNG without EXIF: an orientation in it would be applied twice."""
    converted = image if image.mode in PNG_MODES else image.convert("RGB")
    file = BytesIO()
    converted.save(file, "PNG", exif=b"", compress_level=1)
    return file.getvalue()
