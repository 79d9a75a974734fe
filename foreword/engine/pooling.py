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

from foreword.cache.storage import KVStorage
from foreword.core.batch import Batch
from foreword.engine.plan import Work
from foreword.errors import RequestFailed
from foreword.models.base import Model

__all__ = ["LANES", "Pooled", "Pooler", "add_rows", "mean", "num_pooled"]

LANES = 32
NOT_FINITE = "the hidden states of the prompt are not finite"


@dataclass(frozen=True, slots=True)
class Pooled:
    """What a pass yielded for one prompt.

    vector  float32 [H] in native byte order; None while tokens of the prompt are missing
    lanes   what RequestState.lanes becomes once the step is taken
    error   why there is no vector, or None
    """

    vector: bytes | None = None
    lanes: Tensor | None = None
    error: RequestFailed | None = None


class Pooler:
    """The model without its head. A pass changes nothing of its requests, so that it may be run again."""

    def __init__(self, model: Model, kv: KVStorage) -> None:
        self._model = model
        self._kv = kv

    @cached_property
    def _hidden(self) -> Callable[[Batch], Tensor]:
        """Made when it is first wanted: most engines never embed."""
        return self._model.compiled_hidden(self._kv)

    @torch.inference_mode()
    def __call__(self, works: Sequence[Work], batch: Batch) -> list[Pooled]:
        """batch: the chunks of these pieces of work in this order, each with num_pooled() sampled rows."""
        pieces = torch.split(self._hidden(batch), [num_pooled(work) for work in works])
        return [_pool(work, rows) for work, rows in zip(works, pieces, strict=True)]


def num_pooled(work: Work) -> int:
    """How many of its last rows become part of the vector."""
    if work.state.request.pooling == "mean":
        return work.num_tokens
    return 1 if _ends(work) else 0


def _ends(work: Work) -> bool:
    return work.start + work.num_tokens == len(work.state.tokens)


def _pool(work: Work, rows: Tensor) -> Pooled:
    """rows [num_pooled(work), H]"""
    state = work.state
    lanes = _with_rows(work, rows) if state.request.pooling == "mean" else None
    if not _ends(work):
        return Pooled(lanes=lanes)
    values = (rows[0] if lanes is None else mean(lanes, len(state.tokens))).float().cpu()
    if not bool(torch.isfinite(values).all()):
        return Pooled(error=RequestFailed(NOT_FINITE))
    return Pooled(values.numpy().tobytes(), lanes)


def _with_rows(work: Work, rows: Tensor) -> Tensor:
    """The lanes of a request, with these rows added."""
    before = work.state.lanes
    if work.start == 0:  # also after a preemption
        lanes = torch.zeros(LANES, rows.shape[1], device=rows.device)
    else:
        assert before is not None
        lanes = before.clone()
    add_rows(lanes, work.start, rows)
    return lanes


def add_rows(lanes: Tensor, start: int, rows: Tensor) -> None:
    """Add rows [N, H] of the tokens from position `start` on, in place.

    lanes  float32 [LANES, H]: lane i sums the positions p = i mod LANES, in their order
    """
    end = start + rows.shape[0]
    cuts = [start, *range(start - start % LANES + LANES, end, LANES), end]
    for first, last in pairwise(cuts):
        lane = first % LANES
        lanes[lane : lane + last - first] += rows[first - start : last - start]


def mean(lanes: Tensor, count: int) -> Tensor:
    """lanes float32 [LANES, H] -> [H]"""
    while lanes.shape[0] > 1:
        half = lanes.shape[0] // 2
        lanes = lanes[:half] + lanes[half:]
    return lanes[0] / count
