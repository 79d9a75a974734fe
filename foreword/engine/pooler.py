"""Embeddings: a forward pass without the LM head, and pooling of its hidden states.

Pooling requests have a pass of their own, so sampled rows run the same program with or without them.
A mean is summed in one order however the prompt is chunked, so a vector does not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from foreword.core.batch import Batch
from foreword.cuda_graphs.graph_runner import with_graphs
from foreword.engine.scheduler import ScheduledRequest
from foreword.errors import RequestFailed
from foreword.kv_cache.storage import KVStorage
from foreword.models.decoder import Decoder

PARTIAL_SUMS = 32  # partial sums of a mean: fewer rounding errors than one running sum


@dataclass(frozen=True, slots=True)
class PoolOutput:
    vector: bytes | None = None  # float32 [H] in native byte order; None while prompt tokens are missing
    partials: Tensor | None = None  # the next RequestState.pool_partials
    error: RequestFailed | None = None


class Pooler:
    """Runs the model without its head. A pass changes no request, so it can be retried."""

    def __init__(self, model: Decoder, kv: KVStorage) -> None:
        self._model = model
        self._kv = kv

    @cached_property
    def _forward(self) -> Callable[[Batch], Tensor]:
        """Compiled on first use: most engines never embed."""
        model = self._model
        return with_graphs(model.ops, model.compile_hidden(self._kv), model.has_states)

    @torch.inference_mode()
    def __call__(self, requests: Sequence[ScheduledRequest], batch: Batch) -> list[PoolOutput]:
        """batch  one chunk per request, in order, with num_pool_rows() sampled rows each"""
        hidden = self._forward(batch)
        if hidden.is_cuda and not any(request.is_last_chunk for request in requests):
            torch.cuda.synchronize()  # as in ModelRunner.run(): no result is read
        chunks = torch.split(hidden, [num_pool_rows(request) for request in requests])
        return [_pool(request, rows) for request, rows in zip(requests, chunks, strict=True)]


def num_pool_rows(request: ScheduledRequest) -> int:
    """Rows of the chunk that enter the vector."""
    return request.num_tokens if request.state.request.pooling == "mean" else int(request.is_last_chunk)


def _pool(request: ScheduledRequest, rows: Tensor) -> PoolOutput:
    """rows  [num_pool_rows(request), H]"""
    state = request.state
    partials = None
    if state.request.pooling == "mean":
        if request.start == 0:  # also after a preemption
            partials = torch.zeros(PARTIAL_SUMS, rows.shape[1], device=rows.device)
        else:
            assert state.pool_partials is not None
            partials = state.pool_partials.clone()
        accumulate(partials, request.start, rows)
    if not request.is_last_chunk:
        return PoolOutput(partials=partials)
    vector = (rows[0] if partials is None else reduce_mean(partials, len(state.tokens))).float().cpu()
    if not bool(torch.isfinite(vector).all()):
        return PoolOutput(error=RequestFailed("the hidden states of the prompt are not finite"))
    return PoolOutput(vector.numpy().tobytes(), partials)


def accumulate(partials: Tensor, start: int, rows: Tensor) -> None:
    """Add rows [N, H] of positions start..start+N-1, in place.

    partials  float32 [PARTIAL_SUMS, H]: sum i adds the positions p = i mod PARTIAL_SUMS in order
    """
    end = start + rows.shape[0]
    cuts = [start, *range(start - start % PARTIAL_SUMS + PARTIAL_SUMS, end, PARTIAL_SUMS), end]
    for first, last in pairwise(cuts):
        index = first % PARTIAL_SUMS
        partials[index : index + last - first] += rows[first - start : last - start]


def reduce_mean(partials: Tensor, count: int) -> Tensor:
    """partials float32 [PARTIAL_SUMS, H] -> mean [H] over `count` rows"""
    while partials.shape[0] > 1:
        half = partials.shape[0] // 2
        partials = partials[:half] + partials[half:]
    return partials[0] / count
