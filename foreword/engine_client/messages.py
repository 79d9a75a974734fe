"""What the engine process and its client say to each other, beside requests and step reports."""

from __future__ import annotations

from dataclasses import dataclass, field

from foreword.config.options import Config
from foreword.config.resolve import EngineInfo, ResolvedConfig
from foreword.errors import ForewordError
from foreword.speculation.control.cost_model import MeasuredCosts

__all__ = [
    "HEARTBEAT_FD",
    "AddImage",
    "DropImage",
    "EngineReady",
    "EngineStartFailed",
    "Init",
    "LoadProgress",
    "RemoveRequest",
]

HEARTBEAT_FD = b"b"  # to the engine, before all messages: goes along with the file descriptor of its board


@dataclass(frozen=True, slots=True)
class Init:
    """To the engine, first: what to load. `resolved` and `timings` are those of the engine that this one replaces."""

    config: Config
    never_sampled_ids: tuple[int, ...]
    resolved: ResolvedConfig | None = None
    timings: MeasuredCosts | None = None


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """From the engine: `done` of `total` bytes of weights are loaded."""

    loaded_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class EngineReady:
    """From the engine: it takes requests now."""

    info: EngineInfo
    timings: MeasuredCosts | None


@dataclass(frozen=True, slots=True)
class EngineStartFailed:
    """From the engine, last: it cannot start."""

    error: ForewordError


@dataclass(frozen=True, slots=True)
class RemoveRequest:
    """To the engine: free this request.

    num_tokens  the client cut its answer after so many output tokens; None: nobody wants it any more
    """

    request_id: str
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class AddImage:
    """To the engine, before the first request with this picture: its pixels, which requests come without."""

    digest: bytes
    pixels: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class DropImage:
    """To the engine: no open request has this picture any more."""

    digest: bytes
