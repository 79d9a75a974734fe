"""What the encoder's process and its client say to each other. Plain values, framed as length and pickle."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from foreword.config import Config
from foreword.errors import ForewordError

__all__ = ["EncodeBatchResult", "EncoderInfo", "EncodeBatchFailed", "EncoderInput", "EncoderReady", "EncoderStartFailed", "EncodeBatch", "pack_message", "read_message", "read_message_async"]

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
    task: str
    hidden_size: int
    max_tokens: int
    num_parameters: int
    vocab_size: int
    pooling: str
    normalize: bool
    backend: str
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """One text, or one pair of texts, as token ids.

    type_ids  which text of a pair each token belongs to; empty: all to the first
    pooling   None for a score
    """

    token_ids: tuple[int, ...]
    type_ids: tuple[int, ...] = ()
    pooling: str | None = None


@dataclass(frozen=True, slots=True)
class EncodeBatch:
    """To the process: compute these together."""

    batch_id: int
    inputs: tuple[EncoderInput, ...]


@dataclass(frozen=True, slots=True)
class EncodeBatchResult:
    """From the process: float32 [H] of each input as bytes, or float32 [1] for a score."""

    batch_id: int
    vectors: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class EncodeBatchFailed:
    """From the process: this work went wrong; others go on."""

    batch_id: int
    error: ForewordError


@dataclass(frozen=True, slots=True)
class EncoderReady:
    """From the process: it takes work now."""

    info: EncoderInfo


@dataclass(frozen=True, slots=True)
class EncoderStartFailed:
    """From the process, last: it cannot start."""

    error: ForewordError


Message = Config | EncodeBatch | EncodeBatchResult | EncodeBatchFailed | EncoderReady | EncoderStartFailed


def pack_message(message: Message) -> bytes:
    """The bytes of one message."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def read_message(file: IO[bytes]) -> Any:
    """The next message. Raises EOFError where the other side has hung up."""
    return pickle.loads(_read_exactly(file, int.from_bytes(_read_exactly(file, LENGTH_BYTES), "little")))


async def read_message_async(stream: asyncio.StreamReader) -> Any:
    """The next message. Raises EOFError where the other side has hung up."""
    length = int.from_bytes(await stream.readexactly(LENGTH_BYTES), "little")
    return pickle.loads(await stream.readexactly(length))


def _read_exactly(file: IO[bytes], num_bytes: int) -> bytes:
    data = file.read(num_bytes)
    if len(data) < num_bytes:
        raise EOFError
    return data
