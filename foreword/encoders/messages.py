"""What the encoder's process and its client say to each other. Plain values, framed as length and pickle."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from foreword.config import Config
from foreword.errors import ForewordError

__all__ = ["Done", "EncoderInfo", "Failure", "Input", "Ready", "Refused", "Work", "framed", "read_from", "read_stream"]

LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class EncoderInfo:
    """Facts of a loaded encoder.

    name        of the checkpoint: the last part of its path
    kind        "embed": texts become vectors; "rank": pairs of texts become scores
    hidden      values of a vector
    max_tokens  longest text, or pair of texts, special tokens included
    pooling     how the checkpoint makes one vector of a text: "cls", "mean", "last" or "max"
    normalize   the checkpoint scales its vectors to length 1 (encode() does not: see there)
    backend     name of the kernel backend
    prompts     texts that the checkpoint wants in front of an input, by purpose; default_prompt is the purpose if none is named
    """

    name: str
    architecture: str
    kind: str
    hidden: int
    max_tokens: int
    parameters: int
    vocab_size: int
    pooling: str
    normalize: bool
    backend: str
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


@dataclass(frozen=True, slots=True)
class Input:
    """One text, or one pair of texts, as token ids.

    type_ids  which text of a pair each token belongs to; empty: all to the first
    pooling   None for a score
    """

    token_ids: tuple[int, ...]
    type_ids: tuple[int, ...] = ()
    pooling: str | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """To the process: compute these together."""

    number: int
    inputs: tuple[Input, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """From the process: float32 [H] of each input as bytes, or float32 [1] for a score."""

    number: int
    vectors: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """From the process: this work went wrong; others go on."""

    number: int
    error: ForewordError


@dataclass(frozen=True, slots=True)
class Ready:
    """From the process: it takes work now."""

    info: EncoderInfo


@dataclass(frozen=True, slots=True)
class Refused:
    """From the process, last: it cannot start."""

    error: ForewordError


Message = Config | Work | Done | Failure | Ready | Refused


def framed(message: Message) -> bytes:
    """The bytes of one message."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def read_from(file: IO[bytes]) -> Any:
    """The next message. Raises EOFError where the other side has hung up."""
    return pickle.loads(_exactly(file, int.from_bytes(_exactly(file, LENGTH_BYTES), "little")))


async def read_stream(stream: asyncio.StreamReader) -> Any:
    """The next message. Raises EOFError where the other side has hung up."""
    length = int.from_bytes(await stream.readexactly(LENGTH_BYTES), "little")
    return pickle.loads(await stream.readexactly(length))


def _exactly(file: IO[bytes], count: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise EOFError
    return data
