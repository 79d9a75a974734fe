"""Messages between the encoder process and its client, checks of inputs, operations on vectors. No torch.

Bytes of a vector are float32 in native order.
"""

from __future__ import annotations

import asyncio
import math
import pickle
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import IO, Any

from foreword.config.options import Config
from foreword.embedding.sentence_transformers import POOLINGS
from foreword.errors import ContextLengthExceeded, ForewordError, InvalidRequest, Unsupported, shown

LENGTH_BYTES = 8
MAX_BATCH_TOKENS = 256  # 512 are 3 % faster, but delay the next caller
TokenizedPair = tuple[Sequence[int], Sequence[int]]  # token ids of both texts, and their type ids or ()
FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class EncoderInfo:
    """A loaded encoder."""

    name: str  # last part of the checkpoint's path
    architecture: str
    task: str  # "embed": vectors of texts; "rank": scores of text pairs
    hidden_size: int
    max_tokens: int  # limit of a text or pair, with special tokens
    num_parameters: int
    vocab_size: int
    pooling: str  # the checkpoint's: "cls", "mean", "last" or "max"
    normalize: bool  # whether the checkpoint's vectors have length 1; encode() does not normalize
    backend: str  # name of the kernel backend
    prompts: Mapping[str, str] = field(default_factory=dict)  # name -> prefix of a text
    default_prompt: str | None = None  # name


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """One text or pair of texts."""

    token_ids: tuple[int, ...]
    type_ids: tuple[int, ...] = ()  # index of the text in the pair, per token; empty: all 0
    pooling: str | None = None  # None for a score


@dataclass(frozen=True, slots=True)
class EncodeBatch:
    """To the process: inputs to compute together."""

    batch_id: int
    inputs: tuple[EncoderInput, ...]


@dataclass(frozen=True, slots=True)
class EncodeBatchResult:
    """From the process: per input, float32 [H] as bytes, or float32 [1] for a score."""

    batch_id: int
    vectors: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class EncodeBatchFailed:
    """From the process: this batch failed."""

    batch_id: int
    error: ForewordError


# The process's first message is EncoderInfo once it is ready, or the error if it cannot start.
Message = Config | EncoderInfo | ForewordError | EncodeBatch | EncodeBatchResult | EncodeBatchFailed


def pack_message(message: Message) -> bytes:
    """A message with its frame."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def read_message(file: IO[bytes]) -> Any:
    """The next message. Raises EOFError if the other side closed the connection."""
    return pickle.loads(_read_exactly(file, int.from_bytes(_read_exactly(file, LENGTH_BYTES), "little")))


async def read_message_async(stream: asyncio.StreamReader) -> Any:
    """The next message. Raises EOFError if the other side closed the connection."""
    length = int.from_bytes(await stream.readexactly(LENGTH_BYTES), "little")
    return pickle.loads(await stream.readexactly(length))


def _read_exactly(file: IO[bytes], num_bytes: int) -> bytes:
    data = file.read(num_bytes)
    if len(data) < num_bytes:
        raise EOFError
    return data


def validate_texts(
    info: EncoderInfo, token_ids: Sequence[Sequence[int]], pooling: str | None
) -> list[EncoderInput]:
    """Inputs of texts; `pooling` None is that of the checkpoint. Raises InvalidRequest."""
    if info.task != "embed":
        raise Unsupported(f"{info.name} ranks pairs of texts; it has no embeddings", "model")
    if pooling is not None and pooling not in POOLINGS:
        raise InvalidRequest(f"pooling must be one of {', '.join(POOLINGS)}, got {shown(pooling)}", "pooling")
    return _validate(info, (EncoderInput(tuple(ids), (), pooling or info.pooling) for ids in token_ids))


def validate_pairs(info: EncoderInfo, pairs: Sequence[TokenizedPair]) -> list[EncoderInput]:
    """Inputs of pairs to score. Raises InvalidRequest."""
    if info.task != "rank":
        raise Unsupported(f"{info.name} embeds texts; it does not score pairs of them", "model")
    return _validate(info, (EncoderInput(tuple(ids), tuple(types)) for ids, types in pairs))


def split_batches(inputs: Sequence[EncoderInput]) -> Iterable[Sequence[EncoderInput]]:
    """Split inputs into batches of at most MAX_BATCH_TOKENS tokens."""
    first, tokens = 0, 0
    for index, item in enumerate(inputs):
        if first < index and tokens + len(item.token_ids) > MAX_BATCH_TOKENS:
            yield inputs[first:index]
            first, tokens = index, 0
        tokens += len(item.token_ids)
    if first < len(inputs):
        yield inputs[first:]


def _validate(info: EncoderInfo, inputs: Iterable[EncoderInput]) -> list[EncoderInput]:
    inputs = list(inputs)
    for index, item in enumerate(inputs):
        count = len(item.token_ids)
        if count == 0:
            raise InvalidRequest(f"input[{index}] has no tokens", "input")
        if count > info.max_tokens:
            raise ContextLengthExceeded(
                f"input[{index}] has {count} tokens; {info.name} takes at most {info.max_tokens} "
                "(truncate_prompt_tokens cuts longer ones)",
                "input",
            )
        if item.type_ids and len(item.type_ids) != count:
            raise InvalidRequest(
                f"input[{index}] has {count} token ids and {len(item.type_ids)} type ids", "input"
            )
        for token_id in (min(item.token_ids), max(item.token_ids)):
            if not 0 <= token_id < info.vocab_size:
                raise InvalidRequest(
                    f"input[{index}] has token id {token_id}; ids are 0 to {info.vocab_size - 1}", "input"
                )
    return inputs


def normalize_embedding(vector: bytes, dimensions: int | None = None, normalize: bool = True) -> array[float]:
    """The first `dimensions` values (None: all), scaled to length 1 unless all are zero."""
    values = array("f", vector)[:dimensions]
    length = math.hypot(*values) if normalize else 0.0
    return array("f", [value / length for value in values]) if length else values


def cosine(first: array[float], second: array[float]) -> float:
    """Cosine similarity of two vectors of length 1, from -1 to 1."""
    return max(-1.0, min(1.0, math.fsum(map(mul, first, second))))


def scalar(vector: bytes) -> float:
    """The value of a vector of one dimension."""
    (value,) = array("f", vector)
    return value
