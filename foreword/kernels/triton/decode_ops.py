"""What a round does beside the model's passes and sampling, in one launch each: see `foreword.executor.decode_slots.LaneSteps`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.executor.decode_slots import DecodeOps, DraftLoopState, FlatRows

__all__ = ["TritonDecodeOps"]


@triton.jit(do_not_specialize=["table_width"])
def flatten_rows_kernel(
    token_ids, token_row, token_column, first_position, valid, block_tables, table_width, mrope_offsets,
    out_tokens, out_positions, out_slots, out_request_index, out_mrope_positions,
    WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid (n): the WIDTH rows of one request."""
    lane = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_W)
    exists = column < WIDTH
    row = lane * WIDTH + column
    own = tl.load(valid + row, mask=exists, other=0) != 0
    token = tl.load(token_ids + lane * token_row + column * token_column, mask=own, other=0)
    position = tl.where(own, tl.load(first_position + lane) + column, 0)
    block = tl.load(block_tables + lane * table_width + position // BLOCK_SIZE, mask=own, other=0)
    tl.store(out_tokens + row, token, mask=exists)
    tl.store(out_positions + row, position, mask=exists)
    tl.store(out_slots + row, tl.where(own, block * BLOCK_SIZE + position % BLOCK_SIZE, 0), mask=exists)
    tl.store(out_request_index + row, tl.where(own, lane, tl.num_programs(0)), mask=exists)
    if out_mrope_positions is not None:
        place = tl.where(own, position + tl.load(mrope_offsets + lane), 0)
        for direction in tl.static_range(3):
            tl.store(out_mrope_positions + 3 * row + direction, place, mask=exists)


@triton.jit(do_not_specialize=["num_requests"])
def record_draft_kernel(
    token_ids, logits, width, log_sum, draft_step, draft_ids, draft_row, logprobs, logprob_row, last_token, position, sample_index, active, logprob_sum,
    min_logprob_sum, max_tokens, num_requests, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (1): all requests, since the number of the guess goes up for all at once."""
    lane = tl.arange(0, BLOCK_N)
    exists = lane < num_requests
    column = tl.load(draft_step)
    token_id = tl.load(token_ids + lane, mask=exists, other=-1)
    chosen = tl.maximum(token_id, 0)
    value = tl.load(logits + lane.to(tl.int64) * width + chosen, mask=exists, other=0.0).to(tl.float64)
    guessed = (tl.load(active + lane, mask=exists, other=0) != 0) & (token_id >= 0)
    logprob = tl.where(guessed, value - tl.load(log_sum + lane, mask=exists, other=0.0).to(tl.float64), 0.0)
    tl.store(draft_ids + column * draft_row + lane, tl.where(guessed, token_id, -1), mask=exists)
    tl.store(logprobs + column * logprob_row + lane, logprob, mask=exists)
    sum_of_all = tl.load(logprob_sum + lane, mask=exists, other=0.0) + logprob
    tl.store(logprob_sum + lane, sum_of_all, mask=exists)
    below = sum_of_all < tl.load(min_logprob_sum + lane, mask=exists, other=0.0)
    more = guessed & (column + 1 < tl.load(max_tokens + lane, mask=exists, other=0)) & (below == 0)
    tl.store(active + lane, more, mask=exists)
    tl.store(last_token + lane, chosen, mask=exists)
    tl.store(position + lane, tl.load(position + lane, mask=exists, other=0) + 1, mask=exists)
    tl.store(sample_index + lane, tl.load(sample_index + lane, mask=exists, other=0) + 1, mask=exists)
    tl.debug_barrier()
    tl.store(draft_step, column + 1)


@triton.jit
def commit_kernel(
    slot_table, table_row, active_slots, sampled_ids, draft_ids, draft_row, draft_column, logprobs, logprob_row, logprob_column, result,
    WIDTH: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Grid (n): one request, its WIDTH = 1 + d rows. Who is chosen twice is not alive, and does not change."""
    lane = tl.program_id(0).to(tl.int64)
    count = tl.num_programs(0)
    state = slot_table + tl.load(active_slots + lane)
    alive = tl.load(state)
    length = tl.load(state + table_row)
    last = tl.load(state + 3 * table_row)
    place = tl.arange(0, BLOCK_W)
    exists, drafted = place < WIDTH, place < WIDTH - 1
    token = tl.load(sampled_ids + lane * WIDTH + place, mask=exists, other=-1)
    guess = tl.load(draft_ids + lane * draft_row + place * draft_column, mask=drafted, other=-1)
    bits = tl.load(logprobs + lane * logprob_row + place * logprob_column, mask=drafted, other=0)
    agreed = drafted & (guess >= 0) & (guess == token) & (alive != 0)
    accepted = tl.min(tl.where(agreed, BLOCK_W, place))
    run_last = tl.sum(tl.where(place == accepted, token, 0))
    run_before = tl.sum(tl.where(place == accepted - 1, token, 0))
    run_before = tl.where(accepted > 0, run_before, last)
    goes_on = (alive != 0) & (run_last >= 0)
    tl.debug_barrier()
    tl.store(state, goes_on.to(tl.int64))
    tl.store(state + table_row, length + accepted + 1, mask=goes_on)
    tl.store(state + 2 * table_row, run_before, mask=goes_on)
    tl.store(state + 3 * table_row, run_last, mask=goes_on)
    tl.store(result + lane, alive)
    tl.store(result + count + lane, (accepted + 1).to(tl.int64))
    tl.store(result + (2 + place) * count + lane, token, mask=exists)
    tl.store(result + (2 + WIDTH + place) * count + lane, guess, mask=drafted)
    tl.store(result + (1 + 2 * WIDTH + place) * count + lane, bits, mask=drafted)


class TritonDecodeOps(DecodeOps):
    """Three launches where torch has dozens, each of which takes longer to begin than to run."""

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
        tokens, positions, slots, owners = (first_position.new_empty(count * width) for _ in range(4))
        places = first_position.new_empty(count * width, 3) if mrope else None
        flatten_rows_kernel[count,](
            token_ids,
            token_ids.stride(0),
            token_ids.stride(1),
            first_position.contiguous(),
            valid.contiguous(),
            block_tables,
            block_tables.shape[1],
            mrope_offsets.contiguous(),
            tokens,
            positions,
            slots,
            owners,
            places,
            WIDTH=width,
            BLOCK_W=triton.next_power_of_2(width),
            BLOCK_SIZE=block_size,
            num_warps=1,
        )
        return tokens, positions, slots, owners, places

    def record_draft(self, state: DraftLoopState, token_ids: Tensor, logits: Tensor, log_sum: Tensor) -> None:
        count = len(token_ids)
        assert state.draft_ids.stride(1) == state.logprobs.stride(1) == logits.stride(1) == 1
        record_draft_kernel[1,](
            token_ids,
            logits,
            logits.stride(0),
            log_sum,
            state.draft_step,
            state.draft_ids,
            state.draft_ids.stride(0),
            state.logprobs,
            state.logprobs.stride(0),
            state.last_token,
            state.position,
            state.sample_index,
            state.active,
            state.logprob_sum,
            state.min_logprob_sum,
            state.max_tokens,
            count,
            BLOCK_N=triton.next_power_of_2(count),
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
            slot_table,
            slot_table.stride(0),
            active_slots,
            sampled_ids,
            draft_ids,
            *draft_ids.stride(),
            bits,
            *bits.stride(),
            result,
            WIDTH=width,
            BLOCK_W=triton.next_power_of_2(width),
            num_warps=1,
        )
