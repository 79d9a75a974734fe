"""A draft, pass by pass: what a DraftLoop does in one call, for backends and requests that have none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foreword.core.batch import Batch, Chunk, build_batch
from foreword.core.positions import MRopePositions
from foreword.core.rows import SampleRow
from foreword.drafting.base import DraftRequest
from foreword.kernels.ops import DraftJob, DraftTokens, Ops
from foreword.sampling.sampler import Sampler

__all__ = ["NO_IMAGES", "EagerDraftLoop", "ChunkImages"]


@dataclass(frozen=True, slots=True)
class ChunkImages:
    """What a chunk knows of pictures; the fields are those of Chunk."""

    positions: MRopePositions | None = None
    features: Sequence[tuple[int, Tensor]] = ()


NO_IMAGES = ChunkImages()


@dataclass(slots=True)
class _DraftProgress:
    """One lane while it drafts.

    pending   tokens that it computes next, from position `start` on
    features  of pictures among these
    total     sum of the log-probabilities
    """

    request: DraftRequest
    job: DraftJob
    positions: MRopePositions | None
    features: Sequence[tuple[int, Tensor]]
    pending_ids: Sequence[int]
    start: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    total_logprob: float = 0.0
    is_done: bool = False

    @property
    def row(self) -> SampleRow:
        return SampleRow(self.request.state, tuple(self.token_ids))

    def append(self, token_id: int, logprob: float) -> None:
        """Add a guess; a row without a legal token (-1) ends the draft instead."""
        self.start += len(self.pending_ids)
        self.pending_ids, self.features = [token_id], ()
        self.is_done = token_id < 0
        if self.is_done:
            return
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.total_logprob += logprob
        self.is_done = len(self.token_ids) == self.job.max_tokens or self.total_logprob < self.job.min_logprob_sum


class EagerDraftLoop:
    """One forward pass and one call of the sampler for each guess of all lanes.

    directions  the model knows positions in several directions
    """

    def __init__(
        self,
        forward: Callable[[Batch], Tensor],
        ops: Ops,
        sampler: Sampler,
        block_size: int,
        device: str,
        mrope: bool = False,
    ) -> None:
        self._forward = forward
        self._ops = ops
        self._sampler = sampler
        self._block_size = block_size
        self._device = device
        self._mrope = mrope

    def draft(self, requests: Sequence[DraftRequest], jobs: Sequence[DraftJob], images: Sequence[ChunkImages] | None = None) -> list[DraftTokens]:
        """One guess for each lane, which is that of the ask with its number; `shown` for each lane, None: nothing."""
        everyone = [
            _DraftProgress(ask, lane, one.positions, one.features, lane.token_ids, lane.start_position)
            for ask, lane, one in zip(requests, jobs, images or [NO_IMAGES] * len(jobs), strict=True)
        ]
        self._run_pass(everyone)
        active = [one for one in everyone if one.job.max_tokens]
        while active := [one for one in active if not one.is_done]:
            self._run_pass(active)
        return [DraftTokens(tuple(one.token_ids), tuple(one.logprobs)) for one in everyone]

    def _run_pass(self, drafts: Sequence[_DraftProgress]) -> None:
        """Compute what is pending, and sample the rows of those that want a guess."""
        sampled = [one for one in drafts if one.job.max_tokens]
        chunks = [
            Chunk(one.pending_ids, one.start, one.job.block_table, int(one.job.max_tokens > 0), one.positions, one.features)
            for one in drafts
        ]
        logits = self._forward(build_batch(chunks, self._block_size, self._ops.row_tile, self._device, self._mrope))
        if not sampled:
            return
        token_ids = self._sampler(logits, [one.row for one in sampled], logprobs=False).token_ids
        for one, token_id, logprob in zip(sampled, token_ids, self._logprobs(logits, token_ids), strict=True):
            one.append(token_id, logprob)

    def _logprobs(self, logits: Tensor, token_ids: Sequence[int]) -> list[float]:
        """Of one id a row (any id where it is -1), in the distribution that it was sampled from."""
        chosen = torch.tensor(token_ids, dtype=torch.int64, device=logits.device).clamp(min=0)[:, None]
        own = logits.gather(1, chosen)[:, 0].double()
        logprobs: list[float] = (own - self._ops.log_sum_exp(logits).double()).tolist()
        return logprobs
