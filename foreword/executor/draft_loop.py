"""Guesses of a draft model, sampled and fed back on the device: no pass waits for the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foreword.core.batch import NULL_BLOCK, Batch
from foreword.executor.cuda_graphs import CudaGraphPool, capture_sizes, pick_size
from foreword.executor.decode_slots import (
    DecodeLimits,
    DecodeOps,
    DraftLoopState,
    SamplerClass,
    SlotField,
    SlotView,
    choose_sampler_class,
    copy_to_device,
    pack_slots,
    sample_slots,
)
from foreword.kernels.ops import DraftJob, DraftTokens, Ops

__all__ = ["DeviceDraftLoop"]

INITIAL_DRAFT_CAPACITY = 32  # at first; more are made room for
NUM_CATCH_UP_TOKENS = 2  # tokens of a request that may have no KV after a round: the last guess, if it was right, and what followed it


class DeviceDraftLoop:
    """What a draft model knows of up to `limits.rows` requests while it guesses for them.

    A pass for n requests is one graph, launched as often as there are guesses to come; what it reads lies at fixed addresses:

    lines    int64 [len(Field), rows]  how each samples; LENGTH is the index of the next guess, the counter of its noise
    tables   int64 [rows+1, M]         block tables; for n requests, line n is the padding's
    token    int64 [rows]              the last guess
    place    int64 [rows]              its position in the draft model's cache
    going    bool [rows]               whether more guesses are wanted of the request
    total    float64 [rows]            sum of the log-probabilities, and `floor`, which ends the draft
    limit    int64 [rows]              guesses at most
    column   int64 [1]                 number of the next guess
    guesses  int64 [K, rows], logprobs float64 [K, rows]: -1 and 0 behind the last one

    width       V of the draft model
    unused      int64 [U]: ids that are never sampled
    generation  what was recorded in an earlier one must not be launched any more: room was made for longer drafts
    """

    def __init__(
        self,
        ops: Ops,
        decode_ops: DecodeOps,
        forward: Callable[[Batch], Tensor],
        graphs: CudaGraphPool,
        limits: DecodeLimits,
        vocab_size: int,
        block_size: int,
        never_sampled_ids: Tensor,
    ) -> None:
        self.graphs = graphs
        self.limits = limits
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.never_sampled_ids = never_sampled_ids.to(limits.device)
        self.capture_sizes = capture_sizes(limits.max_rows)
        self._ops = ops
        self._decode_ops = decode_ops
        self._forward = forward
        rows, device = limits.max_rows, limits.device
        self._slot_table = torch.zeros(len(SlotField), rows, dtype=torch.int64, device=device)
        self._block_tables = torch.full(
            (rows + 1, limits.max_blocks), NULL_BLOCK, dtype=torch.int64, device=device
        )
        self._last_token, self._position, self._max_tokens = torch.zeros(
            3, rows, dtype=torch.int64, device=device
        )
        self._active = torch.zeros(rows, dtype=torch.bool, device=device)
        self._logprob_sum, self._min_logprob_sum = torch.zeros(2, rows, dtype=torch.float64, device=device)
        self._draft_step = torch.zeros(1, dtype=torch.int64, device=device)
        self._captured_passes: dict[tuple[int, SamplerClass], Callable[[], None]] = {}
        self.generation = 0
        self._allocate(INITIAL_DRAFT_CAPACITY)

    def matches(self, block_size: int, never_sampled_ids: Tensor) -> bool:
        """Whether these are the ones for such a draft."""
        return block_size == self.block_size and torch.equal(
            never_sampled_ids.to(self.never_sampled_ids.device), self.never_sampled_ids
        )

    def ensure_capacity(self, num_draft_tokens: int) -> None:
        """Make room for so many guesses."""
        if num_draft_tokens > self._draft_ids.shape[0]:
            self._allocate(max(num_draft_tokens, 2 * self._draft_ids.shape[0]))

    def captured_pass(self, num_requests: int, sampler_class: SamplerClass) -> Callable[[], None]:
        """The next guess of `count` requests, a bucket. To be had before anything is set for a draft."""
        if (num_requests, sampler_class) not in self._captured_passes:
            self.clear()
            self._captured_passes[num_requests, sampler_class] = self.graphs.capture(
                lambda: self._run_pass(num_requests, sampler_class)
            )
        return self._captured_passes[num_requests, sampler_class]

    def clear(self) -> None:
        """No request: a pass computes padding."""
        for tensor in (self._slot_table, self._block_tables, self._position, self._active, self._draft_step):
            tensor.zero_()

    def run(self, jobs: Sequence[DraftJob], logits: Tensor) -> list[DraftTokens]:
        """All guesses of lanes that want some, from the logits [len(lanes), V] of their last known tokens."""
        most = max(lane.max_tokens for lane in jobs)
        self.ensure_capacity(most)
        level = choose_sampler_class([lane.sampling for lane in jobs])
        size = pick_size(len(jobs), self.capture_sizes)
        again = self.captured_pass(size, level) if most > 1 else None
        self._upload_jobs(jobs, size)
        self.sample_draft(len(jobs), logits, level)
        if again is not None:
            for _ in range(most - 1):
                again()
        return self._read_drafts(len(jobs), most)

    def first_pass(
        self,
        num_requests: int,
        slots: SlotView,
        block_tables: Tensor,
        with_draft: bool,
        sampler_class: SamplerClass,
    ) -> None:
        """The first pass of a round: KV of the last two tokens known, and the first guess from the last one, if wanted.

        lines   `count` of the requests of a round
        tables  int64 [count+1, M]
        """
        alive, length = slots.alive, slots[SlotField.LENGTH]
        self._slot_table[:, :num_requests].copy_(slots.values)
        self._block_tables[: num_requests + 1].copy_(block_tables)
        self._position[:num_requests].copy_(length - 1)
        self._max_tokens[:num_requests].fill_(self._draft_ids.shape[0])
        self._active[:num_requests].copy_(alive)
        self._logprob_sum[:num_requests].zero_()
        self._min_logprob_sum[:num_requests].fill_(-math.inf)
        self._draft_step.zero_()
        known = torch.stack((slots[SlotField.PREV_TOKEN], slots[SlotField.LAST_TOKEN]), 1)
        known = torch.where(known < self.vocab_size, known, 0)  # a row of the target that stands for no token
        valid = torch.stack((alive & (length >= NUM_CATCH_UP_TOKENS), alive), 1)
        logits = self._forward(self._build_batch(known, length - NUM_CATCH_UP_TOKENS, valid))
        if with_draft:
            self.sample_draft(num_requests, logits, sampler_class)

    def sample_draft(self, num_requests: int, logits: Tensor, sampler_class: SamplerClass) -> None:
        """Sample the next guess of each of the first `count` requests: logits [count, V] are overwritten."""
        lines = SlotView(self._slot_table[:, :num_requests])
        token_ids = sample_slots(
            self._ops, logits, lines, lines[SlotField.LENGTH], self.never_sampled_ids, sampler_class
        )
        self._decode_ops.record_draft(
            self._state(num_requests), token_ids, logits, self._ops.log_sum_exp(logits)
        )

    def _state(self, num_requests: int) -> DraftLoopState:
        """Of the first `count` requests."""
        return DraftLoopState(
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

    def get_draft_ids(self, num_requests: int, num_draft_tokens: int) -> tuple[Tensor, Tensor]:
        """The first `num` of `count` requests: ids int64 [count, num], -1 behind the last one, and log-probabilities float64."""
        return self._draft_ids[:num_draft_tokens, :num_requests].t(), self._draft_logprobs[
            :num_draft_tokens, :num_requests
        ].t()

    def _allocate(self, num_draft_tokens: int) -> None:
        shape, device = (num_draft_tokens, self.limits.max_rows), self.limits.device
        self._draft_ids = torch.full(shape, -1, dtype=torch.int64, device=device)
        self._draft_logprobs = torch.zeros(shape, dtype=torch.float64, device=device)
        self._captured_passes.clear()
        self.generation += 1

    def _run_pass(self, num_requests: int, sampler_class: SamplerClass) -> None:
        """Compute the last guesses, and sample what follows them."""
        batch = self._build_batch(
            self._last_token[:num_requests, None],
            self._position[:num_requests],
            self._active[:num_requests, None],
        )
        self.sample_draft(num_requests, self._forward(batch), sampler_class)

    def _build_batch(self, token_ids: Tensor, first_position: Tensor, valid: Tensor) -> Batch:
        count = len(token_ids)
        shifts, tables = self._slot_table[SlotField.MROPE_OFFSET, :count], self._block_tables[: count + 1]
        return self._decode_ops.build_batch(
            token_ids,
            first_position,
            valid,
            tables,
            shifts,
            self.block_size,
            self.limits.uses_mrope,
            only_last=True,
        )

    def _upload_jobs(self, jobs: Sequence[DraftJob], size: int) -> None:
        """What the passes for these lanes read, in a bucket of this size."""
        count, blocks = len(jobs), self.limits.max_blocks
        known = [lane.token_ids for lane in jobs]
        lines = pack_slots(
            known,
            [lane.first_draft_index for lane in jobs],
            [lane.mrope_offset for lane in jobs],
            [lane.sampling for lane in jobs],
        )
        last = torch.tensor([lane.start_position + len(lane.token_ids) - 1 for lane in jobs])
        limits = torch.tensor([lane.max_tokens for lane in jobs])
        width = max(min(len(lane.block_table), blocks) for lane in jobs)
        held = [list(lane.block_table[:width]) for lane in jobs]
        tables = torch.tensor([[*own, *[NULL_BLOCK] * (width - len(own))] for own in held])
        copy_to_device(lines, self._slot_table[:, :count])
        copy_to_device(last, self._position[:count])
        copy_to_device(limits, self._max_tokens[:count])
        copy_to_device(
            torch.tensor([lane.min_logprob_sum for lane in jobs], dtype=torch.float64),
            self._min_logprob_sum[:count],
        )
        self._block_tables[: size + 1].fill_(NULL_BLOCK)
        copy_to_device(tables, self._block_tables[:count, :width])
        self._active[:count].fill_(True)
        self._active[count:size].fill_(False)
        self._logprob_sum.zero_()
        self._draft_step.zero_()

    def _read_drafts(self, num_requests: int, num_draft_tokens: int) -> list[DraftTokens]:
        """In one transfer."""
        ids, logprobs = self.get_draft_ids(num_requests, num_draft_tokens)
        both = torch.cat((ids, logprobs.view(torch.int64)), 1).cpu()
        lengths = (both[:, :num_draft_tokens] >= 0).sum(1).tolist()
        rows = zip(
            both[:, :num_draft_tokens].tolist(),
            both[:, num_draft_tokens:].view(torch.float64).tolist(),
            lengths,
            strict=True,
        )
        return [DraftTokens(tuple(own[:length]), tuple(scores[:length])) for own, scores, length in rows]
