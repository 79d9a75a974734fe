"""The sources of images: a URL, or a file that a Python caller gives; and the operator's limits on them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Final

from PIL.Image import Image

from foreword.errors import ConfigError, InvalidRequest, shown

PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
MB: Final = 1_000_000
MAX_ASPECT_RATIO: Final = 200  # limit of Qwen's processors; bounds the cost of resizing
HOST_PATTERN = re.compile(r"\.?[a-z0-9_-]+(\.[a-z0-9_-]+)*|[0-9a-f:]*:[0-9a-f:.]*")


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
            f"{where} must be a path, file bytes or PIL.Image, got {type(image).__name__}: {shown(image)}",
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


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """The operator's limits on images."""

    max_bytes: int = 20 * MB  # size of a file
    max_pixels: int = 50_000_000  # size of an image, by its header
    allowed_hosts: tuple[str, ...] = ()  # lower case; ".example.com" allows all subdomains of example.com
    local_path: Path | None = None  # resolved root of file:// URLs; None: not allowed
    timeout_s: float = 5.0  # limit of a download, redirects included

    @classmethod
    def from_options(
        cls, max_mb: int, max_pixels: int, domains: str, local_path: str | None, timeout_s: float
    ) -> MediaLimits:
        """Parses command-line options. Raises ConfigError."""
        hosts = tuple(_parse_host(name) for name in domains.split(",") if name.strip())
        root = None if local_path is None else _resolve_directory(local_path)
        return cls(max_mb * MB, max_pixels, hosts, root, timeout_s)


def _parse_host(name: str) -> str:
    host = name.strip().lower().removeprefix("[").removesuffix("]")
    if host.startswith("*."):
        host = host[1:]
    if HOST_PATTERN.fullmatch(host):
        return host
    raise ConfigError(
        f"--allowed-media-domains must be comma-separated host names without scheme, port or path, such as "
        f"images.example.com or .example.com for all subdomains; got {shown(name.strip())}",
        "allowed_media_domains",
    )


def _resolve_directory(path: str) -> Path:
    try:
        resolved = Path(path).resolve(strict=True)
        if resolved.is_dir():
            return resolved
    except (OSError, RuntimeError, ValueError):
        pass
    message = f"--allowed-local-media-path must be a directory, got {shown(path, 200)}"
    raise ConfigError(message, "allowed_local_media_path")
