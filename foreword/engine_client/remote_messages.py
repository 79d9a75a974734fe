"""The JSON between a RemoteClient and the server of an engine elsewhere (server/routes/engine.py).

A session is one streamed response: a line with a Greeting, then a line with a SessionReport for each step, at
least every HEARTBEAT_S. The client's messages go the other way by POST, in order. Both ends check every
field; nothing is unpickled. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Generic, NamedTuple, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter

import foreword.errors as errors
from foreword.config.lora import AdapterInfo
from foreword.core.outputs import BlockUpdate, EmbeddingEvent, StepStats, TokenEvent
from foreword.core.readiness import Readiness
from foreword.core.request import Request
from foreword.engine_client.messages import (
    AddImage,
    DropImage,
    LoadAdapter,
    RemoveRequest,
    SendBlocks,
    UnloadAdapter,
)
from foreword.errors import ForewordError
from foreword.planning.resolve import EngineInfo

T = TypeVar("T")

SESSIONS_PATH: Final = "/engine/sessions"
HEARTBEAT_S: Final = 0.5
CLIENT_INTERVAL_S: Final = 2.0  # longest time without a POST of the client, if need be without a message
LEASE_S: Final = 10.0  # time without a POST after which a session ends
LEFT_TO_RIGHT: Final = Field(union_mode="left_to_right")  # only tokens are an array; other fields differ


@cache
def build_digest() -> str:
    """Digest of this package's sources: others may have other messages, or sample other tokens."""
    root, digest = Path(__file__).parents[1], hashlib.blake2b(digest_size=8)
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


class Codec(Generic[T]):
    """One type as JSON: a value is read back equal, or refused with the name of the field."""

    def __init__(self, message_type: Any) -> None:
        self._type = message_type

    @cached_property
    def _adapter(self) -> TypeAdapter[T]:
        config = ConfigDict(
            extra="forbid", ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="constants"
        )
        return TypeAdapter(self._type, config=config)

    def dumps(self, value: T) -> bytes:
        return self._adapter.dump_json(value, warnings=False)

    def loads(self, data: bytes) -> T:
        """Raises pydantic.ValidationError, or InvalidRequest from SamplingParams."""
        return self._adapter.validate_json(data, strict=True)


@dataclass(frozen=True, slots=True)
class RemoteError:
    """A ForewordError by the name of its class."""

    error: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    request_id: str = ""  # the request that it ends

    @classmethod
    def from_error(cls, error: ForewordError, request_id: str = "") -> RemoteError:
        return cls(type(error).__name__, error.message, error.param, error.retry_after_s, request_id)

    def to_error(self) -> ForewordError:
        """The error; RequestFailed where its class is not known."""
        error_class = getattr(errors, self.error, None)
        if not isinstance(error_class, type) or not issubclass(error_class, ForewordError):
            error_class = errors.RequestFailed
        error = error_class(self.message, self.param)
        error.retry_after_s = self.retry_after_s
        return error


class Greeting(NamedTuple):
    """The first line of a session."""

    build: str  # build_digest() of the server, equal to the client's
    session: str  # its id, with which the ids of all its requests begin
    info: EngineInfo
    now_s: float  # time.monotonic() of the server, from which the client knows the difference of the clocks


class SessionStatus(NamedTuple):
    """The engine as its server sees it."""

    readiness: Readiness
    stats: StepStats
    now_s: float  # time.monotonic() of the server


@dataclass(frozen=True, slots=True)
class ReloadEngine:
    """Replace the engine by a new one; the server answers with a CallResult."""

    call: int


class CallResult(NamedTuple):
    """Reply to LoadAdapter, UnloadAdapter and ReloadEngine."""

    call: int
    info: AdapterInfo | None = None
    error: RemoteError | None = None


class SessionReport(NamedTuple):
    """All that came since the report before."""

    events: tuple[Annotated[TokenEvent | RemoteError | EmbeddingEvent, LEFT_TO_RIGHT], ...] = ()
    steps: tuple[StepStats, ...] = ()
    blocks: tuple[BlockUpdate, ...] = ()
    calls: tuple[CallResult, ...] = ()
    status: SessionStatus | None = None


@dataclass(frozen=True, slots=True)
class SessionMessage:
    """A message of the client: one of the fields."""

    request: Request | None = None  # its images without pixels
    add_image: AddImage | None = None
    drop_image: DropImage | None = None
    remove: RemoveRequest | None = None
    load_adapter: LoadAdapter | None = None
    unload_adapter: UnloadAdapter | None = None
    reload: ReloadEngine | None = None
    send_blocks: SendBlocks | None = None


GREETING: Final[Codec[Greeting]] = Codec(Greeting)
REPORT: Final[Codec[SessionReport]] = Codec(SessionReport)
MESSAGES: Final[Codec[list[SessionMessage]]] = Codec(list[SessionMessage])
