"""Messages between client and engine process, besides Request, Vocabulary and StepReport."""

from __future__ import annotations

from dataclasses import dataclass, field

from foreword.config.lora import AdapterInfo
from foreword.config.options import Config
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
