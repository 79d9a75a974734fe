"""What the engine process and its client say to each other, beside requests and step reports."""

from __future__ import annotations

from dataclasses import dataclass, field

from foreword.config import Config
from foreword.drafting.control.costs import Timings
from foreword.errors import ForewordError
from foreword.resolve import EngineInfo, Resolved

__all__ = ["BOARD", "Forget", "Loading", "Ready", "Refused", "Remove", "Show", "Start"]

BOARD = b"b"  # to the engine, before all messages: goes along with the file descriptor of its board


@dataclass(frozen=True, slots=True)
class Start:
    """To the engine, first: what to load. `resolved` and `timings` are those of the engine that this one replaces."""

    config: Config
    unused_ids: tuple[int, ...]
    resolved: Resolved | None = None
    timings: Timings | None = None


@dataclass(frozen=True, slots=True)
class Loading:
    """From the engine: `done` of `total` bytes of weights are loaded."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Ready:
    """From the engine: it takes requests now."""

    info: EngineInfo
    timings: Timings | None


@dataclass(frozen=True, slots=True)
class Refused:
    """From the engine, last: it cannot start."""

    error: ForewordError


@dataclass(frozen=True, slots=True)
class Remove:
    """To the engine: free this request.

    num_tokens  the client cut its answer after so many output tokens; None: nobody wants it any more
    """

    request_id: str
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Show:
    """To the engine, before the first request with this picture: its pixels, which requests come without."""

    digest: bytes
    pixels: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Forget:
    """To the engine: no open request has this picture any more."""

    digest: bytes
