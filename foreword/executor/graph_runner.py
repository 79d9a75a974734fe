"""A forward pass on a device that is kept busy: graphs for passes of few rows, drafts and rounds that need no host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from foreword.core.batch import NULL_BLOCK, Batch, Chunk, build_batch, request_index_of
from foreword.executor.cuda_graphs import CudaGraphPool, capture_sizes, pick_size
from foreword.executor.decode_loop import DeviceDecodeLoop, SupportsDecodeLoop
from foreword.executor.decode_slots import DecodeLimits, DecodeOps
from foreword.executor.draft_loop import DeviceDraftLoop
from foreword.kernels.ops import DraftJob, DraftTokens, Ops

__all__ = ["GraphRunner"]

MAX_ROWS_PER_REQUEST = 16  # of one request in a pass that is captured, where every row attends by itself; a prompt's rows go together


@dataclass(frozen=True, slots=True)
class _CapturedBatch:
    """A pass of a fixed number of rows: fill `batch`, run, and the first rows of the result are those that are sampled."""

    inputs: Tensor
    batch: Batch
    run: Callable[[], None]


class GraphRunner:
    """What a recordable backend makes of a forward pass. It is a DraftLoop, where it yields logits, and it RunsAhead.

    Passes of few rows are padded to one of a few sizes, and each size is a graph; all others go operation by operation, as all
    do before reserve(). Both compute the same bits.
    """

    def __init__(
        self,
        ops: Ops,
        forward: Callable[[Batch], Tensor],
        eager: bool = False,
        decode_ops: DecodeOps | None = None,
    ) -> None:
        """eager: nothing is captured; steps: how drafts and rounds do what is beside the passes."""
        self._ops = ops
        self._decode_ops = decode_ops or DecodeOps()
        self._forward = forward
        self._eager = eager
        self._limits: DecodeLimits | None = None
        self._graphs: CudaGraphPool | None = None
        self._block_tables = self._output = torch.empty(0)
        self._block_size = 0
        self._capture_sizes: tuple[int, ...] = ()
        self._captured: dict[int, _CapturedBatch] = {}
        self._draft_loop: DeviceDraftLoop | None = None
        self._decode_loops: dict[tuple[int, int, bool], DeviceDecodeLoop] = {}

    @property
    def num_graphs(self) -> int:
        """Captured until now."""
        return 0 if self._graphs is None else self._graphs.num_graphs

    @property
    def graph_bytes(self) -> int:
        """Of device memory that graphs took until now."""
        return 0 if self._graphs is None else self._graphs.num_bytes

    @torch.inference_mode()
    def reserve(
        self, max_rows: int, max_blocks: int, mrope: bool, device: str, block_size: int, capture: bool = True
    ) -> None:
        """Passes of up to so many rows are captured; drafts and rounds are of at most so many requests.

        max_blocks  of the longest block table
        directions  batches have rope_positions
        captures    else everything goes operation by operation for now
        """
        self._limits = limits = DecodeLimits(max_rows, max_blocks, mrope, torch.device(device))
        self._graphs = CudaGraphPool(limits.device, self._eager or not capture)
        self._block_size = block_size
        self._capture_sizes = capture_sizes(max_rows)
        self._block_tables = torch.full(
            (max_rows + 1, max_blocks), NULL_BLOCK, dtype=torch.int64, device=device
        )
        self._captured.clear()
        one = self._forward(self._make_padding_batch(1)[1])
        self._output = torch.empty(max_rows, one.shape[1], dtype=one.dtype, device=device)
        self._draft_loop = None
        self._decode_loops.clear()

    @torch.inference_mode()
    def capture_graphs(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Capture every size now, the largest first, not when it is first needed; `progress` gets sizes done and in all."""
        assert self._capture_sizes, "reserve() comes first"
        for done, size in enumerate(reversed(self._capture_sizes), start=1):
            self._get_captured(size)
            if on_progress is not None:
                on_progress(done, len(self._capture_sizes))

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Tensor:
        """The function's result [R, width], valid until the next call"""
        if batch.request_index is None:
            batch = replace(batch, request_index=request_index_of(batch))
        if self._limits is None or not self._fits_graph(batch, self._limits):
            return self._forward(batch)
        bucket = self._get_captured(pick_size(len(batch.token_ids), self._capture_sizes))
        _fill_captured(bucket, batch)
        bucket.run()
        return self._output[: len(batch.sample_rows)]

    @torch.inference_mode()
    def draft(
        self, jobs: Sequence[DraftJob], block_size: int, never_sampled_ids: Tensor
    ) -> list[DraftTokens]:
        """See DraftLoop."""
        most = self._require_limits().max_rows
        drafts = self._get_draft_loop(block_size, never_sampled_ids)
        groups = [jobs[first : first + most] for first in range(0, len(jobs), most)]
        return [guess for group in groups for guess in self._draft_group(drafts, group)]

    @torch.inference_mode()
    def get_decode_loop(
        self,
        block_size: int,
        never_sampled_ids: Tensor,
        drafter: SupportsDecodeLoop | None = None,
        with_hashes: bool = False,
    ) -> DeviceDecodeLoop:
        """See RunsAhead: the same object each time, with all that it has recorded. `drafter` is of this class."""
        assert drafter is None or isinstance(drafter, GraphRunner)
        key = (block_size, id(drafter), with_hashes)
        if key not in self._decode_loops:
            limits, graphs, width = self._require_limits(), self._graphs, self._output.shape[1]
            assert graphs is not None
            drafts = (
                None
                if drafter is None
                else drafter._get_draft_loop(
                    block_size, drafter._draft_never_sampled_ids(never_sampled_ids, width)
                )
            )
            self._decode_loops[key] = DeviceDecodeLoop(
                self._ops,
                self._decode_ops,
                self._forward,
                graphs,
                limits,
                width,
                block_size,
                never_sampled_ids,
                drafts,
                with_hashes,
            )
        return self._decode_loops[key]

    def _require_limits(self) -> DecodeLimits:
        assert self._limits is not None, "reserve() comes first"
        return self._limits

    def _fits_graph(self, batch: Batch, limits: DecodeLimits) -> bool:
        """Whether a bucket has room for it."""
        return (
            batch.image_features is None
            and 0 < len(batch.token_ids) <= limits.max_rows
            and batch.block_tables.shape[1] <= limits.max_blocks
            and batch.block_size == self._block_size
            and all(end - start <= MAX_ROWS_PER_REQUEST for start, end in pairwise(batch.query_start_loc))
        )

    def _get_captured(self, size: int) -> _CapturedBatch:
        if size not in self._captured:
            assert self._graphs is not None
            inputs, batch = self._make_padding_batch(size)

            def run() -> None:
                self._output[:size].copy_(self._forward(batch))

            self._captured[size] = _CapturedBatch(inputs, batch, self._graphs.capture(run))
        return self._captured[size]

    def _make_padding_batch(self, size: int) -> tuple[Tensor, Batch]:
        """A batch of so many rows, all padding, and the tensor [4 or 7, size] that its own inputs are parts of. The graphs
        share the block tables: no two of them run at once."""
        limits = self._require_limits()
        inputs = torch.zeros(7 if limits.uses_mrope else 4, size, dtype=torch.int64, device=limits.device)
        owners = torch.full((size,), size, dtype=torch.int64, device=limits.device)
        self._block_tables.fill_(NULL_BLOCK)
        batch = Batch(
            token_ids=inputs[0],
            positions=inputs[1],
            slots=inputs[2],
            block_tables=self._block_tables[: size + 1],
            query_start_loc=tuple(range(size + 1)),
            seq_lens=(),
            sample_rows=inputs[3],
            block_size=self._block_size,
            mrope_positions=inputs[4:].view(size, 3) if limits.uses_mrope else None,
            request_index=owners,
        )
        return inputs, batch

    def _get_draft_loop(self, block_size: int, never_sampled_ids: Tensor) -> DeviceDraftLoop:
        if self._draft_loop is None or not self._draft_loop.matches(block_size, never_sampled_ids):
            limits, graphs, width = self._require_limits(), self._graphs, self._output.shape[1]
            assert graphs is not None
            self._draft_loop = DeviceDraftLoop(
                self._ops,
                self._decode_ops,
                self._forward,
                graphs,
                limits,
                width,
                block_size,
                never_sampled_ids,
            )
        return self._draft_loop

    def _draft_never_sampled_ids(self, never_sampled_ids: Tensor, target_vocab_size: int) -> Tensor:
        """Of a target with so many logits: what it cannot say is not guessed."""
        mine = self._output.shape[1]
        known = never_sampled_ids.cpu()
        return torch.cat((known[known < mine], torch.arange(target_vocab_size, max(mine, target_vocab_size))))

    def _draft_group(self, draft_loop: DeviceDraftLoop, jobs: Sequence[DraftJob]) -> list[DraftTokens]:
        asking = [lane for lane in jobs if lane.max_tokens]
        logits = self(self._build_known_batch(jobs, draft_loop.block_size))
        guesses = iter(draft_loop.run(asking, logits) if asking else ())
        return [next(guesses) if lane.max_tokens else DraftTokens((), ()) for lane in jobs]

    def _build_known_batch(self, jobs: Sequence[DraftJob], block_size: int) -> Batch:
        """The pass over the known tokens."""
        limits = self._require_limits()
        for lane in jobs:
            rows = len(lane.token_ids) + lane.max_tokens - (lane.max_tokens > 0)
            assert min(len(lane.block_table), limits.max_blocks) * block_size >= lane.start_position + rows, (
                "a row without a slot"
            )
        chunks = [
            Chunk(
                lane.token_ids,
                lane.start_position,
                lane.block_table[: limits.max_blocks],
                int(lane.max_tokens > 0),
            )
            for lane in jobs
        ]
        batch = build_batch(
            chunks, block_size, self._ops.row_tile, str(limits.device), with_request_index=True
        )
        if not limits.uses_mrope or batch.request_index is None:
            return batch
        shifts = torch.tensor([*(lane.mrope_offset for lane in jobs), 0], device=limits.device)
        places = batch.positions + shifts[batch.request_index]
        return replace(batch, mrope_positions=places[:, None].expand(-1, 3).contiguous())


def _fill_captured(captured: _CapturedBatch, batch: Batch) -> None:
    """The batch's rows, and padding behind them."""
    into, rows, size = captured.batch, len(batch.token_ids), len(captured.batch.token_ids)
    requests, width = batch.block_tables.shape[0] - 1, batch.block_tables.shape[1]
    captured.inputs.zero_()
    into.block_tables.fill_(NULL_BLOCK)
    into.block_tables[:requests, :width].copy_(batch.block_tables[:-1])
    into.token_ids[:rows].copy_(batch.token_ids)
    into.positions[:rows].copy_(batch.positions)
    into.slots[:rows].copy_(batch.slots)
    into.sample_rows[: len(batch.sample_rows)].copy_(batch.sample_rows)
    assert into.request_index is not None and batch.request_index is not None
    into.request_index.fill_(size)
    into.request_index[:rows].copy_(torch.where(batch.request_index < requests, batch.request_index, size))
    if into.mrope_positions is not None:
        assert batch.mrope_positions is not None, "a batch without positions in several directions"
        into.mrope_positions[:rows].copy_(batch.mrope_positions)
