"""Limits on images, and the operator's options for their sources."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from foreword.errors import ConfigError

MB: Final = 1_000_000
MAX_ASPECT_RATIO: Final = 200  # limit of Qwen's processors; bounds the cost of resizing
HOST_PATTERN = re.compile(r"\.?[a-z0-9_-]+(\.[a-z0-9_-]+)*|[0-9a-f:]*:[0-9a-f:.]*")

# Decode workers.
NUM_WORKERS: Final = 2
DECODE_CPU_S: Final = 10.0  # CPU time to decode and preprocess one image
DECODE_WALL_S: Final = 30.0  # bounds stalls on an overloaded machine
QUEUE_TIMEOUT_S: Final = 30.0  # wait for a worker
BYTES_PER_PIXEL: Final = 24  # RGBA, and copies for rotation and compositing
WORKER_BYTES: Final = 256 << 20  # besides the pixels

MAX_REDIRECTS: Final = 3


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
        f"images.example.com or .example.com for all subdomains; got {name.strip()!r:.80}",
        "allowed_media_domains",
    )


def _resolve_directory(path: str) -> Path:
    try:
        resolved = Path(path).resolve(strict=True)
        if resolved.is_dir():
            return resolved
    except (OSError, RuntimeError, ValueError):
        pass
    message = f"--allowed-local-media-path must be a directory, got {path!r:.200}"
    raise ConfigError(message, "allowed_local_media_path")
