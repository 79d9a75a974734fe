"""Prompts that become vectors: a pass of its own in a step, which yields hidden states instead of logits.

The rows that are sampled keep the program they have without it. Hidden states do not depend on the other rows of a
pass, and the sums of a mean have one order however the prompt was cut, so that neither does the vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from foreword.core.batch import Batch
from foreword.engine.schedule import ScheduledRequest
from foreword.errors import RequestFailed
from foreword.kv_cache.storage import KVStorage
from foreword.models.base import Model

__all__ = ["PARTIAL_SUMS", "PoolOutput", "Pooler", "accumulate", "num_pool_rows", "reduce_mean"]

PARTIAL_SUMS = 32
NOT_FINITE = "the hidden states of the prompt are not finite"


@dataclass(frozen=True, slots=True)
class PoolOutput:
    """What a pass yielded for one prompt.

    vector  float32 [H] in native byte order; None while tokens of the prompt are missing
    lanes   what RequestState.lanes becomes once the step is taken
    error   why there is no vector, or None
    """

    vector: bytes | None = None
    partials: Tensor | None = None
    error: RequestFailed | None = None


class Pooler:
    """The model without its head. A pass changes nothing of its requests, so that it may be run again."""

    def __init__(self, model: Model, kv: KVStorage) -> None:
        self._model = model
        self._kv = kv

    @cached_property
    def _forward(self) -> Callable[[Batch], Tensor]:
        """Made when it is first wanted: most engines never embed."""
        return self._model.compile_hidden(self._kv)

    @torch.inference_mode()
    def __call__(self, requests: Sequence[ScheduledRequest], batch: Batch) -> list[PoolOutput]:
        """batch: the chunks of these pieces of work in this order, each with num_pooled() sampled rows."""
        pieces = torch.split(self._forward(batch), [num_pool_rows(work) for work in requests])
        return [_pool(work, rows) for work, rows in zip(requests, pieces, strict=True)]


def num_pool_rows(request: ScheduledRequest) -> int:
    """How many of its last rows become part of the vector."""
    if request.state.request.pooling == "mean":
        return request.num_tokens
    return 1 if _is_last_chunk(request) else 0


def _is_last_chunk(request: ScheduledRequest) -> bool:
    return request.start + request.num_tokens == len(request.state.tokens)


def _pool(request: ScheduledRequest, rows: Tensor) -> PoolOutput:
    """rows [num_pooled(work), H]"""
    state = request.state
    lanes = _add_to_partials(request, rows) if state.request.pooling == "mean" else None
    if not _is_last_chunk(request):
        return PoolOutput(partials=lanes)
    values = (rows[0] if lanes is None else reduce_mean(lanes, len(state.tokens))).float().cpu()
    if not bool(torch.isfinite(values).all()):
        return PoolOutput(error=RequestFailed(NOT_FINITE))
    return PoolOutput(values.numpy().tobytes(), lanes)


def _add_to_partials(request: ScheduledRequest, rows: Tensor) -> Tensor:
    """The lanes of a request, with these rows added."""
    before = request.state.pool_partials
    if request.start == 0:  # also after a preemption
        lanes = torch.zeros(PARTIAL_SUMS, rows.shape[1], device=rows.device)
    else:
        assert before is not None
        lanes = before.clone()
    accumulate(lanes, request.start, rows)
    return lanes


def accumulate(partials: Tensor, start: int, rows: Tensor) -> None:
    """Add rows [N, H] of the tokens from position `start` on, in place.

    lanes  float32 [LANES, H]: lane i sums the positions p = i mod LANES, in their order
    """
    end = start + rows.shape[0]
    cuts = [start, *range(start - start % PARTIAL_SUMS + PARTIAL_SUMS, end, PARTIAL_SUMS), end]
    for first, last in pairwise(cuts):
        lane = first % PARTIAL_SUMS
        partials[lane : lane + last - first] += rows[first - start : last - start]


def reduce_mean(partials: Tensor, count: int) -> Tensor:
    """lanes float32 [LANES, H] -> [H]"""
    while partials.shape[0] > 1:
        half = partials.shape[0] // 2
        partials = partials[:half] + partials[half:]
    return partials[0] / count
