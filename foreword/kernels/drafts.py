"""Guesses of a draft model, sampled and fed back on the device: no pass waits for the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foreword.core.batch import SCRATCH_BLOCK, Batch
from foreword.kernels.graphs import Graphs, bucket_of, buckets
from foreword.kernels.lanes import Field, Guessing, LaneSteps, Level, Limits, Lines, level_of, pack, sample, upload
from foreword.kernels.ops import DraftLane, Guess, Ops

__all__ = ["Drafts"]

MAX_GUESSES = 32  # at first; more are made room for
KNOWN = 2  # tokens of a request that may have no KV after a round: the last guess, if it was right, and what followed it


class Drafts:
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
        steps: LaneSteps,
        forward: Callable[[Batch], Tensor],
        graphs: Graphs,
        limits: Limits,
        width: int,
        block_size: int,
        unused: Tensor,
    ) -> None:
        self.graphs = graphs
        self.limits = limits
        self.width = width
        self.block_size = block_size
        self.unused = unused.to(limits.device)
        self.sizes = buckets(limits.rows)
        self._ops = ops
        self._steps = steps
        self._forward = forward
        rows, device = limits.rows, limits.device
        self._lines = torch.zeros(len(Field), rows, dtype=torch.int64, device=device)
        self._tables = torch.full((rows + 1, limits.blocks), SCRATCH_BLOCK, dtype=torch.int64, device=device)
        self._token, self._place, self._limit = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self._going = torch.zeros(rows, dtype=torch.bool, device=device)
        self._total, self._floor = torch.zeros(2, rows, dtype=torch.float64, device=device)
        self._column = torch.zeros(1, dtype=torch.int64, device=device)
        self._passes: dict[tuple[int, Level], Callable[[], None]] = {}
        self.generation = 0
        self._make_room(MAX_GUESSES)

    def serves(self, block_size: int, unused: Tensor) -> bool:
        """Whether these are the ones for such a draft."""
        return block_size == self.block_size and torch.equal(unused.to(self.unused.device), self.unused)

    def reach(self, num_guesses: int) -> None:
        """Make room for so many guesses."""
        if num_guesses > self._guesses.shape[0]:
            self._make_room(max(num_guesses, 2 * self._guesses.shape[0]))

    def next_pass(self, count: int, level: Level) -> Callable[[], None]:
        """The next guess of `count` requests, a bucket. To be had before anything is set for a draft."""
        if (count, level) not in self._passes:
            self.rest()
            self._passes[count, level] = self.graphs.record(lambda: self._pass(count, level))
        return self._passes[count, level]

    def rest(self) -> None:
        """No request: a pass computes padding."""
        for tensor in (self._lines, self._tables, self._place, self._going, self._column):
            tensor.zero_()

    def run(self, lanes: Sequence[DraftLane], logits: Tensor) -> list[Guess]:
        """All guesses of lanes that want some, from the logits [len(lanes), V] of their last known tokens."""
        most = max(lane.max_tokens for lane in lanes)
        self.reach(most)
        level = level_of([lane.sampling for lane in lanes])
        size = bucket_of(len(lanes), self.sizes)
        again = self.next_pass(size, level) if most > 1 else None
        self._set(lanes, size)
        self.step(len(lanes), logits, level)
        if again is not None:
            for _ in range(most - 1):
                again()
        return self._results(len(lanes), most)

    def begin(self, count: int, lines: Lines, tables: Tensor, sampled: bool, level: Level) -> None:
        """The first pass of a round: KV of the last two tokens known, and the first guess from the last one, if wanted.

        lines   `count` of the requests of a round
        tables  int64 [count+1, M]
        """
        alive, length = lines.alive, lines[Field.LENGTH]
        self._lines[:, :count].copy_(lines.values)
        self._tables[: count + 1].copy_(tables)
        self._place[:count].copy_(length - 1)
        self._limit[:count].fill_(self._guesses.shape[0])
        self._going[:count].copy_(alive)
        self._total[:count].zero_()
        self._floor[:count].fill_(-math.inf)
        self._column.zero_()
        known = torch.stack((lines[Field.BEFORE], lines[Field.LAST]), 1)
        known = torch.where(known < self.width, known, 0)  # a row of the target that stands for no token
        valid = torch.stack((alive & (length >= KNOWN), alive), 1)
        logits = self._forward(self._rows(known, length - KNOWN, valid))
        if sampled:
            self.step(count, logits, level)

    def step(self, count: int, logits: Tensor, level: Level) -> None:
        """Sample the next guess of each of the first `count` requests: logits [count, V] are overwritten."""
        lines = Lines(self._lines[:, :count])
        token_ids = sample(self._ops, logits, lines, lines[Field.LENGTH], self.unused, level)
        self._steps.guess(self._guessing(count), token_ids, logits, self._ops.log_sum_exp(logits))

    def _guessing(self, count: int) -> Guessing:
        """Of the first `count` requests."""
        return Guessing(
            column=self._column,
            guesses=self._guesses[:, :count],
            logprobs=self._logprobs[:, :count],
            token=self._token[:count],
            place=self._place[:count],
            index=self._lines[Field.LENGTH, :count],
            going=self._going[:count],
            total=self._total[:count],
            floor=self._floor[:count],
            limit=self._limit[:count],
        )

    def guesses(self, count: int, num: int) -> tuple[Tensor, Tensor]:
        """The first `num` of `count` requests: ids int64 [count, num], -1 behind the last one, and log-probabilities float64."""
        return self._guesses[:num, :count].t(), self._logprobs[:num, :count].t()

    def _make_room(self, num_guesses: int) -> None:
        shape, device = (num_guesses, self.limits.rows), self.limits.device
        self._guesses = torch.full(shape, -1, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(shape, dtype=torch.float64, device=device)
        self._passes.clear()
        self.generation += 1

    def _pass(self, count: int, level: Level) -> None:
        """Compute the last guesses, and sample what follows them."""
        batch = self._rows(self._token[:count, None], self._place[:count], self._going[:count, None])
        self.step(count, self._forward(batch), level)

    def _rows(self, token_ids: Tensor, first: Tensor, valid: Tensor) -> Batch:
        count = len(token_ids)
        shifts, tables = self._lines[Field.SHIFT, :count], self._tables[: count + 1]
        return self._steps.rows(token_ids, first, valid, tables, shifts, self.block_size, self.limits.directions, last=True)

    def _set(self, lanes: Sequence[DraftLane], size: int) -> None:
        """What the passes for these lanes read, in a bucket of this size."""
        count, blocks = len(lanes), self.limits.blocks
        known = [lane.token_ids for lane in lanes]
        lines = pack(known, [lane.first for lane in lanes], [lane.shift for lane in lanes], [lane.sampling for lane in lanes])
        last = torch.tensor([lane.start + len(lane.token_ids) - 1 for lane in lanes])
        limits = torch.tensor([lane.max_tokens for lane in lanes])
        width = max(min(len(lane.blocks), blocks) for lane in lanes)
        held = [list(lane.blocks[:width]) for lane in lanes]
        tables = torch.tensor([[*own, *[SCRATCH_BLOCK] * (width - len(own))] for own in held])
        upload(lines, self._lines[:, :count])
        upload(last, self._place[:count])
        upload(limits, self._limit[:count])
        upload(torch.tensor([lane.floor for lane in lanes], dtype=torch.float64), self._floor[:count])
        self._tables[: size + 1].fill_(SCRATCH_BLOCK)
        upload(tables, self._tables[:count, :width])
        self._going[:count].fill_(True)
        self._going[count:size].fill_(False)
        self._total.zero_()
        self._column.zero_()

    def _results(self, count: int, num: int) -> list[Guess]:
        """In one transfer."""
        ids, logprobs = self.guesses(count, num)
        both = torch.cat((ids, logprobs.view(torch.int64)), 1).cpu()
        lengths = (both[:, :num] >= 0).sum(1).tolist()
        rows = zip(both[:, :num].tolist(), both[:, num:].view(torch.float64).tolist(), lengths, strict=True)
        return [Guess(tuple(own[:length]), tuple(scores[:length])) for own, scores, length in rows]
