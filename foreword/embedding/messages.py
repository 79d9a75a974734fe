"""What the encoder's process and its client say to each other. Plain values, framed as length and pickle.

From what a caller brings to inputs that an encoder can compute: everything wrong is named here. No torch.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from foreword.config.options import Config
from foreword.embedding.sentence_transformers import POOLINGS
from foreword.errors import ContextLengthExceeded, ForewordError, InvalidRequest, Unsupported

__all__ = [
    "EncodeBatch",
    "EncodeBatchFailed",
    "EncodeBatchResult",
    "EncoderInfo",
    "EncoderInput",
    "EncoderReady",
    "EncoderStartFailed",
    "TokenizedPair",
    "pack_message",
    "read_message",
    "read_message_async",
    "split_batches",
    "validate_pairs",
    "validate_texts",
]

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


MAX_BATCH_TOKENS = (
    256  # computed at once: twice as many are 3 % faster, and whoever comes next waits for them
)

TokenizedPair = tuple[
    Sequence[int], Sequence[int]
]  # token ids of both texts together, and their type ids (or none)


def validate_texts(
    info: EncoderInfo, token_ids: Sequence[Sequence[int]], pooling: str | None
) -> list[EncoderInput]:
    """Texts to embed; `pooling` None is the checkpoint's own. Raises InvalidRequest."""
    if info.task != "embed":
        raise Unsupported(f"{info.name} ranks pairs of texts; it has no embeddings", "model")
    if pooling is not None and pooling not in POOLINGS:
        raise InvalidRequest(f"pooling must be one of {', '.join(POOLINGS)}, got {pooling!r:.80}", "pooling")
    return _validate(info, (EncoderInput(tuple(ids), (), pooling or info.pooling) for ids in token_ids))


def validate_pairs(info: EncoderInfo, pairs: Sequence[TokenizedPair]) -> list[EncoderInput]:
    """Pairs to score. Raises InvalidRequest."""
    if info.task != "rank":
        raise Unsupported(f"{info.name} embeds texts; it does not score pairs of them", "model")
    return _validate(info, (EncoderInput(tuple(ids), tuple(types)) for ids, types in pairs))


def split_batches(inputs: Sequence[EncoderInput]) -> Iterable[Sequence[EncoderInput]]:
    """Consecutive inputs that are computed together."""
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
                    f"input[{index}] holds token id {token_id}; ids are 0 to {info.vocab_size - 1}", "input"
                )
    return inputs
