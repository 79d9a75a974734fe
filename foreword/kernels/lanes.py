"""A table of requests on the device, and the rows of a pass made from it without the host.

Everything here is tensor operations of fixed shapes on fixed addresses, so that it can be part of a graph. A line that
stands for nobody, or for a request that takes no part, makes rows of padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreword.core.batch import SCRATCH_BLOCK, Batch
from foreword.kernels.matching import match
from foreword.kernels.ops import DraftSampling, Ops

__all__ = [
    "STATE",
    "Field",
    "Guessing",
    "LaidOut",
    "LaneSteps",
    "Level",
    "Limits",
    "Lines",
    "level_of",
    "pack",
    "sample",
    "upload",
]

NO_LIMIT = 1 << 40  # of top_k
SIGN = 1 << 63

LaidOut = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


class Field(IntEnum):
    """The lines of a table, int64 [len(Field), lanes]: a column for each request. The first ones change as it goes on.

    ALIVE        whether it takes part
    LENGTH       tokens known
    BEFORE       token before the last one (anything if there is none)
    LAST         last token known
    TEMPERATURE  and what follows: the bits of a float64
    """

    ALIVE = 0
    LENGTH = 1
    BEFORE = 2
    LAST = 3
    SHIFT = 4
    SEED = 5
    GREEDY = 6
    TOP_K = 7
    TEMPERATURE = 8
    TOP_P = 9
    MIN_P = 10


STATE = Field.SHIFT  # so many lines change


class Level(IntEnum):
    """How much of the pipeline anybody asks for; more than is asked for changes no bit, but costs time."""

    PLAIN = 0
    FILTERED = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What buffers are made for.

    rows        of a pass that is captured; also requests at once
    blocks      of the longest block table
    directions  the model knows positions in several directions
    """

    rows: int
    blocks: int
    directions: bool
    device: torch.device


@dataclass(frozen=True, slots=True)
class Lines:
    """Columns of a table that were taken out, int64 [len(Field), n]."""

    values: Tensor

    def __getitem__(self, field: Field) -> Tensor:
        """int64 [n]"""
        return self.values[field]

    def floats(self, field: Field) -> Tensor:
        """float64 [n]"""
        return self.values.view(torch.float64)[field]

    @property
    def alive(self) -> Tensor:
        """bool [n]"""
        return self.values[Field.ALIVE] != 0


def level_of(samplings: Sequence[DraftSampling]) -> Level:
    """The lowest that serves all."""
    filtered = any(not one.greedy and (one.top_k > 0 or one.top_p < 1.0 or one.min_p > 0.0) for one in samplings)
    return Level.FILTERED if filtered else Level.PLAIN


def pack(
    tokens: Sequence[Sequence[int]], lengths: Sequence[int], shifts: Sequence[int], samplings: Sequence[DraftSampling]
) -> Tensor:
    """int64 [len(Field), n] on the host: requests that take part, by their last tokens, one or more of each."""
    table = np.zeros((len(Field), len(tokens)), np.int64)
    table[Field.ALIVE] = 1
    table[Field.LENGTH] = lengths
    table[Field.BEFORE] = [own[-2] if len(own) > 1 else 0 for own in tokens]
    table[Field.LAST] = [own[-1] for own in tokens]
    table[Field.SHIFT] = shifts
    table[Field.SEED] = [one.seed - 2 * SIGN if one.seed >= SIGN else one.seed for one in samplings]
    table[Field.GREEDY] = [one.greedy for one in samplings]
    table[Field.TOP_K] = [NO_LIMIT if one.greedy or one.top_k <= 0 else one.top_k for one in samplings]
    table[Field.TEMPERATURE] = _bits([1.0 if one.greedy else one.temperature for one in samplings])
    table[Field.TOP_P] = _bits([1.0 if one.greedy else one.top_p for one in samplings])
    table[Field.MIN_P] = _bits([0.0 if one.greedy else one.min_p for one in samplings])
    return torch.from_numpy(table)


def _bits(values: Sequence[float]) -> NDArray[np.int64]:
    return np.array(values, np.float64).view(np.int64)


def upload(values: Tensor, into: Tensor) -> None:
    """Copy from the host without waiting; torch keeps pinned memory until the copy has read it."""
    into.copy_(values.pin_memory() if into.is_cuda else values, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Guessing:
    """What is noted of n requests while a draft goes on; every tensor is changed but `floor` and `limit`.

    column    int64 [1]  number of the next guess
    guesses   int64 [K, n], logprobs float64 [K, n]: -1 and 0 where a request has none
    token     int64 [n]    the last guess, and its position in the draft model's cache, `place`
    index     int64 [n]    absolute index of the next guess
    going     bool [n]     whether more guesses are wanted
    total     float64 [n]  sum of the log-probabilities; no more are wanted below `floor`
    limit     int64 [n]    guesses at most
    """

    column: Tensor
    guesses: Tensor
    logprobs: Tensor
    token: Tensor
    place: Tensor
    index: Tensor
    going: Tensor
    total: Tensor
    floor: Tensor
    limit: Tensor


class LaneSteps:
    """What a round does beside the model's passes and sampling, operation by operation. A backend may do each in one launch."""

    def rows(
        self,
        token_ids: Tensor,
        first: Tensor,
        valid: Tensor,
        tables: Tensor,
        shifts: Tensor,
        block_size: int,
        directions: bool,
        last: bool,
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
        ids, positions, slots, owners, places = self._laid_out(token_ids, first, valid, tables, shifts, block_size, directions)
        return Batch(
            token_ids=ids,
            positions=positions,
            slots=slots,
            block_tables=tables,
            row_starts=tuple(range(0, count * width + 1, width)),
            ends=(),
            sample_rows=torch.arange(width - 1 if last else 0, count * width, width if last else 1, device=token_ids.device),
            block_size=block_size,
            rope_positions=places,
            owners=owners,
        )

    def _laid_out(
        self, token_ids: Tensor, first: Tensor, valid: Tensor, tables: Tensor, shifts: Tensor, block_size: int, directions: bool
    ) -> LaidOut:
        """Of rows(): token ids, positions, slots and owners int64 [n * w], and places int64 [n * w, 3] where there are
        directions."""
        count, width = token_ids.shape
        device = token_ids.device
        requests = torch.arange(count, device=device)[:, None]
        positions = torch.where(valid, first[:, None] + torch.arange(width, device=device), 0)
        blocks = tables[:-1].gather(1, positions // block_size)
        slots = torch.where(valid, blocks * block_size + positions % block_size, SCRATCH_BLOCK * block_size)
        places = torch.where(valid, positions + shifts[:, None], 0).view(-1, 1) if directions else None
        return (
            torch.where(valid, token_ids, 0).view(-1),
            positions.view(-1),
            slots.view(-1),
            torch.where(valid, requests, count).view(-1),
            None if places is None else places.expand(-1, 3).contiguous(),
        )

    def guess(self, state: Guessing, token_ids: Tensor, logits: Tensor, log_sum: Tensor) -> None:
        """Note one guess of each request: token_ids int64 [n], -1 where no token is legal; logits float32 [n, V] that they were
        sampled from, and the logarithm of their sum, float32 [n]."""
        chosen = token_ids.clamp(min=0)
        logprobs = logits.gather(1, chosen[:, None])[:, 0].double() - log_sum.double()
        guessed = state.going & (token_ids >= 0)
        logprobs = torch.where(guessed, logprobs, 0.0)
        state.guesses.index_copy_(0, state.column, torch.where(guessed, token_ids, -1)[None])
        state.logprobs.index_copy_(0, state.column, logprobs[None])
        state.column.add_(1)
        state.total.add_(logprobs)
        state.going.copy_(guessed & (state.column < state.limit) & ~(state.total < state.floor))
        state.token.copy_(chosen)
        state.place.add_(1)
        state.index.add_(1)

    def advance(self, table: Tensor, chosen: Tensor, sampled: Tensor, guesses: Tensor, logprobs: Tensor, result: Tensor) -> None:
        """Every request goes on behind what it emits; one with a broken row takes no part any more.

        table     int64 [len(Field), lanes], changed in the columns chosen int64 [n]; what is chosen twice takes no part
        sampled   int64 [n, 1+d]
        guesses   int64 [n, d], -1 behind the last one, with logprobs float64 [n, d]
        result    int64 [3+3d, n] gets ALIVE as it was, the number of tokens emitted, `sampled`, `guesses`, bits of logprobs
        """
        alive, length, before, last = table[:STATE].index_select(1, chosen)
        drafted = (guesses >= 0).long().cumprod(1).sum(1) * alive
        accepted = match(sampled, guesses, drafted)
        run = torch.cat((last[:, None], sampled), 1)
        result.copy_(torch.cat((alive[None], accepted[None] + 1, sampled.t(), guesses.t(), logprobs.view(torch.int64).t())))
        run_before, run_last = run.gather(1, torch.stack((accepted, accepted + 1), 1)).unbind(1)
        goes_on = (alive != 0) & (run_last >= 0)
        following = torch.stack((length + accepted + 1, run_before, run_last))
        state = torch.where(goes_on, following, torch.stack((length, before, last)))
        table[:STATE].index_copy_(1, chosen, torch.cat((goes_on.long()[None], state)))


def sample(ops: Ops, logits: Tensor, lines: Lines, positions: Tensor, unused: Tensor, level: Level) -> Tensor:
    """What sampling/sampler.py makes of these rows, bit for bit: logits float32 [R, V] are overwritten -> int64 [R].

    lines      R of them
    positions  int64 [R]: absolute index of each token sampled
    unused     int64 [U]
    """
    if unused.numel():
        logits.index_fill_(1, unused, -torch.inf)
    ops.divide(logits, lines.floats(Field.TEMPERATURE).float())
    if level == Level.FILTERED:
        ops.keep_top_k(logits, lines[Field.TOP_K].clamp(max=logits.shape[1]))
        ops.keep_top_p(logits, lines.floats(Field.TOP_P))
        ops.keep_min_p(logits, lines.floats(Field.MIN_P))
    return ops.sample(logits, lines[Field.SEED], positions, lines[Field.GREEDY] != 0)
