"""What pictures may cost, and where they may come from: the operator's side, as plain values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from foreword.errors import ConfigError

__all__ = ["MAX_ASPECT_RATIO", "MediaLimits"]

MB: Final = 1_000_000
MAX_ASPECT_RATIO: Final = (
    200  # of the longer side to the shorter, as Qwen's processors demand it; it bounds what resizing may take
)
HOST_PATTERN = re.compile(r"\.?[a-z0-9_-]+(\.[a-z0-9_-]+)*|[0-9a-f:]*:[0-9a-f:.]*")

# Of the processes that decode.
NUM_WORKERS: Final = 2
DECODE_CPU_S: Final = 10.0  # processor time for one picture, until its pixels are ready
DECODE_WALL_S: Final = 30.0  # for a worker that sleeps, or a machine that is overloaded
START_WALL_S: Final = 60.0
QUEUE_TIMEOUT_S: Final = 30.0  # a picture waits no longer for a worker
BYTES_PER_PIXEL: Final = (
    24  # four bands, and a few pictures of the same size while one is turned and laid over white
)
WORKER_BYTES: Final = 256 << 20  # beside its pixels

# Of what is fetched.
MAX_REDIRECTS: Final = 3


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """One server's.

    max_bytes   of a file, before it is decoded
    max_pixels  of a picture, as its file says before it is decoded
    hosts       that http(s) URLs may name, in lower case; ".example.com" stands for every host below example.com
    local_path  directory below which file:// URLs may be read, without symbolic links; None: they are refused
    timeout_s   in which a picture must be fetched, redirects included
    """

    max_bytes: int = 20 * MB
    max_pixels: int = 50_000_000
    allowed_hosts: tuple[str, ...] = ()
    local_path: Path | None = None
    timeout_s: float = 5.0

    @classmethod
    def from_options(
        cls, max_mb: int, max_pixels: int, domains: str, local_path: str | None, timeout_s: float
    ) -> MediaLimits:
        """From the options as they are written. Raises ConfigError."""
        hosts = tuple(_parse_host(name) for name in domains.split(",") if name.strip())
        return cls(
            max_mb * MB,
            max_pixels,
            hosts,
            None if local_path is None else _resolve_directory(local_path),
            timeout_s,
        )


def _parse_host(name: str) -> str:
    host = name.strip().lower().removeprefix("[").removesuffix("]")
    if host.startswith("*."):
        host = host[1:]
    if HOST_PATTERN.fullmatch(host):
        return host
    raise ConfigError(
        f"--allowed-media-domains must be names of hosts joined by commas, such as images.example.com or "
        f".example.com for all below it, without scheme, port or path; got {name.strip()!r:.80}",
        "allowed_media_domains",
    )


def _resolve_directory(path: str) -> Path:
    try:
        found = Path(path).resolve(strict=True)
    except (OSError, RuntimeError, ValueError):
        found = None
    if found is None or not found.is_dir():
        raise ConfigError(
            f"--allowed-local-media-path must be a directory, got {path!r:.200}", "allowed_local_media_path"
        )
    return found
