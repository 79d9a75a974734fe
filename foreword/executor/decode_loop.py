"""Decode loop on the device: draft, verify, sample and commit, step after step without the host.

The host launches a step while the previous one is computed and reads results one step late. A request that
ends meanwhile has wasted one step: its tokens are dropped, and its KV lies beyond the known tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from foreword.core.batch import NULL_BLOCK
from foreword.executor.cuda_graphs import capture_sizes, pick_size
from foreword.executor.decode_slots import (
    DecodeLimits,
    LoopConfig,
    SamplerClass,
    SlotView,
    choose_sampler_class,
    copy_to_device,
    pack_slots,
    sample_slots,
)
from foreword.executor.draft_loop import DeviceDraftLoop
from foreword.kernels.ops import DraftSamplingParams
from foreword.kernels.reference.decode_ops import SlotField
from foreword.kernels.reference.sampling import hash_logits

__all__ = ["DecodeLoop", "DecodeResult", "DecodeSlot", "DeviceDecodeLoop", "SupportsDecodeLoop"]

MAX_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class DecodeSlot:
    """A request with one token left to compute, sampled by temperature, top-k, top-p and min-p alone."""

    last_token_ids: tuple[int, ...]  # the last two tokens, or the only one
    num_tokens: int  # known tokens; all but the last have KV
    block_table: Sequence[int]  # in the target's cache
    sampling: DraftSamplingParams
    draft_block_table: Sequence[int] = ()  # in the draft model's cache; all but the last two have KV
    mrope_offset: int = 0  # as in DraftJob


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """Result of one step for one slot.

    A last token of -1 means a broken row of logits: later steps in flight have no result for the slot.
    """

    token_ids: tuple[int, ...]  # the accepted draft tokens and one more
    draft_ids: tuple[int, ...] = ()
    draft_logprobs: tuple[float, ...] = ()  # of each draft token in the distribution it was sampled from
    logits_hashes: tuple[int, ...] = ()  # of the raw logits of each token, if requested


class DecodeLoop(Protocol):
    """One run of steps over a fixed set of requests; at most MAX_IN_FLIGHT steps are not collected."""

    def start(self, slots: Sequence[DecodeSlot]) -> None:
        """Set the requests of the following steps; slot i is slots[i]. No step may be in flight."""

    def extend_blocks(
        self, slot: int, block_table: Sequence[int], draft_block_table: Sequence[int] = ()
    ) -> None:
        """Replace the block tables of a slot by longer ones, for later launches."""

    def launch(self, active_slots: Sequence[int], num_draft_tokens: int) -> None:
        """Launch a step of these slots without waiting for it.

        Every slot has blocks for 1 + num_draft_tokens more tokens for each step in flight.
        """

    def collect(self) -> dict[int, DecodeResult]:
        """Wait for the oldest step in flight; its results by slot."""


@runtime_checkable
class SupportsDecodeLoop(Protocol):
    """A compiled forward pass to logits that offers a decode loop."""

    def get_decode_loop(
        self,
        block_size: int,
        never_sampled_ids: Tensor,
        drafter: SupportsDecodeLoop | None = None,
        with_hashes: bool = False,
    ) -> DecodeLoop:
        """The decode loop of this model, with `drafter` as its draft model; never_sampled_ids int64 [U].

        with_hashes  results include hashes of the raw logits, as in test mode; this waits for the device
        """


@dataclass(frozen=True, slots=True)
class _CapturedStep:
    """The target's pass for n requests with d draft tokens each."""

    run: Callable[[], None]
    result: Tensor  # int64 [3+3d, n], see DecodeOps.commit
    raw_logits: Tensor | None  # float32 [n * (1+d), V] before processing, if hashes are requested


@dataclass(frozen=True, slots=True)
class _InFlightStep:
    """A launched step; `result` and `raw_logits` are on the host, valid after `done`."""

    active_slots: tuple[int, ...]
    num_draft_tokens: int
    result: Tensor
    raw_logits: Tensor | None
    done: torch.cuda.Event | None


class _BlockTables:
    """Block tables of all slots, int64 [rows+1, M], append-only; the last row is the padding's."""

    def __init__(self, limits: DecodeLimits) -> None:
        shape = (limits.max_rows + 1, limits.max_blocks)
        self.values = torch.full(shape, NULL_BLOCK, dtype=torch.int64, device=limits.device)
        self._lengths: list[int] = []
        self._pending: list[tuple[int, int, int]] = []  # (slot, column, block)

    def start(self, block_tables: Sequence[Sequence[int]]) -> None:
        self._pending.clear()
        self._lengths = [len(blocks) for blocks in block_tables]
        width = max(self._lengths)
        assert width <= self.values.shape[1], "a block table longer than the reserved maximum"
        padded = [[*blocks, *[NULL_BLOCK] * (width - len(blocks))] for blocks in block_tables]
        self.values.fill_(NULL_BLOCK)
        copy_to_device(torch.tensor(padded, dtype=torch.int64), self.values[: len(block_tables), :width])

    def extend(self, slot: int, block_table: Sequence[int]) -> None:
        """Takes effect with the next flush()."""
        length = self._lengths[slot]
        assert length <= len(block_table) <= self.values.shape[1], (
            "a block table shorter than before, or longer than the reserved maximum"
        )
        self._pending += [(slot, column, block_table[column]) for column in range(length, len(block_table))]
        self._lengths[slot] = len(block_table)

    def flush(self) -> None:
        if self._pending:
            added = torch.empty(len(self._pending), 3, dtype=torch.int64, device=self.values.device)
            copy_to_device(torch.tensor(self._pending), added)
            self.values.index_put_((added[:, 0], added[:, 1]), added[:, 2])
            self._pending.clear()

    def select(self, slots: Tensor) -> Tensor:
        """int64 [n+1] -> [n+1, M]"""
        return self.values.index_select(0, slots)


class DeviceDecodeLoop:
    """See DecodeLoop. At most `limits.max_rows` requests.

    A step captures what it needs before it launches anything. During a capture all active slots are the null
    slot, so no state changes. A step without draft tokens still runs the draft model over the new tokens.
    """

    def __init__(self, config: LoopConfig, draft_loop: DeviceDraftLoop | None, with_hashes: bool) -> None:
        limits = config.limits
        self._config = config
        self._draft_loop = draft_loop
        self._with_hashes = with_hashes
        self._capture_sizes = capture_sizes(limits.max_rows)
        self._null_slot = limits.max_rows  # its column is never alive
        num_slots, device = limits.max_rows + 1, limits.device
        self._slot_table = torch.zeros(len(SlotField), num_slots, dtype=torch.int64, device=device)
        # Slots of a launch, padded with the null slot.
        self._active_slots = torch.full((num_slots,), self._null_slot, dtype=torch.int64, device=device)
        self._block_tables = _BlockTables(limits)
        self._draft_block_tables = None if draft_loop is None else _BlockTables(draft_loop.limits)
        self._generation = 0  # of the draft loop whose passes are captured here
        self._sampler_classes: list[SamplerClass] = []
        self._in_flight: deque[_InFlightStep] = deque()
        self._captured: dict[tuple[int, int, SamplerClass], _CapturedStep] = {}
        self._first_passes: dict[tuple[int, bool, SamplerClass], Callable[[], None]] = {}

    @torch.inference_mode()
    def capture_graphs(
        self, max_requests: int, num_draft_tokens: int, on_progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Capture steps of up to `max_requests`, the largest first; on_progress(done, total)."""
        largest = pick_size(max_requests, self._capture_sizes)
        sizes = [size for size in reversed(self._capture_sizes) if size <= largest]
        keys = [(size, sampler_class) for size in sizes for sampler_class in SamplerClass]
        for done, (size, sampler_class) in enumerate(keys, start=1):
            self._get_passes(size, num_draft_tokens, sampler_class)
            if on_progress is not None:
                on_progress(done, len(keys))

    @torch.inference_mode()
    def start(self, slots: Sequence[DecodeSlot]) -> None:
        assert not self._in_flight, "start() with a step in flight"
        assert 0 < len(slots) <= self._config.limits.max_rows, "more requests than the reserved maximum"
        params = [slot.sampling for slot in slots]
        self._sampler_classes = [choose_sampler_class([p]) for p in params]
        self._slot_table.zero_()
        columns = pack_slots(
            [slot.last_token_ids for slot in slots],
            [slot.num_tokens for slot in slots],
            [slot.mrope_offset for slot in slots],
            params,
        )
        copy_to_device(columns, self._slot_table[:, : len(slots)])
        self._block_tables.start([slot.block_table for slot in slots])
        if self._draft_block_tables is not None:
            self._draft_block_tables.start([slot.draft_block_table for slot in slots])

    def extend_blocks(
        self, slot: int, block_table: Sequence[int], draft_block_table: Sequence[int] = ()
    ) -> None:
        self._block_tables.extend(slot, block_table)
        if self._draft_block_tables is not None:
            self._draft_block_tables.extend(slot, draft_block_table)

    @torch.inference_mode()
    def launch(self, active_slots: Sequence[int], num_draft_tokens: int) -> None:
        assert len(self._in_flight) < MAX_IN_FLIGHT, f"launch() with {MAX_IN_FLIGHT} steps in flight"
        assert active_slots and len(set(active_slots)) == len(active_slots)
        assert num_draft_tokens == 0 or self._draft_loop is not None, "draft tokens without a draft model"
        size = pick_size(len(active_slots), self._capture_sizes)
        sampler_class = max(self._sampler_classes[slot] for slot in active_slots)
        step, draft_passes = self._get_passes(size, num_draft_tokens, sampler_class)
        self._block_tables.flush()
        if self._draft_block_tables is not None:
            self._draft_block_tables.flush()
        padded = [*active_slots, *[self._null_slot] * (size + 1 - len(active_slots))]
        copy_to_device(torch.tensor(padded), self._active_slots[: size + 1])
        for run in draft_passes:
            run()
        step.run()
        self._in_flight.append(_copy_to_host(tuple(active_slots), num_draft_tokens, step))

    def collect(self) -> dict[int, DecodeResult]:
        step = self._in_flight.popleft()
        if step.done is not None:
            step.done.synchronize()
        return dict(_iter_results(step))

    def _get_passes(
        self, size: int, num_draft_tokens: int, sampler_class: SamplerClass
    ) -> tuple[_CapturedStep, list[Callable[[], None]]]:
        """The target's pass, and the draft model's passes before it; captured on first use."""
        draft_loop, draft_passes = self._draft_loop, list[Callable[[], None]]()
        if draft_loop is not None:
            draft_loop.ensure_capacity(num_draft_tokens)
            if draft_loop.generation != self._generation:
                self._first_passes.clear()
                self._captured.clear()
                self._generation = draft_loop.generation
            draft_passes = [self._get_first_pass(draft_loop, size, num_draft_tokens > 0, sampler_class)]
            if num_draft_tokens > 1:
                draft_passes += [draft_loop.captured_pass(size, sampler_class)] * (num_draft_tokens - 1)
        key = (size, num_draft_tokens, sampler_class)
        if key not in self._captured:
            self._captured[key] = self._capture_step(*key)
        return self._captured[key], draft_passes

    def _get_first_pass(
        self, draft_loop: DeviceDraftLoop, size: int, with_draft: bool, sampler_class: SamplerClass
    ) -> Callable[[], None]:
        tables = self._draft_block_tables
        assert tables is not None

        def run() -> None:
            slots = SlotView(self._slot_table.index_select(1, self._active_slots[:size]))
            block_tables = tables.select(self._active_slots[: size + 1])
            draft_loop.first_pass(size, slots, block_tables, with_draft, sampler_class)

        key = (size, with_draft, sampler_class)
        if key not in self._first_passes:
            self._active_slots.fill_(self._null_slot)
            self._first_passes[key] = draft_loop.graphs.capture(run)
        return self._first_passes[key]

    def _capture_step(self, size: int, num_draft_tokens: int, sampler_class: SamplerClass) -> _CapturedStep:
        config = self._config
        rows, device = size * (1 + num_draft_tokens), config.limits.device
        result = torch.zeros(3 + 3 * num_draft_tokens, size, dtype=torch.int64, device=device)
        raw = torch.zeros(rows, config.vocab_size, device=device) if self._with_hashes else None

        def run() -> None:
            self._run_step(size, num_draft_tokens, sampler_class, result, raw)

        self._active_slots.fill_(self._null_slot)
        fits = rows <= config.limits.max_rows
        return _CapturedStep(config.graphs.capture(run) if fits else run, result, raw)

    def _run_step(
        self,
        count: int,
        num_draft_tokens: int,
        sampler_class: SamplerClass,
        result: Tensor,
        raw_logits: Tensor | None,
    ) -> None:
        """The target's pass over the last tokens and the draft, sampling, and commit."""
        config, active, width = self._config, self._active_slots[:count], 1 + num_draft_tokens
        slots = SlotView(self._slot_table.index_select(1, active))
        length, last = slots[SlotField.LENGTH], slots[SlotField.LAST_TOKEN]
        draft_ids = last[:, None][:, :0]
        logprobs = draft_ids.view(torch.float64)
        if self._draft_loop is not None:
            draft_ids, logprobs = self._draft_loop.get_draft_ids(count, num_draft_tokens)
        token_ids = torch.cat((last[:, None], draft_ids), 1)
        batch = config.ops.decode_ops.build_batch(
            token_ids,
            length - 1,
            slots.alive[:, None] & (token_ids >= 0),
            self._block_tables.select(self._active_slots[: count + 1]),
            slots[SlotField.MROPE_OFFSET],
            config.block_size,
            config.limits.uses_mrope,
            only_last=False,
        )
        logits = config.forward(batch)
        if raw_logits is not None:
            raw_logits.copy_(logits)
        row_slots = SlotView(slots.values[:, :, None].expand(-1, -1, width).flatten(1))
        positions = (length[:, None] + torch.arange(width, device=active.device)).view(-1)
        sampled = sample_slots(
            config.ops, logits, row_slots, positions, config.never_sampled_ids, sampler_class
        )
        config.ops.decode_ops.commit(
            self._slot_table, active, sampled.view(count, width), draft_ids, logprobs, result
        )


def _copy_to_host(active_slots: tuple[int, ...], num_draft_tokens: int, step: _CapturedStep) -> _InFlightStep:
    """Start the copy of a step's result; later steps cannot overwrite the copy."""
    raw = None if step.raw_logits is None else step.raw_logits.cpu().clone()
    if not step.result.is_cuda:
        return _InFlightStep(active_slots, num_draft_tokens, step.result.clone(), raw, None)
    result = torch.empty(step.result.shape, dtype=torch.int64, pin_memory=True)
    result.copy_(step.result, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    return _InFlightStep(active_slots, num_draft_tokens, result, raw, done)


def _iter_results(step: _InFlightStep) -> Iterator[tuple[int, DecodeResult]]:
    """(slot, result) of each slot that was alive; the layout is that of DecodeOps.commit."""
    num_draft_tokens = step.num_draft_tokens
    width = 1 + num_draft_tokens
    alive, emitted = step.result[:2].tolist()
    end = 2 + width
    sampled, draft_ids = step.result[2:end], step.result[end : end + num_draft_tokens]
    logprob_bits = step.result[end + num_draft_tokens :]
    rows = zip(
        step.active_slots,
        alive,
        emitted,
        sampled.t().tolist(),
        draft_ids.t().tolist(),
        logprob_bits.view(torch.float64).t().tolist(),
        strict=False,  # columns of the padding follow
    )
    for i, (slot, is_alive, count, token_ids, drafted, logprobs) in enumerate(rows):
        if is_alive:
            kept = tuple(token_id for token_id in drafted if token_id >= 0)
            raw = () if step.raw_logits is None else step.raw_logits[i * width : i * width + count]
            hashes = tuple(hash_logits(row) for row in raw)
            yield slot, DecodeResult(tuple(token_ids[:count]), kept, tuple(logprobs[: len(kept)]), hashes)
