"""Draft loop on the device: a draft model samples token after token, and no pass waits for the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foreword.core.batch import NULL_BLOCK, Batch, download
from foreword.cuda_graphs.capture import capture_sizes, pick_size
from foreword.cuda_graphs.decode_slots import (
    LoopConfig,
    SamplerClass,
    SlotView,
    choose_sampler_class,
    copy_to_device,
    pack_slots,
    sample_slots,
)
from foreword.kernels.ops import DraftJob, DraftTokens
from foreword.kernels.reference.decode_ops import DraftLoopState, SlotField

INITIAL_DRAFT_CAPACITY = 32  # draft tokens; grows on demand
NUM_CATCH_UP_TOKENS = 2  # tokens without KV after a step: the last draft token if accepted, and its successor


class DeviceDraftLoop:
    """Drafts of up to `limits.max_requests` requests.

    A pass for n requests is one graph, launched once for each draft token; its inputs lie at fixed addresses.
    """

    def __init__(self, config: LoopConfig) -> None:
        limits = config.limits
        num_slots, device = limits.max_requests, limits.device
        self.config = config
        self.graphs = config.graphs
        self.limits = limits
        self.capture_sizes = capture_sizes(num_slots)
        # Buffers grow for longer drafts; graphs captured in an earlier generation read the old ones.
        self.generation = 0
        # LENGTH is the index of the next draft token, the counter of its noise.
        self._slot_table = torch.zeros(len(SlotField), num_slots, dtype=torch.int64, device=device)
        # For n requests, row n is the padding's.
        self._block_tables = torch.full(
            (num_slots + 1, limits.max_blocks), NULL_BLOCK, dtype=torch.int64, device=device
        )
        # The following as in DraftLoopState, [max_requests] or [1].
        self._last_token, self._position, self._max_tokens = torch.zeros(
            3, num_slots, dtype=torch.int64, device=device
        )
        self._active = torch.zeros(num_slots, dtype=torch.bool, device=device)
        self._logprob_sum, self._min_logprob_sum = torch.zeros(
            2, num_slots, dtype=torch.float64, device=device
        )
        self._draft_step = torch.zeros(1, dtype=torch.int64, device=device)
        self._captured_passes: dict[tuple[int, SamplerClass], Callable[[], None]] = {}
        self._allocate(INITIAL_DRAFT_CAPACITY)

    def matches(self, block_size: int, never_sampled_ids: Tensor) -> bool:
        known = self.config.never_sampled_ids
        return block_size == self.config.block_size and torch.equal(never_sampled_ids.to(known.device), known)

    def ensure_capacity(self, num_draft_tokens: int) -> None:
        capacity = len(self._draft_ids)
        if num_draft_tokens > capacity:
            self._allocate(max(num_draft_tokens, 2 * capacity))

    def captured_pass(self, num_requests: int, sampler_class: SamplerClass) -> Callable[[], None]:
        """The pass for the next draft token; a capture clears all state, so call this before a draft begins.

        num_requests  one of capture_sizes
        """
        key = (num_requests, sampler_class)
        if key not in self._captured_passes:
            for tensor in (
                self._slot_table, self._block_tables, self._position, self._active, self._draft_step
            ):  # fmt: skip
                tensor.zero_()
            self._captured_passes[key] = self.graphs.capture(lambda: self._run_pass(*key))
        return self._captured_passes[key]

    def run(self, jobs: Sequence[DraftJob], logits: Tensor) -> list[DraftTokens]:
        """Draft at least one token for each job, from the logits [len(jobs), V] of its last known token."""
        max_tokens = max(job.max_tokens for job in jobs)
        self.ensure_capacity(max_tokens)
        sampler_class = choose_sampler_class([job.sampling for job in jobs])
        size = pick_size(len(jobs), self.capture_sizes)
        run_pass = self.captured_pass(size, sampler_class) if max_tokens > 1 else None
        self._upload_jobs(jobs, size)
        self._sample_draft(len(jobs), logits, sampler_class)
        if run_pass is not None:
            for _ in range(max_tokens - 1):
                run_pass()
        return self.download_drafts(len(jobs), max_tokens)()

    def first_pass(
        self,
        num_requests: int,
        slots: SlotView,
        block_tables: Tensor,
        with_draft: bool,
        sampler_class: SamplerClass,
    ) -> None:
        """First pass of a decode step: KV of the last two known tokens, and the first draft token if any.

        slots         num_requests columns of the decode loop's table
        block_tables  int64 [num_requests + 1, M]
        """
        alive, length = slots.alive, slots[SlotField.LENGTH]
        self._slot_table[:, :num_requests].copy_(slots.values)
        self._block_tables[: num_requests + 1].copy_(block_tables)
        self._position[:num_requests].copy_(length - 1)
        self._max_tokens[:num_requests].fill_(len(self._draft_ids))
        self._active[:num_requests].copy_(alive)
        self._logprob_sum[:num_requests].zero_()
        self._min_logprob_sum[:num_requests].fill_(-math.inf)
        self._draft_step.zero_()
        known = torch.stack((slots[SlotField.PREV_TOKEN], slots[SlotField.LAST_TOKEN]), 1)
        known = torch.where(known < self.config.vocab_size, known, 0)  # ids of the target only
        valid = torch.stack((alive & (length >= NUM_CATCH_UP_TOKENS), alive), 1)
        logits = self.config.forward(self._build_batch(known, length - NUM_CATCH_UP_TOKENS, valid))
        if with_draft:
            self._sample_draft(num_requests, logits, sampler_class)

    def get_draft_ids(self, num_requests: int, num_draft_tokens: int) -> tuple[Tensor, Tensor]:
        """Ids int64 [num_requests, num_draft_tokens], -1 after the last one, and their logprobs float64."""
        ids = self._draft_ids[:num_draft_tokens, :num_requests].t()
        return ids, self._draft_logprobs[:num_draft_tokens, :num_requests].t()

    def download_drafts(self, num_requests: int, num_draft_tokens: int) -> Callable[[], list[DraftTokens]]:
        """Start one copy of the drafts to the host; the result waits for it."""
        ids, logprobs = self.get_draft_ids(num_requests, num_draft_tokens)
        wait = download([torch.cat((ids, logprobs.view(torch.int64)), 1)])

        def read() -> list[DraftTokens]:
            (both,) = wait()
            ids, logprobs = both[:, :num_draft_tokens], both[:, num_draft_tokens:].view(torch.float64)
            rows = zip(ids.tolist(), logprobs.tolist(), (ids >= 0).sum(1).tolist(), strict=True)
            return [DraftTokens(tuple(row[:length]), tuple(values[:length])) for row, values, length in rows]

        return read

    def _sample_draft(self, num_requests: int, logits: Tensor, sampler_class: SamplerClass) -> None:
        """Sample the next draft token of each request; logits [num_requests, V] are overwritten."""
        ops, slots = self.config.ops, SlotView(self._slot_table[:, :num_requests])
        token_ids = sample_slots(
            ops, logits, slots, slots[SlotField.LENGTH], self.config.never_sampled_ids, sampler_class
        )
        state = DraftLoopState(
            draft_step=self._draft_step,
            draft_ids=self._draft_ids[:, :num_requests],
            logprobs=self._draft_logprobs[:, :num_requests],
            last_token=self._last_token[:num_requests],
            position=self._position[:num_requests],
            sample_index=self._slot_table[SlotField.LENGTH, :num_requests],
            active=self._active[:num_requests],
            logprob_sum=self._logprob_sum[:num_requests],
            min_logprob_sum=self._min_logprob_sum[:num_requests],
            max_tokens=self._max_tokens[:num_requests],
        )
        ops.decode_ops.record_draft(state, token_ids, logits, ops.log_sum_exp(logits))

    def _allocate(self, num_draft_tokens: int) -> None:
        shape, device = (num_draft_tokens, self.limits.max_requests), self.limits.device
        self._draft_ids = torch.full(shape, -1, dtype=torch.int64, device=device)
        self._draft_logprobs = torch.zeros(shape, dtype=torch.float64, device=device)
        self._captured_passes.clear()
        self.generation += 1

    def _run_pass(self, num_requests: int, sampler_class: SamplerClass) -> None:
        """Compute the last draft tokens and sample the next ones."""
        batch = self._build_batch(
            self._last_token[:num_requests, None],
            self._position[:num_requests],
            self._active[:num_requests, None],
        )
        self._sample_draft(num_requests, self.config.forward(batch), sampler_class)

    def _build_batch(self, token_ids: Tensor, first_position: Tensor, valid: Tensor) -> Batch:
        count = len(token_ids)
        return self.config.ops.decode_ops.build_batch(
            token_ids,
            first_position,
            valid,
            self._block_tables[: count + 1],
            self._slot_table[SlotField.MROPE_OFFSET, :count],
            self.config.block_size,
            self.limits.uses_mrope,
            only_last=True,
        )

    def _upload_jobs(self, jobs: Sequence[DraftJob], size: int) -> None:
        """Set the state of the jobs, padded to `size` requests."""
        count, max_blocks = len(jobs), self.limits.max_blocks
        columns = pack_slots(
            [job.token_ids for job in jobs],
            [job.first_draft_index for job in jobs],
            [job.mrope_offset for job in jobs],
            [job.sampling for job in jobs],
        )
        positions = torch.tensor([job.start_position + len(job.token_ids) - 1 for job in jobs])
        floors = torch.tensor([job.min_logprob_sum for job in jobs], dtype=torch.float64)
        width = max(min(len(job.block_table), max_blocks) for job in jobs)
        tables = [list(job.block_table[:width]) for job in jobs]
        padded = torch.tensor([[*table, *[NULL_BLOCK] * (width - len(table))] for table in tables])
        copy_to_device(columns, self._slot_table[:, :count])
        copy_to_device(positions, self._position[:count])
        copy_to_device(torch.tensor([job.max_tokens for job in jobs]), self._max_tokens[:count])
        copy_to_device(floors, self._min_logprob_sum[:count])
        self._block_tables[: size + 1].fill_(NULL_BLOCK)
        copy_to_device(padded, self._block_tables[:count, :width])
        self._active[:count].fill_(True)
        self._active[count:size].fill_(False)
        self._logprob_sum.zero_()
        self._draft_step.zero_()
