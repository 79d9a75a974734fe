"""Texts become the engine's requests for vectors."""

from __future__ import annotations

import time
from collections.abc import Sequence

from foreword.core.params import SamplingParams
from foreword.core.request import POOLING_TYPES, Request
from foreword.errors import ContextLengthExceeded, InvalidRequest

__all__ = ["check_input", "make_embedding_requests"]

NO_SAMPLING_PARAMS = SamplingParams()


def make_embedding_requests(
    inputs: Sequence[Sequence[int]],
    pooling: str,
    request_id: str,
    cache_salt: str = "",
    priority: int = 0,
    image_token_id: int | None = None,
) -> list[Request]:
    """One for each input, which check_input() has seen: ids "X-0", "X-1", ...

    pooling      one of POOLINGS
    placeholder  the id that stands for pictures, of which there are none here
    Raises InvalidRequest.
    """
    if pooling not in POOLING_TYPES:
        raise InvalidRequest(f"pooling must be one of {', '.join(POOLING_TYPES)}, got {pooling!r:.80}", "pooling")
    for index, ids in enumerate(inputs):
        if image_token_id is not None and image_token_id in ids:
            raise InvalidRequest(f"input[{index}] has the token {image_token_id} in it, which stands for a picture", "input")
    now = time.monotonic()
    return [
        Request(
            id=f"{request_id}-{index}",
            prompt_ids=tuple(ids),
            params=NO_SAMPLING_PARAMS,
            seed=0,
            priority=priority,
            cache_salt=cache_salt,
            pooling=pooling,
            arrival_s=now,
        )
        for index, ids in enumerate(inputs)
    ]


def check_input(name: str, ids: Sequence[int], max_tokens: int, vocab_size: int) -> None:
    """Raises ContextLengthExceeded, or InvalidRequest, which call the input by its name."""
    if not ids:
        raise InvalidRequest(f"{name} has no tokens", name)
    if len(ids) > max_tokens:
        raise ContextLengthExceeded(
            f"{name} has {len(ids)} tokens; the model takes at most {max_tokens} (truncate_prompt_tokens cuts longer ones)", name
        )
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{name} holds {token_id!r:.40}; token ids are 0 to {vocab_size - 1}", name)
