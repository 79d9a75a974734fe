"""A draft, pass by pass: what a DraftLoop does in one call, for backends and requests that have none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foreword.core.batch import Batch, Chunk, build_batch
from foreword.core.positions import RopePositions
from foreword.core.rows import SampleRow
from foreword.drafting.base import Ask
from foreword.kernels.ops import DraftLane, Guess, Ops
from foreword.sampling.sampler import Sampler

__all__ = ["UNSEEN", "PassByPass", "Shown"]


@dataclass(frozen=True, slots=True)
class Shown:
    """What a chunk knows of pictures; the fields are those of Chunk."""

    positions: RopePositions | None = None
    features: Sequence[tuple[int, Tensor]] = ()


UNSEEN = Shown()


@dataclass(slots=True)
class _Progress:
    """One lane while it drafts.

    pending   tokens that it computes next, from position `start` on
    features  of pictures among these
    total     sum of the log-probabilities
    """

    ask: Ask
    lane: DraftLane
    positions: RopePositions | None
    features: Sequence[tuple[int, Tensor]]
    pending: Sequence[int]
    start: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    total: float = 0.0
    ended: bool = False

    @property
    def row(self) -> SampleRow:
        return SampleRow(self.ask.state, tuple(self.token_ids))

    def extend(self, token_id: int, logprob: float) -> None:
        """Add a guess; a row without a legal token (-1) ends the draft instead."""
        self.start += len(self.pending)
        self.pending, self.features = [token_id], ()
        self.ended = token_id < 0
        if self.ended:
            return
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.total += logprob
        self.ended = len(self.token_ids) == self.lane.max_tokens or self.total < self.lane.floor


class PassByPass:
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
        directions: bool = False,
    ) -> None:
        self._forward = forward
        self._ops = ops
        self._sampler = sampler
        self._block_size = block_size
        self._device = device
        self._directions = directions

    def draft(self, asks: Sequence[Ask], lanes: Sequence[DraftLane], shown: Sequence[Shown] | None = None) -> list[Guess]:
        """One guess for each lane, which is that of the ask with its number; `shown` for each lane, None: nothing."""
        everyone = [
            _Progress(ask, lane, one.positions, one.features, lane.token_ids, lane.start)
            for ask, lane, one in zip(asks, lanes, shown or [UNSEEN] * len(lanes), strict=True)
        ]
        self._pass(everyone)
        active = [one for one in everyone if one.lane.max_tokens]
        while active := [one for one in active if not one.ended]:
            self._pass(active)
        return [Guess(tuple(one.token_ids), tuple(one.logprobs)) for one in everyone]

    def _pass(self, lanes: Sequence[_Progress]) -> None:
        """Compute what is pending, and sample the rows of those that want a guess."""
        sampled = [one for one in lanes if one.lane.max_tokens]
        chunks = [
            Chunk(one.pending, one.start, one.lane.blocks, int(one.lane.max_tokens > 0), one.positions, one.features)
            for one in lanes
        ]
        logits = self._forward(build_batch(chunks, self._block_size, self._ops.row_tile, self._device, self._directions))
        if not sampled:
            return
        token_ids = self._sampler(logits, [one.row for one in sampled], logprobs=False).token_ids
        for one, token_id, logprob in zip(sampled, token_ids, self._logprobs(logits, token_ids), strict=True):
            one.extend(token_id, logprob)

    def _logprobs(self, logits: Tensor, token_ids: Sequence[int]) -> list[float]:
        """Of one id a row (any id where it is -1), in the distribution that it was sampled from."""
        chosen = torch.tensor(token_ids, dtype=torch.int64, device=logits.device).clamp(min=0)[:, None]
        own = logits.gather(1, chosen)[:, 0].double()
        logprobs: list[float] = (own - self._ops.log_sum_exp(logits).double()).tolist()
        return logprobs
