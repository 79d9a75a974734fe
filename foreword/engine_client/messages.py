"""Messages between client and engine process, besides Request, Vocabulary and StepReport."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from foreword.config.lora import AdapterInfo
from foreword.config.options import Config
from foreword.core.request import Request
from foreword.errors import ForewordError
from foreword.planning.memory_plan import ModelDescription
from foreword.planning.resolve import EngineInfo, ResolvedConfig
from foreword.speculation.draft_length.cost_model import MeasuredCosts

# Precedes all messages, with the file descriptors of the HeartbeatPage and, if there is one, of the KVMemory.
SHARED_FDS = b"b"


@dataclass(frozen=True, slots=True)
class Init:
    """To the engine, first: the model to load; a restart brings the last fields, of the engine before."""

    config: Config
    never_sampled_ids: tuple[int, ...]
    resolved: ResolvedConfig | None = None
    timings: MeasuredCosts | None = None
    adapters: tuple[AdapterInfo, ...] | None = None  # None: those of the config
    log_model: str = ""  # prefix of log lines, if the server has several models


@dataclass(frozen=True, slots=True)
class DescribeModels:
    """To the engine process instead of Init: it describes models, and exits."""

    configs: tuple[Config, ...]


@dataclass(frozen=True, slots=True)
class ModelDescriptions:
    """From the process, in the order of the configs: descriptions, or why there is none."""

    results: tuple[ModelDescription | ForewordError, ...]


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """From the engine, see OnLoadProgress."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class EngineReady:
    """From the engine: it accepts requests now."""

    info: EngineInfo
    timings: MeasuredCosts | None


@dataclass(frozen=True, slots=True)
class EngineStartFailed:
    """From the engine, last: it cannot start."""

    error: ForewordError


@dataclass(frozen=True, slots=True)
class RemoveRequest:
    """To the engine: free a request."""

    request_id: str
    num_tokens: int | None = None  # output tokens kept if the client cut the answer; None: aborted


@dataclass(frozen=True, slots=True)
class SetThreads:
    """To the engine: compute with that many threads from the next step on."""

    num_threads: int


@dataclass(frozen=True, slots=True)
class AddImage:
    """To the engine, before the first request with this image: requests themselves have no pixels."""

    digest: bytes
    pixels: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class DropImage:
    """To the engine: no open request has this image."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class SendBlocks:
    """To the engine: the next update of its prefix cache is to be a snapshot."""


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """To the engine, which answers with an AdapterReply."""

    call: int
    path: str


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """To the engine, which answers with an AdapterReply."""

    call: int
    digest: str


@dataclass(frozen=True, slots=True)
class AdapterReply:
    """From the engine: the adapter that it has loaded, if any, or why it has not."""

    call: int
    result: AdapterInfo | ForewordError | None


class SentImages:
    """Images that an engine has: it gets each image once, and keeps it until its last request ends."""

    def __init__(self) -> None:
        self._ref_counts: Counter[bytes] = Counter()

    def add(self, request: Request) -> tuple[list[AddImage], Request]:
        """The images that the engine lacks, to send first, and the request without pixels."""
        if not request.images:
            return [], request
        images = {image.digest: image for image in request.images}
        new = [
            AddImage(digest, image.pixels)
            for digest, image in images.items()
            if image.pixels is not None and not self._ref_counts[digest]
        ]
        self._ref_counts.update(images.keys())
        bare = replace(request, images=tuple(image.without_pixels() for image in request.images))
        return new, bare

    def remove(self, request: Request) -> list[DropImage]:
        """Images that no open request has."""
        released = []
        for digest in {image.digest for image in request.images}:
            self._ref_counts[digest] -= 1
            if not self._ref_counts[digest]:
                del self._ref_counts[digest]
                released.append(DropImage(digest))
        return released
