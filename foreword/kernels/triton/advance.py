"""What a round does beside the model's passes and sampling, in one launch each: see `foreword.kernels.lanes.LaneSteps`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.lanes import Guessing, LaidOut, LaneSteps

__all__ = ["TritonLaneSteps"]


@triton.jit(do_not_specialize=["table_width"])
def rows_kernel(
    token_ids, token_row, token_column, first, valid, tables, table_width, shifts,
    out_tokens, out_positions, out_slots, out_owners, out_places,
    WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid (n): the WIDTH rows of one request."""
    lane = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_W)
    exists = column < WIDTH
    row = lane * WIDTH + column
    own = tl.load(valid + row, mask=exists, other=0) != 0
    token = tl.load(token_ids + lane * token_row + column * token_column, mask=own, other=0)
    position = tl.where(own, tl.load(first + lane) + column, 0)
    block = tl.load(tables + lane * table_width + position // BLOCK_SIZE, mask=own, other=0)
    tl.store(out_tokens + row, token, mask=exists)
    tl.store(out_positions + row, position, mask=exists)
    tl.store(out_slots + row, tl.where(own, block * BLOCK_SIZE + position % BLOCK_SIZE, 0), mask=exists)
    tl.store(out_owners + row, tl.where(own, lane, tl.num_programs(0)), mask=exists)
    if out_places is not None:
        place = tl.where(own, position + tl.load(shifts + lane), 0)
        for direction in tl.static_range(3):
            tl.store(out_places + 3 * row + direction, place, mask=exists)


@triton.jit(do_not_specialize=["num_requests"])
def guess_kernel(
    token_ids, logits, width, log_sum, number, guesses, guess_row, logprobs, logprob_row, token, place, index, going, total,
    floor, limit, num_requests, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (1): all requests, since the number of the guess goes up for all at once."""
    lane = tl.arange(0, BLOCK_N)
    exists = lane < num_requests
    column = tl.load(number)
    token_id = tl.load(token_ids + lane, mask=exists, other=-1)
    chosen = tl.maximum(token_id, 0)
    value = tl.load(logits + lane.to(tl.int64) * width + chosen, mask=exists, other=0.0).to(tl.float64)
    guessed = (tl.load(going + lane, mask=exists, other=0) != 0) & (token_id >= 0)
    logprob = tl.where(guessed, value - tl.load(log_sum + lane, mask=exists, other=0.0).to(tl.float64), 0.0)
    tl.store(guesses + column * guess_row + lane, tl.where(guessed, token_id, -1), mask=exists)
    tl.store(logprobs + column * logprob_row + lane, logprob, mask=exists)
    sum_of_all = tl.load(total + lane, mask=exists, other=0.0) + logprob
    tl.store(total + lane, sum_of_all, mask=exists)
    below = sum_of_all < tl.load(floor + lane, mask=exists, other=0.0)
    more = guessed & (column + 1 < tl.load(limit + lane, mask=exists, other=0)) & (below == 0)
    tl.store(going + lane, more, mask=exists)
    tl.store(token + lane, chosen, mask=exists)
    tl.store(place + lane, tl.load(place + lane, mask=exists, other=0) + 1, mask=exists)
    tl.store(index + lane, tl.load(index + lane, mask=exists, other=0) + 1, mask=exists)
    tl.debug_barrier()
    tl.store(number, column + 1)


@triton.jit
def advance_kernel(
    table, table_row, chosen, sampled, guesses, guess_row, guess_column, logprobs, logprob_row, logprob_column, result,
    WIDTH: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Grid (n): one request, its WIDTH = 1 + d rows. Who is chosen twice is not alive, and does not change."""
    lane = tl.program_id(0).to(tl.int64)
    count = tl.num_programs(0)
    state = table + tl.load(chosen + lane)
    alive = tl.load(state)
    length = tl.load(state + table_row)
    last = tl.load(state + 3 * table_row)
    place = tl.arange(0, BLOCK_W)
    exists, drafted = place < WIDTH, place < WIDTH - 1
    token = tl.load(sampled + lane * WIDTH + place, mask=exists, other=-1)
    guess = tl.load(guesses + lane * guess_row + place * guess_column, mask=drafted, other=-1)
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


class TritonLaneSteps(LaneSteps):
    """Three launches where torch has dozens, each of which takes longer to begin than to run."""

    def _laid_out(
        self, token_ids: Tensor, first: Tensor, valid: Tensor, tables: Tensor, shifts: Tensor, block_size: int, directions: bool
    ) -> LaidOut:
        count, width = token_ids.shape
        assert tables.is_contiguous()
        tokens, positions, slots, owners = (first.new_empty(count * width) for _ in range(4))
        places = first.new_empty(count * width, 3) if directions else None
        rows_kernel[count,](
            token_ids,
            token_ids.stride(0),
            token_ids.stride(1),
            first.contiguous(),
            valid.contiguous(),
            tables,
            tables.shape[1],
            shifts.contiguous(),
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

    def guess(self, state: Guessing, token_ids: Tensor, logits: Tensor, log_sum: Tensor) -> None:
        count = len(token_ids)
        assert state.guesses.stride(1) == state.logprobs.stride(1) == logits.stride(1) == 1
        guess_kernel[1,](
            token_ids,
            logits,
            logits.stride(0),
            log_sum,
            state.column,
            state.guesses,
            state.guesses.stride(0),
            state.logprobs,
            state.logprobs.stride(0),
            state.token,
            state.place,
            state.index,
            state.going,
            state.total,
            state.floor,
            state.limit,
            count,
            BLOCK_N=triton.next_power_of_2(count),
            num_warps=4,
            enable_fp_fusion=False,
        )

    def advance(self, table: Tensor, chosen: Tensor, sampled: Tensor, guesses: Tensor, logprobs: Tensor, result: Tensor) -> None:
        count, width = sampled.shape
        assert sampled.is_contiguous() and result.is_contiguous() and table.is_contiguous()
        bits = logprobs.view(torch.int64)
        advance_kernel[count,](
            table,
            table.stride(0),
            chosen,
            sampled,
            guesses,
            *guesses.stride(),
            bits,
            *bits.stride(),
            result,
            WIDTH=width,
            BLOCK_W=triton.next_power_of_2(width),
            num_warps=1,
        )
