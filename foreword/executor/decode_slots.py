"""A table of requests on the device, and the rows of a pass made from it without the host.

Everything here is tensor operations of fixed shapes on fixed addresses, so that it can be part of a graph. A line that
stands for nobody, or for a request that takes no part, makes rows of padding.

Fingerprints of rows of logits, for test mode.

Verification of drafts where the host does not look: `sampling/verify.py` on tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreword.core.batch import NULL_BLOCK, Batch
from foreword.kernels.ops import DraftSamplingParams, Ops

__all__ = [
    "NUM_MUTABLE_FIELDS",
    "DecodeLimits",
    "DecodeOps",
    "DraftLoopState",
    "FlatRows",
    "SamplerClass",
    "SlotField",
    "SlotView",
    "choose_sampler_class",
    "copy_to_device",
    "count_accepted",
    "hash_logits",
    "pack_slots",
    "sample_slots",
]


def count_accepted(sampled: Tensor, draft_ids: Tensor, num_draft_tokens: Tensor) -> Tensor:
    """How many leading drafted tokens equal the samples.

    sampled    int64 [L, 1 + D], column j follows drafts[:, :j]
    drafts     int64 [L, D]; what lies beyond num_draft does not count
    num_draft  int64 [L], at most D
    Returns int64 [L].
    """
    drafted = torch.arange(draft_ids.shape[1], device=draft_ids.device) < num_draft_tokens[:, None]
    return (drafted & (sampled[:, :-1] == draft_ids)).long().cumprod(dim=1).sum(dim=1)


NO_TOP_K = 1 << 40  # of top_k
SIGN_BIT = 1 << 63

FlatRows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


class SlotField(IntEnum):
    """The lines of a table, int64 [len(Field), lanes]: a column for each request. The first ones change as it goes on.

    ALIVE        whether it takes part
    LENGTH       tokens known
    BEFORE       token before the last one (anything if there is none)
    LAST         last token known
    TEMPERATURE  and what follows: the bits of a float64
    """

    ALIVE = 0
    LENGTH = 1
    PREV_TOKEN = 2
    LAST_TOKEN = 3
    MROPE_OFFSET = 4
    SEED = 5
    GREEDY = 6
    TOP_K = 7
    TEMPERATURE = 8
    TOP_P = 9
    MIN_P = 10


NUM_MUTABLE_FIELDS = SlotField.MROPE_OFFSET  # so many lines change


class SamplerClass(IntEnum):
    """How much of the pipeline anybody asks for; more than is asked for changes no bit, but costs time."""

    PLAIN = 0
    FILTERED = 1


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """What buffers are made for.

    rows        of a pass that is captured; also requests at once
    blocks      of the longest block table
    directions  the model knows positions in several directions
    """

    max_rows: int
    max_blocks: int
    uses_mrope: bool
    device: torch.device


@dataclass(frozen=True, slots=True)
class SlotView:
    """Columns of a table that were taken out, int64 [len(Field), n]."""

    values: Tensor

    def __getitem__(self, field: SlotField) -> Tensor:
        """int64 [n]"""
        return self.values[field]

    def floats(self, field: SlotField) -> Tensor:
        """float64 [n]"""
        return self.values.view(torch.float64)[field]

    @property
    def alive(self) -> Tensor:
        """bool [n]"""
        return self.values[SlotField.ALIVE] != 0


def choose_sampler_class(sampling_params: Sequence[DraftSamplingParams]) -> SamplerClass:
    """The lowest that serves all."""
    filtered = any(
        not one.greedy and (one.top_k > 0 or one.top_p < 1.0 or one.min_p > 0.0) for one in sampling_params
    )
    return SamplerClass.FILTERED if filtered else SamplerClass.PLAIN


def pack_slots(
    last_token_ids: Sequence[Sequence[int]],
    num_tokens: Sequence[int],
    mrope_offsets: Sequence[int],
    sampling_params: Sequence[DraftSamplingParams],
) -> Tensor:
    """int64 [len(Field), n] on the host: requests that take part, by their last tokens, one or more of each."""
    table = np.zeros((len(SlotField), len(last_token_ids)), np.int64)
    table[SlotField.ALIVE] = 1
    table[SlotField.LENGTH] = num_tokens
    table[SlotField.PREV_TOKEN] = [own[-2] if len(own) > 1 else 0 for own in last_token_ids]
    table[SlotField.LAST_TOKEN] = [own[-1] for own in last_token_ids]
    table[SlotField.MROPE_OFFSET] = mrope_offsets
    table[SlotField.SEED] = [
        one.seed - 2 * SIGN_BIT if one.seed >= SIGN_BIT else one.seed for one in sampling_params
    ]
    table[SlotField.GREEDY] = [one.greedy for one in sampling_params]
    table[SlotField.TOP_K] = [
        NO_TOP_K if one.greedy or one.top_k <= 0 else one.top_k for one in sampling_params
    ]
    table[SlotField.TEMPERATURE] = _float64_bits(
        [1.0 if one.greedy else one.temperature for one in sampling_params]
    )
    table[SlotField.TOP_P] = _float64_bits([1.0 if one.greedy else one.top_p for one in sampling_params])
    table[SlotField.MIN_P] = _float64_bits([0.0 if one.greedy else one.min_p for one in sampling_params])
    return torch.from_numpy(table)


def _float64_bits(values: Sequence[float]) -> NDArray[np.int64]:
    return np.array(values, np.float64).view(np.int64)


def copy_to_device(values: Tensor, target: Tensor) -> None:
    """Copy from the host without waiting; torch keeps pinned memory until the copy has read it."""
    target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)


@dataclass(frozen=True, slots=True)
class DraftLoopState:
    """What is noted of n requests while a draft goes on; every tensor is changed but `floor` and `limit`.

    column    int64 [1]  number of the next guess
    guesses   int64 [K, n], logprobs float64 [K, n]: -1 and 0 where a request has none
    token     int64 [n]    the last guess, and its position in the draft model's cache, `place`
    index     int64 [n]    absolute index of the next guess
    going     bool [n]     whether more guesses are wanted
    total     float64 [n]  sum of the log-probabilities; no more are wanted below `floor`
    limit     int64 [n]    guesses at most
    """

    draft_step: Tensor
    draft_ids: Tensor
    logprobs: Tensor
    last_token: Tensor
    position: Tensor
    sample_index: Tensor
    active: Tensor
    logprob_sum: Tensor
    min_logprob_sum: Tensor
    max_tokens: Tensor


class DecodeOps:
    """What a round does beside the model's passes and sampling, operation by operation. A backend may do each in one launch."""

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
        """The rows of n requests, the same number of each.

        token_ids  int64 [n, w]
        first      int64 [n]       position of the first of them
        valid      bool [n, w]     the others are rows of padding
        tables     int64 [n+1, M]  the last line is the padding's
        shifts     int64 [n]       between position and place, where there are directions
        last       the last row of each request is sampled, not every one
        """
        count, width = token_ids.shape
        ids, positions, slots, owners, places = self._flatten_rows(
            token_ids, first_position, valid, block_tables, mrope_offsets, block_size, mrope
        )
        return Batch(
            token_ids=ids,
            positions=positions,
            slots=slots,
            block_tables=block_tables,
            query_start_loc=tuple(range(0, count * width + 1, width)),
            seq_lens=(),
            sample_rows=torch.arange(
                width - 1 if only_last else 0,
                count * width,
                width if only_last else 1,
                device=token_ids.device,
            ),
            block_size=block_size,
            mrope_positions=places,
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
        """Of rows(): token ids, positions, slots and owners int64 [n * w], and places int64 [n * w, 3] where there are
        directions."""
        count, width = token_ids.shape
        device = token_ids.device
        requests = torch.arange(count, device=device)[:, None]
        positions = torch.where(valid, first_position[:, None] + torch.arange(width, device=device), 0)
        blocks = block_tables[:-1].gather(1, positions // block_size)
        slots = torch.where(valid, blocks * block_size + positions % block_size, NULL_BLOCK * block_size)
        places = torch.where(valid, positions + mrope_offsets[:, None], 0).view(-1, 1) if mrope else None
        return (
            torch.where(valid, token_ids, 0).view(-1),
            positions.view(-1),
            slots.view(-1),
            torch.where(valid, requests, count).view(-1),
            None if places is None else places.expand(-1, 3).contiguous(),
        )

    def record_draft(self, state: DraftLoopState, token_ids: Tensor, logits: Tensor, log_sum: Tensor) -> None:
        """Note one guess of each request: token_ids int64 [n], -1 where no token is legal; logits float32 [n, V] that they were
        sampled from, and the logarithm of their sum, float32 [n]."""
        chosen = token_ids.clamp(min=0)
        logprobs = logits.gather(1, chosen[:, None])[:, 0].double() - log_sum.double()
        guessed = state.active & (token_ids >= 0)
        logprobs = torch.where(guessed, logprobs, 0.0)
        state.draft_ids.index_copy_(0, state.draft_step, torch.where(guessed, token_ids, -1)[None])
        state.logprobs.index_copy_(0, state.draft_step, logprobs[None])
        state.draft_step.add_(1)
        state.logprob_sum.add_(logprobs)
        state.active.copy_(
            guessed & (state.draft_step < state.max_tokens) & ~(state.logprob_sum < state.min_logprob_sum)
        )
        state.last_token.copy_(chosen)
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
        """Every request goes on behind what it emits; one with a broken row takes no part any more.

        table     int64 [len(Field), lanes], changed in the columns chosen int64 [n]; what is chosen twice takes no part
        sampled   int64 [n, 1+d]
        guesses   int64 [n, d], -1 behind the last one, with logprobs float64 [n, d]
        result    int64 [3+3d, n] gets ALIVE as it was, the number of tokens emitted, `sampled`, `guesses`, bits of logprobs
        """
        alive, length, before, last = slot_table[:NUM_MUTABLE_FIELDS].index_select(1, active_slots)
        drafted = (draft_ids >= 0).long().cumprod(1).sum(1) * alive
        accepted = count_accepted(sampled_ids, draft_ids, drafted)
        run = torch.cat((last[:, None], sampled_ids), 1)
        result.copy_(
            torch.cat(
                (
                    alive[None],
                    accepted[None] + 1,
                    sampled_ids.t(),
                    draft_ids.t(),
                    draft_logprobs.view(torch.int64).t(),
                )
            )
        )
        run_before, run_last = run.gather(1, torch.stack((accepted, accepted + 1), 1)).unbind(1)
        goes_on = (alive != 0) & (run_last >= 0)
        following = torch.stack((length + accepted + 1, run_before, run_last))
        state = torch.where(goes_on, following, torch.stack((length, before, last)))
        slot_table[:NUM_MUTABLE_FIELDS].index_copy_(1, active_slots, torch.cat((goes_on.long()[None], state)))


def sample_slots(
    ops: Ops,
    logits: Tensor,
    slots: SlotView,
    positions: Tensor,
    never_sampled_ids: Tensor,
    sampler_class: SamplerClass,
) -> Tensor:
    """What sampling/sampler.py makes of these rows, bit for bit: logits float32 [R, V] are overwritten -> int64 [R].

    lines      R of them
    positions  int64 [R]: absolute index of each token sampled
    unused     int64 [U]
    """
    if never_sampled_ids.numel():
        logits.index_fill_(1, never_sampled_ids, -torch.inf)
    ops.apply_temperature(logits, slots.floats(SlotField.TEMPERATURE).float())
    if sampler_class == SamplerClass.FILTERED:
        ops.apply_top_k(logits, slots[SlotField.TOP_K].clamp(max=logits.shape[1]))
        ops.apply_top_p(logits, slots.floats(SlotField.TOP_P))
        ops.apply_min_p(logits, slots.floats(SlotField.MIN_P))
    return ops.sample(logits, slots[SlotField.SEED], positions, slots[SlotField.GREEDY] != 0)


def hash_logits(row: Tensor) -> int:
    """64 bits of the values of one row."""
    return int.from_bytes(
        hashlib.blake2b(row.cpu().contiguous().numpy().tobytes(), digest_size=8).digest(), "little"
    )
