"""Rounds whose every step runs on the device: draft, verify, sample, match, go on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foreword.core.batch import SCRATCH_BLOCK, Batch
from foreword.kernels.drafts import Drafts
from foreword.kernels.graphs import Graphs, bucket_of, buckets
from foreword.kernels.hashes import hash_of
from foreword.kernels.lanes import Field, LaneSteps, Level, Limits, Lines, level_of, pack, sample, upload
from foreword.kernels.ops import Ops
from foreword.kernels.rounds import RoundLane, RoundResult

__all__ = ["DeviceRounds"]

MAX_UNDER_WAY = 2


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A target's pass for so many requests and drafted tokens.

    result  int64 [2 + (1 + d) + 2d, n]: ALIVE as the round began, tokens emitted, what was sampled, guesses, and the bits of
            their log-probabilities
    raw     float32 [n * (1 + d), V]: logits as they came, if hashes are wanted
    """

    run: Callable[[], None]
    result: Tensor
    raw: Tensor | None


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A round that was launched. `result` and `raw` are on the host, and valid once `done` has happened."""

    active: tuple[int, ...]
    num_draft: int
    result: Tensor
    raw: Tensor | None
    done: torch.cuda.Event | None


class _Tables:
    """Block tables of all requests, int64 [rows+1, M]: the last line is the padding's. Blocks are only added."""

    def __init__(self, limits: Limits) -> None:
        shape = (limits.rows + 1, limits.blocks)
        self.values = torch.full(shape, SCRATCH_BLOCK, dtype=torch.int64, device=limits.device)
        self._held: list[int] = []
        self._added: list[tuple[int, int, int]] = []

    def begin(self, tables: Sequence[Sequence[int]]) -> None:
        self._added.clear()
        self._held = [len(blocks) for blocks in tables]
        width = max(self._held)
        assert width <= self.values.shape[1], "a block table longer than was reserved"
        rows = torch.tensor([[*blocks, *[SCRATCH_BLOCK] * (width - len(blocks))] for blocks in tables], dtype=torch.int64)
        self.values.fill_(SCRATCH_BLOCK)
        upload(rows, self.values[: len(tables), :width])

    def grow(self, lane: int, blocks: Sequence[int]) -> None:
        """They reach the device with the next flush()."""
        assert self._held[lane] <= len(blocks) <= self.values.shape[1], "a block table shorter than it was, or than was reserved"
        self._added += [(lane, place, blocks[place]) for place in range(self._held[lane], len(blocks))]
        self._held[lane] = len(blocks)

    def flush(self) -> None:
        if self._added:
            added = torch.empty(len(self._added), 3, dtype=torch.int64, device=self.values.device)
            upload(torch.tensor(self._added), added)
            self.values.index_put_((added[:, 0], added[:, 1]), added[:, 2])
            self._added.clear()

    def take(self, chosen: Tensor) -> Tensor:
        """int64 [n+1] -> [n+1, M]"""
        return self.values.index_select(0, chosen)


class DeviceRounds:
    """See Rounds. At most `limits.rows` requests; the device holds one line for each:

    table   int64 [len(Field), rows+1]  its state and how it samples; the last column is nobody's
    chosen  int64 [rows+1]              whom a launch computes, nobody behind them

    A launch records what it needs before anything is launched: while a pass is recorded `chosen` holds nobody, so that no
    state changes. A round without drafts still shows the draft model what it must know.

    width   V of the target
    drafts  of the draft model, or None
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
        drafts: Drafts | None,
        hashed: bool,
    ) -> None:
        self._ops = ops
        self._steps = steps
        self._forward = forward
        self._graphs = graphs
        self._limits = limits
        self._width = width
        self._block_size = block_size
        self._unused = unused.to(limits.device)
        self._drafts = drafts
        self._hashed = hashed
        self._sizes = buckets(limits.rows)
        self._nobody = limits.rows
        self._table = torch.zeros(len(Field), limits.rows + 1, dtype=torch.int64, device=limits.device)
        self._chosen = torch.full((limits.rows + 1,), self._nobody, dtype=torch.int64, device=limits.device)
        self._blocks = _Tables(limits)
        self._draft_blocks = None if drafts is None else _Tables(drafts.limits)
        self._generation = 0
        self._levels: list[Level] = []
        self._under_way: deque[_UnderWay] = deque()
        self._recorded: dict[tuple[int, int, Level], _Recorded] = {}
        self._first: dict[tuple[int, bool, Level], Callable[[], None]] = {}

    @torch.inference_mode()
    def prepare(self, most: int, num_draft: int, progress: Callable[[int, int], None] | None = None) -> None:
        """Record what rounds of up to `most` requests need, with filters and without, the largest first; `progress` gets what is
        done and how much there is in all."""
        sizes = [size for size in reversed(self._sizes) if size <= bucket_of(most, self._sizes)]
        wanted = [(size, level) for size in sizes for level in Level]
        for done, (size, level) in enumerate(wanted, start=1):
            self._passes(size, num_draft, level)
            if progress is not None:
                progress(done, len(wanted))

    @torch.inference_mode()
    def begin(self, lanes: Sequence[RoundLane]) -> None:
        assert not self._under_way, "a run begins while a round is under way"
        assert 0 < len(lanes) <= self._limits.rows, "more requests than were reserved"
        samplings = [lane.sampling for lane in lanes]
        self._levels = [level_of([sampling]) for sampling in samplings]
        self._table.zero_()
        columns = pack(
            [lane.token_ids for lane in lanes], [lane.length for lane in lanes], [lane.shift for lane in lanes], samplings
        )
        upload(columns, self._table[:, : len(lanes)])
        self._blocks.begin([lane.blocks for lane in lanes])
        if self._draft_blocks is not None:
            self._draft_blocks.begin([lane.draft_blocks for lane in lanes])

    def grow(self, lane: int, blocks: Sequence[int], draft_blocks: Sequence[int] = ()) -> None:
        self._blocks.grow(lane, blocks)
        if self._draft_blocks is not None:
            self._draft_blocks.grow(lane, draft_blocks)

    @torch.inference_mode()
    def launch(self, active: Sequence[int], num_draft: int) -> None:
        assert len(self._under_way) < MAX_UNDER_WAY, "a third round is launched before the first is collected"
        assert active and len(set(active)) == len(active)
        assert num_draft == 0 or self._drafts is not None, "drafts without a draft model"
        size = bucket_of(len(active), self._sizes)
        target, drafting = self._passes(size, num_draft, max(self._levels[lane] for lane in active))
        self._blocks.flush()
        if self._draft_blocks is not None:
            self._draft_blocks.flush()
        chosen = [*active, *[self._nobody] * (size + 1 - len(active))]
        upload(torch.tensor(chosen), self._chosen[: size + 1])
        for run in drafting:
            run()
        target.run()
        self._under_way.append(self._sent(tuple(active), num_draft, target))

    def collect(self) -> dict[int, RoundResult]:
        under_way = self._under_way.popleft()
        if under_way.done is not None:
            under_way.done.synchronize()
        return dict(_results(under_way))

    def _passes(self, size: int, num_draft: int, level: Level) -> tuple[_Recorded, list[Callable[[], None]]]:
        """The target's pass, and those of the draft model before it; recorded if they are new."""
        drafts, drafting = self._drafts, list[Callable[[], None]]()
        if drafts is not None:
            drafts.reach(num_draft)
            if drafts.generation != self._generation:
                self._first.clear()
                self._recorded.clear()
                self._generation = drafts.generation
            drafting = [self._first_pass(drafts, size, num_draft > 0, level)]
            if num_draft > 1:
                drafting += [drafts.next_pass(size, level)] * (num_draft - 1)
        key = (size, num_draft, level)
        if key not in self._recorded:
            self._recorded[key] = self._record(*key)
        return self._recorded[key], drafting

    def _first_pass(self, drafts: Drafts, size: int, sampled: bool, level: Level) -> Callable[[], None]:
        tables = self._draft_blocks
        assert tables is not None

        def first() -> None:
            lines = Lines(self._table.index_select(1, self._chosen[:size]))
            drafts.begin(size, lines, tables.take(self._chosen[: size + 1]), sampled, level)

        key = (size, sampled, level)
        if key not in self._first:
            self._chosen.fill_(self._nobody)
            self._first[key] = drafts.graphs.record(first)
        return self._first[key]

    def _record(self, size: int, num_draft: int, level: Level) -> _Recorded:
        rows, device = size * (1 + num_draft), self._limits.device
        result = torch.zeros(3 + 3 * num_draft, size, dtype=torch.int64, device=device)
        raw = torch.zeros(rows, self._width, device=device) if self._hashed else None

        def run() -> None:
            self._round(size, num_draft, level, result, raw)

        self._chosen.fill_(self._nobody)
        return _Recorded(self._graphs.record(run) if rows <= self._limits.rows else run, result, raw)

    def _round(self, count: int, num_draft: int, level: Level, result: Tensor, raw: Tensor | None) -> None:
        """The target's part, once the guesses are there."""
        chosen, width = self._chosen[:count], 1 + num_draft
        lines = Lines(self._table.index_select(1, chosen))
        length, last = lines[Field.LENGTH], lines[Field.LAST]
        guesses = last[:, None][:, :0]
        logprobs = guesses.view(torch.float64)
        if self._drafts is not None:
            guesses, logprobs = self._drafts.guesses(count, num_draft)
        token_ids = torch.cat((last[:, None], guesses), 1)
        valid = lines.alive[:, None] & (token_ids >= 0)
        tables, shifts = self._blocks.take(self._chosen[: count + 1]), lines[Field.SHIFT]
        directions = self._limits.directions
        batch = self._steps.rows(token_ids, length - 1, valid, tables, shifts, self._block_size, directions, last=False)
        logits = self._forward(batch)
        if raw is not None:
            raw.copy_(logits)
        each = Lines(lines.values[:, :, None].expand(-1, -1, width).flatten(1))
        positions = (length[:, None] + torch.arange(width, device=chosen.device)).view(-1)
        sampled = sample(self._ops, logits, each, positions, self._unused, level).view(count, width)
        self._steps.advance(self._table, chosen, sampled, guesses, logprobs, result)

    def _sent(self, active: tuple[int, ...], num_draft: int, round_: _Recorded) -> _UnderWay:
        """What a round yields, on its way to the host; nothing that follows it can overwrite what is copied."""
        raw = None if round_.raw is None else round_.raw.cpu().clone()
        if not round_.result.is_cuda:
            return _UnderWay(active, num_draft, round_.result.clone(), raw, None)
        result = torch.empty(round_.result.shape, dtype=torch.int64, pin_memory=True)
        result.copy_(round_.result, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return _UnderWay(active, num_draft, result, raw, done)


def _results(under_way: _UnderWay) -> Iterator[tuple[int, RoundResult]]:
    """Of each lane that took part."""
    found = under_way.result
    alive, emitted = found[0], found[1]
    behind = len(found) - under_way.num_draft  # sampled, guesses, bits of log-probabilities
    sampled, guesses = found[2 : behind - under_way.num_draft], found[behind - under_way.num_draft : behind]
    logprobs = found[behind:].view(torch.float64)
    columns = (alive.tolist(), emitted.tolist(), *(part.t().tolist() for part in (sampled, guesses, logprobs)))
    for number, (lane, takes_part, count, own, guessed, scores) in enumerate(zip(under_way.active, *columns, strict=False)):
        if takes_part:
            drafted = tuple(token_id for token_id in guessed if token_id >= 0)
            hashes = _hashes(under_way, number, count)
            yield lane, RoundResult(tuple(own[:count]), drafted, tuple(scores[: len(drafted)]), hashes)


def _hashes(under_way: _UnderWay, number: int, emitted: int) -> tuple[int, ...]:
    """Of the first `emitted` rows of a lane."""
    if under_way.raw is None:
        return ()
    first = number * (1 + under_way.num_draft)
    return tuple(hash_of(line) for line in under_way.raw[first : first + emitted])
