"""A forward pass on a device that is kept busy: graphs for passes of few rows, drafts and rounds that need no host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from foreword.core.batch import SCRATCH_BLOCK, Batch, Chunk, build_batch, owners_of
from foreword.kernels.device_rounds import DeviceRounds
from foreword.kernels.drafts import Drafts
from foreword.kernels.graphs import Graphs, bucket_of, buckets
from foreword.kernels.lanes import LaneSteps, Limits
from foreword.kernels.ops import DraftLane, Guess, Ops
from foreword.kernels.rounds import RunsAhead

__all__ = ["RecordedForward"]

MOST_ROWS = 16  # of one request in a pass that is captured, where every row attends by itself; a prompt's rows go together


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A pass of a fixed number of rows: fill `batch`, run, and the first rows of the result are those that are sampled."""

    inputs: Tensor
    batch: Batch
    run: Callable[[], None]


class RecordedForward:
    """What a recordable backend makes of a forward pass. It is a DraftLoop, where it yields logits, and it RunsAhead.

    Passes of few rows are padded to one of a few sizes, and each size is a graph; all others go operation by operation, as all
    do before reserve(). Both compute the same bits.
    """

    def __init__(self, ops: Ops, forward: Callable[[Batch], Tensor], eager: bool = False, steps: LaneSteps | None = None) -> None:
        """eager: nothing is captured; steps: how drafts and rounds do what is beside the passes."""
        self._ops = ops
        self._steps = steps or LaneSteps()
        self._forward = forward
        self._eager = eager
        self._limits: Limits | None = None
        self._graphs: Graphs | None = None
        self._tables = self._out = torch.empty(0)
        self._block_size = 0
        self._sizes: tuple[int, ...] = ()
        self._buckets: dict[int, _Bucket] = {}
        self._drafts: Drafts | None = None
        self._rounds: dict[tuple[int, int, bool], DeviceRounds] = {}

    @property
    def num_graphs(self) -> int:
        """Captured until now."""
        return 0 if self._graphs is None else self._graphs.count

    @property
    def graph_bytes(self) -> int:
        """Of device memory that graphs took until now."""
        return 0 if self._graphs is None else self._graphs.bytes

    @torch.inference_mode()
    def reserve(
        self, max_rows: int, max_blocks: int, directions: bool, device: str, block_size: int, captures: bool = True
    ) -> None:
        """Passes of up to so many rows are captured; drafts and rounds are of at most so many requests.

        max_blocks  of the longest block table
        directions  batches have rope_positions
        captures    else everything goes operation by operation for now
        """
        self._limits = limits = Limits(max_rows, max_blocks, directions, torch.device(device))
        self._graphs = Graphs(limits.device, self._eager or not captures)
        self._block_size = block_size
        self._sizes = buckets(max_rows)
        self._tables = torch.full((max_rows + 1, max_blocks), SCRATCH_BLOCK, dtype=torch.int64, device=device)
        self._buckets.clear()
        one = self._forward(self._empty(1)[1])
        self._out = torch.empty(max_rows, one.shape[1], dtype=one.dtype, device=device)
        self._drafts = None
        self._rounds.clear()

    @torch.inference_mode()
    def prepare(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture every size now, the largest first, not when it is first needed; `progress` gets sizes done and in all."""
        assert self._sizes, "reserve() comes first"
        for done, size in enumerate(reversed(self._sizes), start=1):
            self._bucket(size)
            if progress is not None:
                progress(done, len(self._sizes))

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Tensor:
        """The function's result [R, width], valid until the next call"""
        if batch.owners is None:
            batch = replace(batch, owners=owners_of(batch))
        if self._limits is None or not self._fits(batch, self._limits):
            return self._forward(batch)
        bucket = self._bucket(bucket_of(len(batch.token_ids), self._sizes))
        _fill(bucket, batch)
        bucket.run()
        return self._out[: len(batch.sample_rows)]

    @torch.inference_mode()
    def draft(self, lanes: Sequence[DraftLane], block_size: int, unused: Tensor) -> list[Guess]:
        """See DraftLoop."""
        most = self._reserved().rows
        drafts = self._drafts_for(block_size, unused)
        groups = [lanes[first : first + most] for first in range(0, len(lanes), most)]
        return [guess for group in groups for guess in self._draft(drafts, group)]

    @torch.inference_mode()
    def rounds(self, block_size: int, unused: Tensor, drafter: RunsAhead | None = None, hashed: bool = False) -> DeviceRounds:
        """See RunsAhead: the same object each time, with all that it has recorded. `drafter` is of this class."""
        assert drafter is None or isinstance(drafter, RecordedForward)
        key = (block_size, id(drafter), hashed)
        if key not in self._rounds:
            limits, graphs, width = self._reserved(), self._graphs, self._out.shape[1]
            assert graphs is not None
            drafts = None if drafter is None else drafter._drafts_for(block_size, drafter._unused_for(unused, width))
            self._rounds[key] = DeviceRounds(
                self._ops, self._steps, self._forward, graphs, limits, width, block_size, unused, drafts, hashed
            )
        return self._rounds[key]

    def _reserved(self) -> Limits:
        assert self._limits is not None, "reserve() comes first"
        return self._limits

    def _fits(self, batch: Batch, limits: Limits) -> bool:
        """Whether a bucket has room for it."""
        return (
            batch.features is None
            and 0 < len(batch.token_ids) <= limits.rows
            and batch.block_tables.shape[1] <= limits.blocks
            and batch.block_size == self._block_size
            and all(end - start <= MOST_ROWS for start, end in pairwise(batch.row_starts))
        )

    def _bucket(self, size: int) -> _Bucket:
        if size not in self._buckets:
            assert self._graphs is not None
            inputs, batch = self._empty(size)

            def run() -> None:
                self._out[:size].copy_(self._forward(batch))

            self._buckets[size] = _Bucket(inputs, batch, self._graphs.record(run))
        return self._buckets[size]

    def _empty(self, size: int) -> tuple[Tensor, Batch]:
        """A batch of so many rows, all padding, and the tensor [4 or 7, size] that its own inputs are parts of. The graphs
        share the block tables: no two of them run at once."""
        limits = self._reserved()
        inputs = torch.zeros(7 if limits.directions else 4, size, dtype=torch.int64, device=limits.device)
        owners = torch.full((size,), size, dtype=torch.int64, device=limits.device)
        self._tables.fill_(SCRATCH_BLOCK)
        batch = Batch(
            token_ids=inputs[0],
            positions=inputs[1],
            slots=inputs[2],
            block_tables=self._tables[: size + 1],
            row_starts=tuple(range(size + 1)),
            ends=(),
            sample_rows=inputs[3],
            block_size=self._block_size,
            rope_positions=inputs[4:].view(size, 3) if limits.directions else None,
            owners=owners,
        )
        return inputs, batch

    def _drafts_for(self, block_size: int, unused: Tensor) -> Drafts:
        if self._drafts is None or not self._drafts.serves(block_size, unused):
            limits, graphs, width = self._reserved(), self._graphs, self._out.shape[1]
            assert graphs is not None
            self._drafts = Drafts(self._ops, self._steps, self._forward, graphs, limits, width, block_size, unused)
        return self._drafts

    def _unused_for(self, unused: Tensor, width: int) -> Tensor:
        """Of a target with so many logits: what it cannot say is not guessed."""
        mine = self._out.shape[1]
        known = unused.cpu()
        return torch.cat((known[known < mine], torch.arange(width, max(mine, width))))

    def _draft(self, drafts: Drafts, lanes: Sequence[DraftLane]) -> list[Guess]:
        asking = [lane for lane in lanes if lane.max_tokens]
        logits = self(self._known(lanes, drafts.block_size))
        guesses = iter(drafts.run(asking, logits) if asking else ())
        return [next(guesses) if lane.max_tokens else Guess((), ()) for lane in lanes]

    def _known(self, lanes: Sequence[DraftLane], block_size: int) -> Batch:
        """The pass over the known tokens."""
        limits = self._reserved()
        for lane in lanes:
            rows = len(lane.token_ids) + lane.max_tokens - (lane.max_tokens > 0)
            assert min(len(lane.blocks), limits.blocks) * block_size >= lane.start + rows, "a row without a slot"
        chunks = [Chunk(lane.token_ids, lane.start, lane.blocks[: limits.blocks], int(lane.max_tokens > 0)) for lane in lanes]
        batch = build_batch(chunks, block_size, self._ops.row_tile, str(limits.device), owners=True)
        if not limits.directions or batch.owners is None:
            return batch
        shifts = torch.tensor([*(lane.shift for lane in lanes), 0], device=limits.device)
        places = batch.positions + shifts[batch.owners]
        return replace(batch, rope_positions=places[:, None].expand(-1, 3).contiguous())


def _fill(bucket: _Bucket, batch: Batch) -> None:
    """The batch's rows, and padding behind them."""
    into, rows, size = bucket.batch, len(batch.token_ids), len(bucket.batch.token_ids)
    requests, width = batch.block_tables.shape[0] - 1, batch.block_tables.shape[1]
    bucket.inputs.zero_()
    into.block_tables.fill_(SCRATCH_BLOCK)
    into.block_tables[:requests, :width].copy_(batch.block_tables[:-1])
    into.token_ids[:rows].copy_(batch.token_ids)
    into.positions[:rows].copy_(batch.positions)
    into.slots[:rows].copy_(batch.slots)
    into.sample_rows[: len(batch.sample_rows)].copy_(batch.sample_rows)
    assert into.owners is not None and batch.owners is not None
    into.owners.fill_(size)
    into.owners[:rows].copy_(torch.where(batch.owners < requests, batch.owners, size))
    if into.rope_positions is not None:
        assert batch.rope_positions is not None, "a batch without positions in several directions"
        into.rope_positions[:rows].copy_(batch.rope_positions)
