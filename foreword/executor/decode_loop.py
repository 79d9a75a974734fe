"""Rounds: steps of plain decoding that follow each other on the device without the host in between.

A round drafts (if there is a draft model), computes 1 + d rows of each request, samples them, matches the draft, and
leaves everything that the next round needs where it is: on the device. The host launches a round while the one before
is computed, and reads results one round late. A request that ends meanwhile has computed a round in vain, and that is
all: its tokens are dropped, and what it wrote lies behind what is known.

Rounds whose every step runs on the device: draft, verify, sample, match, go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from foreword.core.batch import NULL_BLOCK, Batch
from foreword.executor.cuda_graphs import CudaGraphPool, capture_sizes, pick_size
from foreword.executor.decode_slots import (
    DecodeLimits,
    DecodeOps,
    SamplerClass,
    SlotField,
    SlotView,
    choose_sampler_class,
    copy_to_device,
    hash_logits,
    pack_slots,
    sample_slots,
)
from foreword.executor.draft_loop import DeviceDraftLoop
from foreword.kernels.ops import DraftSamplingParams, Ops

__all__ = ["DecodeLoop", "DecodeResult", "DecodeSlot", "DeviceDecodeLoop", "SupportsDecodeLoop"]


@dataclass(frozen=True, slots=True)
class DecodeSlot:
    """A request whose temperature and filters are all of its sampling, with one token left to compute.

    token_ids     its last two tokens, or the only one
    length        tokens known; KV is there for all but the last
    blocks        block table in the target's cache
    draft_blocks  block table in the draft model's cache, where KV is there for all but the last two; () without
                  a draft model
    shift         for models with M-RoPE, as in DraftLane
    """

    last_token_ids: tuple[int, ...]
    num_tokens: int
    block_table: Sequence[int]
    sampling: DraftSamplingParams
    draft_block_table: Sequence[int] = ()
    mrope_offset: int = 0


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """What a round yielded for one lane.

    token_ids  what the target sampled: the drafted tokens that it agrees with and one more; the last is -1 where a row of
               logits is broken. A lane with -1 takes no part in what was launched after it: its results there are None
    drafted    what was verified
    logprobs   of each drafted token, in the distribution it was sampled from
    hashes     of the raw logits of each row of token_ids, if they were asked for
    """

    token_ids: tuple[int, ...]
    draft_ids: tuple[int, ...] = ()
    draft_logprobs: tuple[float, ...] = ()
    logits_hashes: tuple[int, ...] = ()


class DecodeLoop(Protocol):
    """One run of rounds. At most two are launched and not collected."""

    def start(self, slots: Sequence[DecodeSlot]) -> None:
        """The requests of all rounds to come, by number. Nothing is under way."""

    def extend_blocks(
        self, slot: int, block_table: Sequence[int], draft_block_table: Sequence[int] = ()
    ) -> None:
        """The whole block tables of a lane, longer than they were, for rounds launched from now on."""

    def launch(self, active_slots: Sequence[int], num_draft_tokens: int) -> None:
        """Begin a round of these lanes, at most num_draft drafted tokens each, and do not wait for it.

        Every lane has slots for all that it may come to: 1 + num_draft tokens for each round that is not collected.
        """

    def collect(self) -> dict[int, DecodeResult]:
        """Of the oldest round that is not collected, by lane; waits for it."""


@runtime_checkable
class SupportsDecodeLoop(Protocol):
    """What compile() of a recordable backend returns, beside a forward pass and a DraftLoop."""

    def get_decode_loop(
        self,
        block_size: int,
        never_sampled_ids: Tensor,
        drafter: SupportsDecodeLoop | None = None,
        with_hashes: bool = False,
    ) -> DecodeLoop:
        """Rounds of this forward pass, which yields logits, drafted for by that one.

        unused  int64 [U]: ids that are never sampled
        hashed  results tell hashes of the raw logits, as the sampler's in test mode; this waits for the device
        """


MAX_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class _CapturedStep:
    """A target's pass for so many requests and drafted tokens.

    result  int64 [2 + (1 + d) + 2d, n]: ALIVE as the round began, tokens emitted, what was sampled, guesses, and the bits of
            their log-probabilities
    raw     float32 [n * (1 + d), V]: logits as they came, if hashes are wanted
    """

    run: Callable[[], None]
    result: Tensor
    raw_logits: Tensor | None


@dataclass(frozen=True, slots=True)
class _InFlightStep:
    """A round that was launched. `result` and `raw` are on the host, and valid once `done` has happened."""

    active_slots: tuple[int, ...]
    num_draft_tokens: int
    result: Tensor
    raw_logits: Tensor | None
    done: torch.cuda.Event | None


class _BlockTables:
    """Block tables of all requests, int64 [rows+1, M]: the last line is the padding's. Blocks are only added."""

    def __init__(self, limits: DecodeLimits) -> None:
        shape = (limits.max_rows + 1, limits.max_blocks)
        self.values = torch.full(shape, NULL_BLOCK, dtype=torch.int64, device=limits.device)
        self._lengths: list[int] = []
        self._pending: list[tuple[int, int, int]] = []

    def start(self, block_tables: Sequence[Sequence[int]]) -> None:
        self._pending.clear()
        self._lengths = [len(blocks) for blocks in block_tables]
        width = max(self._lengths)
        assert width <= self.values.shape[1], "a block table longer than was reserved"
        rows = torch.tensor(
            [[*blocks, *[NULL_BLOCK] * (width - len(blocks))] for blocks in block_tables], dtype=torch.int64
        )
        self.values.fill_(NULL_BLOCK)
        copy_to_device(rows, self.values[: len(block_tables), :width])

    def extend(self, slot: int, block_table: Sequence[int]) -> None:
        """They reach the device with the next flush()."""
        assert self._lengths[slot] <= len(block_table) <= self.values.shape[1], (
            "a block table shorter than it was, or than was reserved"
        )
        self._pending += [
            (slot, place, block_table[place]) for place in range(self._lengths[slot], len(block_table))
        ]
        self._lengths[slot] = len(block_table)

    def flush(self) -> None:
        if self._pending:
            added = torch.empty(len(self._pending), 3, dtype=torch.int64, device=self.values.device)
            copy_to_device(torch.tensor(self._pending), added)
            self.values.index_put_((added[:, 0], added[:, 1]), added[:, 2])
            self._pending.clear()

    def select(self, active_slots: Tensor) -> Tensor:
        """int64 [n+1] -> [n+1, M]"""
        return self.values.index_select(0, active_slots)


class DeviceDecodeLoop:
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
        decode_ops: DecodeOps,
        forward: Callable[[Batch], Tensor],
        graphs: CudaGraphPool,
        limits: DecodeLimits,
        vocab_size: int,
        block_size: int,
        never_sampled_ids: Tensor,
        draft_loop: DeviceDraftLoop | None,
        with_hashes: bool,
    ) -> None:
        self._ops = ops
        self._decode_ops = decode_ops
        self._forward = forward
        self._graphs = graphs
        self._limits = limits
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._never_sampled_ids = never_sampled_ids.to(limits.device)
        self._draft_loop = draft_loop
        self._with_hashes = with_hashes
        self._capture_sizes = capture_sizes(limits.max_rows)
        self._null_slot = limits.max_rows
        self._slot_table = torch.zeros(
            len(SlotField), limits.max_rows + 1, dtype=torch.int64, device=limits.device
        )
        self._active_slots = torch.full(
            (limits.max_rows + 1,), self._null_slot, dtype=torch.int64, device=limits.device
        )
        self._block_tables = _BlockTables(limits)
        self._draft_block_tables = None if draft_loop is None else _BlockTables(draft_loop.limits)
        self._generation = 0
        self._sampler_classes: list[SamplerClass] = []
        self._in_flight: deque[_InFlightStep] = deque()
        self._captured: dict[tuple[int, int, SamplerClass], _CapturedStep] = {}
        self._first_passes: dict[tuple[int, bool, SamplerClass], Callable[[], None]] = {}

    @torch.inference_mode()
    def capture_graphs(
        self, max_requests: int, num_draft_tokens: int, on_progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Record what rounds of up to `most` requests need, with filters and without, the largest first; `progress` gets what is
        done and how much there is in all."""
        sizes = [
            size
            for size in reversed(self._capture_sizes)
            if size <= pick_size(max_requests, self._capture_sizes)
        ]
        wanted = [(size, level) for size in sizes for level in SamplerClass]
        for done, (size, level) in enumerate(wanted, start=1):
            self._get_passes(size, num_draft_tokens, level)
            if on_progress is not None:
                on_progress(done, len(wanted))

    @torch.inference_mode()
    def start(self, slots: Sequence[DecodeSlot]) -> None:
        assert not self._in_flight, "a run begins while a round is under way"
        assert 0 < len(slots) <= self._limits.max_rows, "more requests than were reserved"
        samplings = [lane.sampling for lane in slots]
        self._sampler_classes = [choose_sampler_class([sampling]) for sampling in samplings]
        self._slot_table.zero_()
        columns = pack_slots(
            [lane.last_token_ids for lane in slots],
            [lane.num_tokens for lane in slots],
            [lane.mrope_offset for lane in slots],
            samplings,
        )
        copy_to_device(columns, self._slot_table[:, : len(slots)])
        self._block_tables.start([lane.block_table for lane in slots])
        if self._draft_block_tables is not None:
            self._draft_block_tables.start([lane.draft_block_table for lane in slots])

    def extend_blocks(
        self, slot: int, block_table: Sequence[int], draft_block_table: Sequence[int] = ()
    ) -> None:
        self._block_tables.extend(slot, block_table)
        if self._draft_block_tables is not None:
            self._draft_block_tables.extend(slot, draft_block_table)

    @torch.inference_mode()
    def launch(self, active_slots: Sequence[int], num_draft_tokens: int) -> None:
        assert len(self._in_flight) < MAX_IN_FLIGHT, "a third round is launched before the first is collected"
        assert active_slots and len(set(active_slots)) == len(active_slots)
        assert num_draft_tokens == 0 or self._draft_loop is not None, "drafts without a draft model"
        size = pick_size(len(active_slots), self._capture_sizes)
        target, drafting = self._get_passes(
            size, num_draft_tokens, max(self._sampler_classes[lane] for lane in active_slots)
        )
        self._block_tables.flush()
        if self._draft_block_tables is not None:
            self._draft_block_tables.flush()
        chosen = [*active_slots, *[self._null_slot] * (size + 1 - len(active_slots))]
        copy_to_device(torch.tensor(chosen), self._active_slots[: size + 1])
        for run in drafting:
            run()
        target.run()
        self._in_flight.append(self._copy_to_host(tuple(active_slots), num_draft_tokens, target))

    def collect(self) -> dict[int, DecodeResult]:
        under_way = self._in_flight.popleft()
        if under_way.done is not None:
            under_way.done.synchronize()
        return dict(_iter_results(under_way))

    def _get_passes(
        self, size: int, num_draft_tokens: int, sampler_class: SamplerClass
    ) -> tuple[_CapturedStep, list[Callable[[], None]]]:
        """The target's pass, and those of the draft model before it; recorded if they are new."""
        drafts, drafting = self._draft_loop, list[Callable[[], None]]()
        if drafts is not None:
            drafts.ensure_capacity(num_draft_tokens)
            if drafts.generation != self._generation:
                self._first_passes.clear()
                self._captured.clear()
                self._generation = drafts.generation
            drafting = [self._get_first_pass(drafts, size, num_draft_tokens > 0, sampler_class)]
            if num_draft_tokens > 1:
                drafting += [drafts.captured_pass(size, sampler_class)] * (num_draft_tokens - 1)
        key = (size, num_draft_tokens, sampler_class)
        if key not in self._captured:
            self._captured[key] = self._capture_step(*key)
        return self._captured[key], drafting

    def _get_first_pass(
        self, draft_loop: DeviceDraftLoop, size: int, with_draft: bool, sampler_class: SamplerClass
    ) -> Callable[[], None]:
        tables = self._draft_block_tables
        assert tables is not None

        def first() -> None:
            lines = SlotView(self._slot_table.index_select(1, self._active_slots[:size]))
            draft_loop.first_pass(
                size, lines, tables.select(self._active_slots[: size + 1]), with_draft, sampler_class
            )

        key = (size, with_draft, sampler_class)
        if key not in self._first_passes:
            self._active_slots.fill_(self._null_slot)
            self._first_passes[key] = draft_loop.graphs.capture(first)
        return self._first_passes[key]

    def _capture_step(self, size: int, num_draft_tokens: int, sampler_class: SamplerClass) -> _CapturedStep:
        rows, device = size * (1 + num_draft_tokens), self._limits.device
        result = torch.zeros(3 + 3 * num_draft_tokens, size, dtype=torch.int64, device=device)
        raw = torch.zeros(rows, self._vocab_size, device=device) if self._with_hashes else None

        def run() -> None:
            self._run_step(size, num_draft_tokens, sampler_class, result, raw)

        self._active_slots.fill_(self._null_slot)
        return _CapturedStep(self._graphs.capture(run) if rows <= self._limits.max_rows else run, result, raw)

    def _run_step(
        self,
        count: int,
        num_draft_tokens: int,
        sampler_class: SamplerClass,
        result: Tensor,
        raw_logits: Tensor | None,
    ) -> None:
        """The target's part, once the guesses are there."""
        chosen, width = self._active_slots[:count], 1 + num_draft_tokens
        lines = SlotView(self._slot_table.index_select(1, chosen))
        length, last = lines[SlotField.LENGTH], lines[SlotField.LAST_TOKEN]
        guesses = last[:, None][:, :0]
        logprobs = guesses.view(torch.float64)
        if self._draft_loop is not None:
            guesses, logprobs = self._draft_loop.get_draft_ids(count, num_draft_tokens)
        token_ids = torch.cat((last[:, None], guesses), 1)
        valid = lines.alive[:, None] & (token_ids >= 0)
        tables, shifts = (
            self._block_tables.select(self._active_slots[: count + 1]),
            lines[SlotField.MROPE_OFFSET],
        )
        directions = self._limits.uses_mrope
        batch = self._decode_ops.build_batch(
            token_ids, length - 1, valid, tables, shifts, self._block_size, directions, only_last=False
        )
        logits = self._forward(batch)
        if raw_logits is not None:
            raw_logits.copy_(logits)
        each = SlotView(lines.values[:, :, None].expand(-1, -1, width).flatten(1))
        positions = (length[:, None] + torch.arange(width, device=chosen.device)).view(-1)
        sampled = sample_slots(
            self._ops, logits, each, positions, self._never_sampled_ids, sampler_class
        ).view(count, width)
        self._decode_ops.commit(self._slot_table, chosen, sampled, guesses, logprobs, result)

    def _copy_to_host(
        self, active_slots: tuple[int, ...], num_draft_tokens: int, step: _CapturedStep
    ) -> _InFlightStep:
        """What a round yields, on its way to the host; nothing that follows it can overwrite what is copied."""
        raw = None if step.raw_logits is None else step.raw_logits.cpu().clone()
        if not step.result.is_cuda:
            return _InFlightStep(active_slots, num_draft_tokens, step.result.clone(), raw, None)
        result = torch.empty(step.result.shape, dtype=torch.int64, pin_memory=True)
        result.copy_(step.result, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return _InFlightStep(active_slots, num_draft_tokens, result, raw, done)


def _iter_results(in_flight: _InFlightStep) -> Iterator[tuple[int, DecodeResult]]:
    """Of each lane that took part."""
    found = in_flight.result
    alive, emitted = found[0], found[1]
    behind = len(found) - in_flight.num_draft_tokens  # sampled, guesses, bits of log-probabilities
    sampled, guesses = (
        found[2 : behind - in_flight.num_draft_tokens],
        found[behind - in_flight.num_draft_tokens : behind],
    )
    logprobs = found[behind:].view(torch.float64)
    columns = (
        alive.tolist(),
        emitted.tolist(),
        *(part.t().tolist() for part in (sampled, guesses, logprobs)),
    )
    for number, (lane, takes_part, count, own, guessed, scores) in enumerate(
        zip(in_flight.active_slots, *columns, strict=False)
    ):
        if takes_part:
            drafted = tuple(token_id for token_id in guessed if token_id >= 0)
            hashes = _hash_rows(in_flight, number, count)
            yield lane, DecodeResult(tuple(own[:count]), drafted, tuple(scores[: len(drafted)]), hashes)


def _hash_rows(in_flight: _InFlightStep, number: int, emitted: int) -> tuple[int, ...]:
    """Of the first `emitted` rows of a lane."""
    if in_flight.raw_logits is None:
        return ()
    first = number * (1 + in_flight.num_draft_tokens)
    return tuple(hash_logits(line) for line in in_flight.raw_logits[first : first + emitted])
