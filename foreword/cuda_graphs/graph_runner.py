"""Forward passes on a GPU: CUDA graphs for passes of few rows, and loops that run without the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, repeat
from sys import maxsize
from typing import cast

import torch
from torch import Tensor

from foreword.core.batch import NULL_BLOCK, Batch, Chunk, build_batch, request_index_of
from foreword.core.request import NO_LORA
from foreword.cuda_graphs.capture import CudaGraphPool, capture_sizes, pick_size
from foreword.cuda_graphs.decode_loop import DeviceDecodeLoop, SupportsDecodeLoop
from foreword.cuda_graphs.decode_slots import DecodeLimits, GraphOps, LoopConfig
from foreword.cuda_graphs.draft_loop import DeviceDraftLoop
from foreword.kernels.ops import DraftJob, DraftTokens, Ops

# Limits of a request in a captured pass: few rows (a draft), or a short context (a prompt). Each row attends
# alone there, which costs less than launches one by one; for other prompts, kernels share reads among rows.
MAX_ROWS_PER_REQUEST = 16
MAX_PROMPT_LEN = 512


@dataclass(frozen=True, slots=True)
class _CapturedBatch:
    """A pass of a fixed number of rows over `batch`, whose contents are replaced before each run."""

    inputs: Tensor  # int64 [4 or 7, size]: token ids, positions, slots, sample rows, M-RoPE positions
    batch: Batch
    run: Callable[[], None]


def with_graphs(
    ops: Ops, forward: Callable[[Batch], Tensor], is_eager: bool = False
) -> Callable[[Batch], Tensor]:
    """`forward` as a GraphRunner if the backend supports graphs, unless `is_eager`.

    Batches of models with layers with state, or with a trained head, have inputs that no graph replaces.
    """
    uses_graphs = ops.supports_graphs and not is_eager
    return GraphRunner(cast(GraphOps, ops), forward) if uses_graphs else forward


class GraphRunner:
    """A forward pass with CUDA graphs; one to logits is also a DraftLoop and SupportsDecodeLoop.

    Passes of few rows, of drafts or of short prompts, are padded to the next captured size. All others, and
    all before reserve(), launch kernel by kernel. Both compute the same bits.
    """

    def __init__(self, ops: GraphOps, forward: Callable[[Batch], Tensor]) -> None:
        self._ops = ops
        self._forward = forward
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
        return 0 if self._graphs is None else self._graphs.num_graphs

    @property
    def graph_bytes(self) -> int:
        """Device memory of the graphs."""
        return 0 if self._graphs is None else self._graphs.num_bytes

    @torch.inference_mode()
    def reserve(
        self,
        max_rows: int,
        max_requests: int,
        max_blocks: int,
        mrope: bool,
        device: str,
        block_size: int,
        capture: bool = True,
        lora: bool = False,
    ) -> None:
        """Allocate for captured passes of up to `max_rows`, and for passes and loops of `max_requests`.

        max_blocks  blocks of the longest block table
        capture     False: run each pass once where it would be captured, and launch kernel by kernel
        """
        assert 0 < max_requests <= max_rows
        self._limits = DecodeLimits(max_rows, max_requests, max_blocks, mrope, torch.device(device), lora)
        self._graphs = CudaGraphPool(self._limits.device, self._ops.eager, dry_run=not capture)
        self._block_size = block_size
        self._capture_sizes = capture_sizes(max_rows)
        self._block_tables = torch.full(
            (max_requests + 1, max_blocks), NULL_BLOCK, dtype=torch.int64, device=device
        )
        self._captured.clear()
        row = self._forward(self._make_padding_batch(1)[1])
        self._output = torch.empty(max_rows, row.shape[1], dtype=row.dtype, device=device)
        self._draft_loop = None
        self._decode_loops.clear()

    @torch.inference_mode()
    def capture_graphs(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Capture every size now, the largest first; on_progress(done, total)."""
        assert self._capture_sizes, "reserve() comes first"
        for done, size in enumerate(reversed(self._capture_sizes), start=1):
            self._get_captured(size)
            if on_progress is not None:
                on_progress(done, len(self._capture_sizes))

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Tensor:
        """The forward pass's result [R, width], valid until the next call."""
        if batch.request_index is None:
            batch = replace(batch, request_index=request_index_of(batch))
        if self._limits is None or not self._fits_graph(batch, self._limits):
            return self._forward(batch)
        captured = self._get_captured(pick_size(len(batch.token_ids), self._capture_sizes))
        _fill_captured(captured, batch)
        captured.run()
        return self._output[: len(batch.sample_rows)]

    @torch.inference_mode()
    def draft(
        self, jobs: Sequence[DraftJob], block_size: int, never_sampled_ids: Tensor
    ) -> list[DraftTokens]:
        """See DraftLoop."""
        max_jobs = self._require_limits().max_requests
        draft_loop = self._get_draft_loop(block_size, never_sampled_ids)
        groups = [jobs[first : first + max_jobs] for first in range(0, len(jobs), max_jobs)]
        return [drafted for group in groups for drafted in self._draft_group(draft_loop, group)]

    @torch.inference_mode()
    def get_decode_loop(
        self,
        block_size: int,
        never_sampled_ids: Tensor,
        drafter: SupportsDecodeLoop | None = None,
        with_hashes: bool = False,
    ) -> DeviceDecodeLoop:
        """See SupportsDecodeLoop; cached, with its graphs. `drafter` is a GraphRunner."""
        assert drafter is None or isinstance(drafter, GraphRunner)
        key = (block_size, id(drafter), with_hashes)
        if key not in self._decode_loops:
            draft_loop = None
            if drafter is not None:
                draft_ids = drafter._draft_never_sampled_ids(never_sampled_ids, self._output.shape[1])
                draft_loop = drafter._get_draft_loop(block_size, draft_ids)
            config = self._make_loop_config(block_size, never_sampled_ids)
            self._decode_loops[key] = DeviceDecodeLoop(config, draft_loop, with_hashes)
        return self._decode_loops[key]

    def _require_limits(self) -> DecodeLimits:
        assert self._limits is not None, "reserve() comes first"
        return self._limits

    def _make_loop_config(self, block_size: int, never_sampled_ids: Tensor) -> LoopConfig:
        limits = self._require_limits()
        assert self._graphs is not None
        return LoopConfig(
            self._ops,
            self._forward,
            self,
            self._graphs,
            limits,
            self._output.shape[1],
            block_size,
            never_sampled_ids.to(limits.device),
        )

    def _fits_graph(self, batch: Batch, limits: DecodeLimits) -> bool:
        return (
            batch.image_features is None
            and 0 < len(batch.token_ids) <= limits.max_rows
            and batch.block_tables.shape[0] - 1 <= limits.max_requests
            and batch.block_tables.shape[1] <= limits.max_blocks
            and batch.block_size == self._block_size
            and all(
                end - start <= MAX_ROWS_PER_REQUEST or seq_len <= MAX_PROMPT_LEN
                for (start, end), seq_len in zip(
                    pairwise(batch.query_start_loc), batch.seq_lens or repeat(maxsize), strict=False
                )
            )
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
        """`size` rows of padding, and the tensor of the batch's inputs. Graphs share the block tables."""
        limits = self._require_limits()
        num_requests = min(size, limits.max_requests)
        inputs = torch.zeros(7 if limits.uses_mrope else 4, size, dtype=torch.int64, device=limits.device)
        self._block_tables.fill_(NULL_BLOCK)
        lora_slots = torch.full((size,), NO_LORA, dtype=torch.int64, device=limits.device)
        batch = Batch(
            token_ids=inputs[0],
            positions=inputs[1],
            slots=inputs[2],
            block_tables=self._block_tables[: num_requests + 1],
            query_start_loc=tuple(range(size + 1)),
            seq_lens=(),
            sample_rows=inputs[3],
            block_size=self._block_size,
            mrope_positions=inputs[4:].view(size, 3) if limits.uses_mrope else None,
            request_index=torch.full((size,), num_requests, dtype=torch.int64, device=limits.device),
            lora_slots=lora_slots if limits.uses_lora else None,
        )
        return inputs, batch

    def _get_draft_loop(self, block_size: int, never_sampled_ids: Tensor) -> DeviceDraftLoop:
        if self._draft_loop is None or not self._draft_loop.matches(block_size, never_sampled_ids):
            self._draft_loop = DeviceDraftLoop(self._make_loop_config(block_size, never_sampled_ids))
        return self._draft_loop

    def _draft_never_sampled_ids(self, never_sampled_ids: Tensor, target_vocab_size: int) -> Tensor:
        """The target's never sampled ids, and ids beyond the target's vocabulary."""
        vocab_size, ids = self._output.shape[1], never_sampled_ids.cpu()
        beyond = torch.arange(target_vocab_size, max(vocab_size, target_vocab_size))
        return torch.cat((ids[ids < vocab_size], beyond))

    def _draft_group(self, draft_loop: DeviceDraftLoop, jobs: Sequence[DraftJob]) -> list[DraftTokens]:
        logits = self(self._build_known_batch(jobs, draft_loop.config.block_size))
        drafting = [job for job in jobs if job.max_tokens]
        drafts = iter(draft_loop.run(drafting, logits) if drafting else ())
        return [next(drafts) if job.max_tokens else DraftTokens((), ()) for job in jobs]

    def _build_known_batch(self, jobs: Sequence[DraftJob], block_size: int) -> Batch:
        """The pass over the known tokens; the last one is sampled if the job drafts."""
        limits = self._require_limits()
        for job in jobs:
            end = job.start_position + len(job.token_ids) + max(job.max_tokens - 1, 0)
            num_blocks = min(len(job.block_table), limits.max_blocks)
            assert num_blocks * block_size >= end, f"draft job without slots: {end} rows, {num_blocks} blocks"
        chunks = [
            Chunk(
                job.token_ids,
                job.start_position,
                job.block_table[: limits.max_blocks],
                int(job.max_tokens > 0),
            )
            for job in jobs
        ]
        batch = build_batch(
            chunks, block_size, self._ops.row_tile, str(limits.device), with_request_index=True
        )
        if not limits.uses_mrope or batch.request_index is None:
            return batch
        offsets = torch.tensor([*(job.mrope_offset for job in jobs), 0], device=limits.device)
        positions = batch.positions + offsets[batch.request_index]
        return replace(batch, mrope_positions=positions[:, None].expand(-1, 3).contiguous())


def _fill_captured(captured: _CapturedBatch, batch: Batch) -> None:
    """Copy the batch into the captured one and pad."""
    target, rows = captured.batch, len(batch.token_ids)
    requests, width = batch.block_tables.shape[0] - 1, batch.block_tables.shape[1]
    padding = target.block_tables.shape[0] - 1
    captured.inputs.zero_()
    target.block_tables.fill_(NULL_BLOCK)
    target.block_tables[:requests, :width].copy_(batch.block_tables[:-1])
    target.token_ids[:rows].copy_(batch.token_ids)
    target.positions[:rows].copy_(batch.positions)
    target.slots[:rows].copy_(batch.slots)
    target.sample_rows[: len(batch.sample_rows)].copy_(batch.sample_rows)
    assert target.request_index is not None and batch.request_index is not None
    target.request_index.fill_(padding)
    target.request_index[:rows].copy_(
        torch.where(batch.request_index < requests, batch.request_index, padding)
    )
    if target.lora_slots is not None:
        assert batch.lora_slots is not None, "a batch without adapters' slots"
        target.lora_slots.fill_(NO_LORA)
        target.lora_slots[:rows].copy_(batch.lora_slots)
    if target.mrope_positions is not None:
        assert batch.mrope_positions is not None, "a batch without M-RoPE positions"
        target.mrope_positions[:rows].copy_(batch.mrope_positions)
