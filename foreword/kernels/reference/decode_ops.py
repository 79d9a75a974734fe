"""The steps of a decode loop besides the forward pass and sampling, as torch operations of fixed shapes.

They never read values on the host, so CUDA graphs can hold them. Rows of inactive slots are padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from foreword.core.batch import NULL_BLOCK, Batch

# token ids, positions, slots and request indices int64 [n * w]; M-RoPE positions int64 [n * w, 3] or None
FlatRows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


class SlotField(IntEnum):
    """The rows of a slot table, int64 [len(SlotField), slots]: one column for each request."""

    ALIVE = 0  # whether the request takes part
    LENGTH = 1  # tokens known
    PREV_TOKEN = 2  # token before the last one; arbitrary if there is none
    LAST_TOKEN = 3
    MROPE_OFFSET = 4
    SEED = 5
    GREEDY = 6
    TOP_K = 7
    TEMPERATURE = 8  # this and the following: bits of a float64
    TOP_P = 9
    MIN_P = 10
    LORA_SLOT = 11  # NO_LORA without an adapter


NUM_MUTABLE_FIELDS = SlotField.MROPE_OFFSET  # the fields before it change from step to step


@dataclass(frozen=True, slots=True)
class DraftLoopState:
    """State of n requests during a draft, updated in place."""

    draft_step: Tensor  # int64 [1]: index of the next draft token
    draft_ids: Tensor  # int64 [K, n], -1 where a request has none
    logprobs: Tensor  # float64 [K, n], 0 where a request has none
    last_token: Tensor  # int64 [n]: the last draft token
    position: Tensor  # int64 [n]: its position in the draft model's cache
    sample_index: Tensor  # int64 [n]: absolute index of the next draft token
    active: Tensor  # bool [n]: whether the request drafts on
    logprob_sum: Tensor  # float64 [n]
    min_logprob_sum: Tensor  # float64 [n], constant: the draft stops below it
    max_tokens: Tensor  # int64 [n], constant


def count_accepted(sampled_ids: Tensor, draft_ids: Tensor, num_draft_tokens: Tensor) -> Tensor:
    """Length of the draft's prefix that equals the samples, int64 [n]: sampling/verify.py on tensors.

    sampled_ids       int64 [n, 1 + d]: column j follows draft_ids[:, :j]
    draft_ids         int64 [n, d]
    num_draft_tokens  int64 [n], at most d: later columns are ignored
    """
    drafted = torch.arange(draft_ids.shape[1], device=draft_ids.device) < num_draft_tokens[:, None]
    return (drafted & (sampled_ids[:, :-1] == draft_ids)).long().cumprod(dim=1).sum(dim=1)


class DecodeOps:
    """The reference. A backend may fuse each of flatten_rows, record_draft and commit into one kernel."""

    def build_batch(
        self,
        token_ids: Tensor,
        first_position: Tensor,
        valid: Tensor,
        block_tables: Tensor,
        mrope_offsets: Tensor,
        block_size: int,
        mrope: bool,
        only_last: bool,
    ) -> Batch:
        """The batch of n requests with w rows each.

        token_ids       int64 [n, w]
        first_position  int64 [n]: position of the first row
        valid           bool [n, w]: other rows are padding
        block_tables    int64 [n+1, M]: the last row is the padding's
        mrope_offsets   int64 [n]: position minus token index, with M-RoPE
        only_last       sample the last row of each request instead of every row
        """
        count, width = token_ids.shape
        ids, positions, slots, owners, mrope_positions = self._flatten_rows(
            token_ids, first_position, valid, block_tables, mrope_offsets, block_size, mrope
        )
        first, step = (width - 1, width) if only_last else (0, 1)
        return Batch(
            token_ids=ids,
            positions=positions,
            slots=slots,
            block_tables=block_tables,
            query_start_loc=tuple(range(0, count * width + 1, width)),
            seq_lens=(),
            sample_rows=torch.arange(first, count * width, step, device=token_ids.device),
            block_size=block_size,
            mrope_positions=mrope_positions,
            request_index=owners,
        )

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
        """The per-row tensors of build_batch()."""
        count, width = token_ids.shape
        device = token_ids.device
        requests = torch.arange(count, device=device)[:, None]
        positions = torch.where(valid, first_position[:, None] + torch.arange(width, device=device), 0)
        blocks = block_tables[:-1].gather(1, positions // block_size)
        slots = torch.where(valid, blocks * block_size + positions % block_size, NULL_BLOCK * block_size)
        mrope_positions = None
        if mrope:
            shifted = torch.where(valid, positions + mrope_offsets[:, None], 0)
            mrope_positions = shifted.view(-1, 1).expand(-1, 3).contiguous()
        return (
            torch.where(valid, token_ids, 0).view(-1),
            positions.view(-1),
            slots.view(-1),
            torch.where(valid, requests, count).view(-1),
            mrope_positions,
        )

    def record_draft(self, state: DraftLoopState, token_ids: Tensor, logits: Tensor, log_sum: Tensor) -> None:
        """Append one draft token per request.

        token_ids  int64 [n], -1 where no token is legal
        logits     float32 [n, V] that the tokens were sampled from
        log_sum    float32 [n]: log_sum_exp of the logits
        """
        token = token_ids.clamp(min=0)
        logprobs = logits.gather(1, token[:, None])[:, 0].double() - log_sum.double()
        drafted = state.active & (token_ids >= 0)
        logprobs = torch.where(drafted, logprobs, 0.0)
        state.draft_ids.index_copy_(0, state.draft_step, torch.where(drafted, token_ids, -1)[None])
        state.logprobs.index_copy_(0, state.draft_step, logprobs[None])
        state.draft_step.add_(1)
        state.logprob_sum.add_(logprobs)
        state.active.copy_(
            drafted & (state.draft_step < state.max_tokens) & ~(state.logprob_sum < state.min_logprob_sum)
        )
        state.last_token.copy_(token)
        state.position.add_(1)
        state.sample_index.add_(1)

    def commit(
        self,
        slot_table: Tensor,
        active_slots: Tensor,
        sampled_ids: Tensor,
        draft_ids: Tensor,
        draft_logprobs: Tensor,
        result: Tensor,
    ) -> None:
        """Verify the drafts and advance the requests; a request with a broken row leaves the loop.

        slot_table   int64 [len(SlotField), slots], updated in columns active_slots int64 [n]; only the null
                     slot, which is never alive, may occur twice
        sampled_ids  int64 [n, 1+d]
        draft_ids    int64 [n, d], -1 after the last one; draft_logprobs float64 [n, d]
        result       int64 [3+3d, n], written: ALIVE before the step, number of emitted tokens, sampled_ids,
                     draft_ids, bits of draft_logprobs
        """
        alive, length, prev, last = slot_table[:NUM_MUTABLE_FIELDS].index_select(1, active_slots)
        accepted = count_accepted(sampled_ids, draft_ids, (draft_ids >= 0).long().cumprod(1).sum(1) * alive)
        bits = draft_logprobs.view(torch.int64)
        result.copy_(torch.cat((alive[None], accepted[None] + 1, sampled_ids.t(), draft_ids.t(), bits.t())))
        tokens = torch.cat((last[:, None], sampled_ids), 1)
        new_prev, new_last = tokens.gather(1, torch.stack((accepted, accepted + 1), 1)).unbind(1)
        advances = (alive != 0) & (new_last >= 0)
        advanced = torch.stack((length + accepted + 1, new_prev, new_last))
        state = torch.where(advances, advanced, torch.stack((length, prev, last)))
        slot_table[:NUM_MUTABLE_FIELDS].index_copy_(
            1, active_slots, torch.cat((advances.long()[None], state))
        )
