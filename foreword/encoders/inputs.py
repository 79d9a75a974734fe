"""From what a caller brings to inputs that an encoder can compute: everything wrong is named here. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from foreword.encoders.messages import EncoderInfo, EncoderInput
from foreword.encoders.recipe import POOLINGS
from foreword.errors import ContextLengthExceeded, InvalidRequest, Unsupported

__all__ = ["TokenizedPair", "split_batches", "validate_pairs", "validate_texts"]

MAX_BATCH_TOKENS = 256  # computed at once: twice as many are 3 % faster, and whoever comes next waits for them

TokenizedPair = tuple[Sequence[int], Sequence[int]]  # token ids of both texts together, and their type ids (or none)


def validate_texts(info: EncoderInfo, token_ids: Sequence[Sequence[int]], pooling: str | None) -> list[EncoderInput]:
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
            raise InvalidRequest(f"input[{index}] has {count} token ids and {len(item.type_ids)} type ids", "input")
        for token_id in (min(item.token_ids), max(item.token_ids)):
            if not 0 <= token_id < info.vocab_size:
                raise InvalidRequest(f"input[{index}] holds token id {token_id}; ids are 0 to {info.vocab_size - 1}", "input")
    return inputs
