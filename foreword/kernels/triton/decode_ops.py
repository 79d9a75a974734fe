"""DecodeOps in one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.reference.decode_ops import DecodeOps, DraftLoopState, FlatRows

SLOTS_PER_ITERATION = 256  # slots of an iteration of record_draft_kernel


@triton.jit(do_not_specialize=["token_row", "token_column", "table_width", "width"])
def flatten_rows_kernel(
    token_ids, token_row, token_column, first_position, valid, block_tables, table_width, mrope_offsets,
    out_tokens, out_positions, out_slots, out_request_index, out_mrope_positions, width,
    BLOCK_W: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid (n): the `width` rows of one slot."""
    slot = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_W)
    exists = column < width
    row = slot * width + column
    used = tl.load(valid + row, mask=exists, other=0) != 0
    token = tl.load(token_ids + slot * token_row + column * token_column, mask=used, other=0)
    position = tl.where(used, tl.load(first_position + slot) + column, 0)
    block = tl.load(block_tables + slot * table_width + position // BLOCK_SIZE, mask=used, other=0)
    tl.store(out_tokens + row, token, mask=exists)
    tl.store(out_positions + row, position, mask=exists)
    tl.store(out_slots + row, tl.where(used, block * BLOCK_SIZE + position % BLOCK_SIZE, 0), mask=exists)
    tl.store(out_request_index + row, tl.where(used, slot, tl.num_programs(0)), mask=exists)
    if out_mrope_positions is not None:
        mrope_position = tl.where(used, position + tl.load(mrope_offsets + slot), 0)
        for axis in tl.static_range(3):
            tl.store(out_mrope_positions + 3 * row + axis, mrope_position, mask=exists)


@triton.jit(do_not_specialize=["width", "draft_row", "logprob_row", "num_requests"])
def record_draft_kernel(
    token_ids, logits, width, log_sum, draft_step, draft_ids, draft_row, logprobs, logprob_row, last_token,
    position, sample_index, active, logprob_sum, min_logprob_sum, max_tokens, num_requests,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Grid (1): all slots, since draft_step advances once for all."""
    column = tl.load(draft_step)
    for first in range(0, num_requests, SLOTS):
        slot = tl.arange(0, SLOTS) + first
        exists = slot < num_requests
        token_id = tl.load(token_ids + slot, mask=exists, other=-1)
        token = tl.maximum(token_id, 0)
        value = tl.load(logits + slot.to(tl.int64) * width + token, mask=exists, other=0.0).to(tl.float64)
        drafted = (tl.load(active + slot, mask=exists, other=0) != 0) & (token_id >= 0)
        total = tl.load(log_sum + slot, mask=exists, other=0.0).to(tl.float64)
        logprob = tl.where(drafted, value - total, 0.0)
        tl.store(draft_ids + column * draft_row + slot, tl.where(drafted, token_id, -1), mask=exists)
        tl.store(logprobs + column * logprob_row + slot, logprob, mask=exists)
        new_sum = tl.load(logprob_sum + slot, mask=exists, other=0.0) + logprob
        tl.store(logprob_sum + slot, new_sum, mask=exists)
        below = new_sum < tl.load(min_logprob_sum + slot, mask=exists, other=0.0)
        more = drafted & (column + 1 < tl.load(max_tokens + slot, mask=exists, other=0)) & (below == 0)
        tl.store(active + slot, more, mask=exists)
        tl.store(last_token + slot, token, mask=exists)
        tl.store(position + slot, tl.load(position + slot, mask=exists, other=0) + 1, mask=exists)
        tl.store(sample_index + slot, tl.load(sample_index + slot, mask=exists, other=0) + 1, mask=exists)
    tl.debug_barrier()
    tl.store(draft_step, column + 1)


@triton.jit(
    do_not_specialize=["table_row", "draft_row", "draft_column", "logprob_row", "logprob_column", "width"]
)
def commit_kernel(
    slot_table, table_row, active_slots, sampled_ids, draft_ids, draft_row, draft_column,
    logprobs, logprob_row, logprob_column, result, width, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Grid (n): the width = 1 + d rows of one slot. A slot listed twice is the inactive padding slot."""
    index = tl.program_id(0).to(tl.int64)
    count = tl.num_programs(0)
    state = slot_table + tl.load(active_slots + index)
    alive = tl.load(state)
    length = tl.load(state + table_row)
    last = tl.load(state + 3 * table_row)
    place = tl.arange(0, BLOCK_W)
    exists, drafted = place < width, place < width - 1
    token = tl.load(sampled_ids + index * width + place, mask=exists, other=-1)
    draft = tl.load(draft_ids + index * draft_row + place * draft_column, mask=drafted, other=-1)
    bits = tl.load(logprobs + index * logprob_row + place * logprob_column, mask=drafted, other=0)
    agreed = drafted & (draft >= 0) & (draft == token) & (alive != 0)
    accepted = tl.min(tl.where(agreed, BLOCK_W, place))
    new_last = tl.sum(tl.where(place == accepted, token, 0))
    new_prev = tl.sum(tl.where(place == accepted - 1, token, 0))
    new_prev = tl.where(accepted > 0, new_prev, last)
    still_active = (alive != 0) & (new_last >= 0)
    tl.debug_barrier()
    tl.store(state, still_active.to(tl.int64))
    tl.store(state + table_row, length + accepted + 1, mask=still_active)
    tl.store(state + 2 * table_row, new_prev, mask=still_active)
    tl.store(state + 3 * table_row, new_last, mask=still_active)
    tl.store(result + index, alive)
    tl.store(result + count + index, (accepted + 1).to(tl.int64))
    tl.store(result + (2 + place) * count + index, token, mask=exists)
    tl.store(result + (2 + width + place) * count + index, draft, mask=drafted)
    tl.store(result + (1 + 2 * width + place) * count + index, bits, mask=drafted)


class TritonDecodeOps(DecodeOps):
    """Three launches instead of dozens of torch operations, whose launch costs more than their work."""

    def _flatten_rows(
        self,
        token_ids: Tensor,
        first_position: Tensor,
        valid: Tensor,
        block_tables: Tensor,
        mrope_offsets: Tensor,
        block_size: int,
        mrope: bool,
    ) -> FlatRows:
        count, width = token_ids.shape
        assert block_tables.is_contiguous()
        tokens, positions, slots, request_index = (first_position.new_empty(count * width) for _ in range(4))
        mrope_positions = first_position.new_empty(count * width, 3) if mrope else None
        flat_rows = tokens, positions, slots, request_index, mrope_positions
        flatten_rows_kernel[count,](
            *(token_ids, *token_ids.stride(), first_position.contiguous(), valid.contiguous()),
            *(block_tables, block_tables.shape[1], mrope_offsets.contiguous(), *flat_rows, width),
            BLOCK_W=triton.next_power_of_2(width),
            BLOCK_SIZE=block_size,
            num_warps=1,
        )
        return flat_rows

    def record_draft(self, state: DraftLoopState, token_ids: Tensor, logits: Tensor, log_sum: Tensor) -> None:
        count = len(token_ids)
        assert state.draft_ids.stride(1) == state.logprobs.stride(1) == logits.stride(1) == 1
        record_draft_kernel[1,](
            *(token_ids, logits, logits.stride(0), log_sum, state.draft_step),
            *(state.draft_ids, state.draft_ids.stride(0), state.logprobs, state.logprobs.stride(0)),
            *(state.last_token, state.position, state.sample_index, state.active, state.logprob_sum),
            *(state.min_logprob_sum, state.max_tokens, count),
            SLOTS=SLOTS_PER_ITERATION,
            num_warps=4,
            enable_fp_fusion=False,
        )

    def commit(
        self,
        slot_table: Tensor,
        active_slots: Tensor,
        sampled_ids: Tensor,
        draft_ids: Tensor,
        draft_logprobs: Tensor,
        result: Tensor,
    ) -> None:
        count, width = sampled_ids.shape
        assert sampled_ids.is_contiguous() and result.is_contiguous() and slot_table.is_contiguous()
        bits = draft_logprobs.view(torch.int64)
        commit_kernel[count,](
            *(slot_table, slot_table.stride(0), active_slots, sampled_ids),
            *(draft_ids, *draft_ids.stride(), bits, *bits.stride(), result, width),
            BLOCK_W=triton.next_power_of_2(width),
            num_warps=1,
        )
