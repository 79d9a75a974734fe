"""Decode loop on the device: draft, verify, sample and commit, step after step without the host.

The host launches a step while the previous one is computed and reads results one step late. A request that
ends meanwhile has wasted one step: its tokens are dropped, and its KV lies beyond the known tokens.

If sampling depends on the output so far (penalties, grammars), the host launches it while the forward pass
is computed: launch_forward(), then commit() of the ids, which stay on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from foreword.core.batch import NULL_BLOCK, Batch, download
from foreword.core.outputs import TokenLogprob
from foreword.core.request import NO_LORA
from foreword.cuda_graphs.capture import capture_sizes, pick_size
from foreword.cuda_graphs.decode_slots import (
    DecodeLimits,
    LoopConfig,
    SamplerClass,
    SlotView,
    choose_sampler_class,
    copy_to_device,
    pack_slots,
    sample_slots,
)
from foreword.cuda_graphs.draft_loop import DeviceDraftLoop
from foreword.kernels.ops import DraftSamplingParams, DraftTokens
from foreword.kernels.reference.decode_ops import SlotField
from foreword.kernels.reference.sampling import hash_logits

MAX_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class DecodeSlot:
    """A request with one token left to compute."""

    last_token_ids: tuple[int, ...]  # the last two tokens, or the only one
    num_tokens: int  # known tokens; all but the last have KV
    block_table: Sequence[int]  # blocks in the target's cache
    sampling: DraftSamplingParams  # parameters of drafts, and of all tokens in launch()
    draft_block_table: Sequence[int] = ()  # blocks in the draft model's cache; all but the last two have KV
    mrope_offset: int = 0  # as in DraftJob
    lora_slot: int = NO_LORA


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """Result of one step for one slot.

    A last token of -1 means a broken row of logits: later steps in flight have no result for the slot.
    """

    token_ids: tuple[int, ...]  # the accepted draft tokens and one more
    draft_ids: tuple[int, ...] = ()
    draft_logprobs: tuple[float, ...] = ()  # draft tokens, in the distribution they were sampled from
    logits_hashes: tuple[int, ...] = ()  # hashes of each token's raw logits, if requested
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each token, if requested


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """A launched forward pass over n slots with d draft tokens each; the caller samples the next tokens."""

    logits: Tensor  # float32 [n * (1+d), V] on the device, valid until the next launch
    # Waits for the draft model; the draft of each slot. None: d is 0.
    read_drafts: Callable[[], list[DraftTokens]] | None


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


class SplitDecodeLoop(DecodeLoop, Protocol):
    """A DecodeLoop that also runs steps in two halves, between which the caller samples."""

    def launch_forward(self, active_slots: Sequence[int], num_draft_tokens: int) -> ForwardResult:
        """Launch a step of these slots up to its logits. No other step is in flight; commit() ends it."""

    def commit(self, sampled_ids: Tensor) -> None:
        """Verify the drafts of launch_forward() and advance its slots; int64 [n * (1+d)] on the device."""


@runtime_checkable
class SupportsDecodeLoop(Protocol):
    """A compiled forward pass to logits that offers a decode loop."""

    def get_decode_loop(
        self,
        block_size: int,
        never_sampled_ids: Tensor,
        drafter: SupportsDecodeLoop | None = None,
        with_hashes: bool = False,
    ) -> SplitDecodeLoop:
        """The decode loop of this model, with `drafter` as its draft model; never_sampled_ids int64 [U].

        with_hashes  results include hashes of the raw logits, as in test mode
        """


@dataclass(frozen=True, slots=True)
class _CapturedStep:
    """The target's pass for n requests with d draft tokens each."""

    run: Callable[[], None]
    result: Tensor  # int64 [3+3d, n], see DecodeOps.commit
    hashes: Tensor | None  # int64 [n * (1+d)] of the raw logits, if requested


@dataclass(frozen=True, slots=True)
class _InFlightStep:
    """A launched step."""

    active_slots: tuple[int, ...]
    num_draft_tokens: int
    wait: Callable[[], list[Tensor]]  # returns its result, and its hashes if requested


class _BlockTables:
    """Block tables of all slots, int64 [slots+1, M], append-only; the last row is the padding's."""

    def __init__(self, limits: DecodeLimits) -> None:
        shape = (limits.max_requests + 1, limits.max_blocks)
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
    """See SplitDecodeLoop. At most `limits.max_requests` requests.

    A step captures what it needs before it launches anything. During a capture all active slots are the null
    slot, so no state changes. A step without draft tokens still runs the draft model over the new tokens.
    """

    def __init__(self, config: LoopConfig, draft_loop: DeviceDraftLoop | None, with_hashes: bool) -> None:
        limits = config.limits
        self._config = config
        self._draft_loop = draft_loop
        self._with_hashes = with_hashes
        self._capture_sizes = capture_sizes(limits.max_requests)
        self._null_slot = limits.max_requests  # its column is never alive
        num_slots, device = limits.max_requests + 1, limits.device
        self._slot_table = torch.zeros(len(SlotField), num_slots, dtype=torch.int64, device=device)
        # Slots of a launch, padded with the null slot.
        self._active_slots = torch.full((num_slots,), self._null_slot, dtype=torch.int64, device=device)
        self._block_tables = _BlockTables(limits)
        self._draft_block_tables = None if draft_loop is None else _BlockTables(draft_loop.limits)
        self._generation = 0  # generation of the draft loop whose passes are captured here
        self._sampler_classes: list[SamplerClass] = []
        self._in_flight: deque[_InFlightStep] = deque()
        self._forward_shape = 0, 0  # slots and draft tokens of the last launch_forward()
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
        assert 0 < len(slots) <= self._null_slot, "more requests than the reserved maximum"
        params = [slot.sampling for slot in slots]
        self._sampler_classes = [choose_sampler_class([p]) for p in params]
        self._slot_table.zero_()
        columns = pack_slots(
            [slot.last_token_ids for slot in slots],
            [slot.num_tokens for slot in slots],
            [slot.mrope_offset for slot in slots],
            params,
            [slot.lora_slot for slot in slots],
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
        self._upload_active(active_slots, size)
        for run in draft_passes:
            run()
        step.run()
        results = [step.result] if step.hashes is None else [step.result, step.hashes]
        self._in_flight.append(_InFlightStep(tuple(active_slots), num_draft_tokens, download(results)))

    def collect(self) -> dict[int, DecodeResult]:
        return dict(_iter_results(self._in_flight.popleft()))

    @torch.inference_mode()
    def launch_forward(self, active_slots: Sequence[int], num_draft_tokens: int) -> ForwardResult:
        assert not self._in_flight, "launch_forward() with a step in flight"
        assert num_draft_tokens == 0 or self._draft_loop is not None, "draft tokens without a draft model"
        count = len(active_slots)
        size = pick_size(count, self._capture_sizes)
        sampler_class = max(self._sampler_classes[slot] for slot in active_slots)
        draft_passes = self._get_draft_passes(size, num_draft_tokens, sampler_class)
        self._upload_active(active_slots, size)
        for run in draft_passes:
            run()
        read_drafts = None
        if self._draft_loop is not None and num_draft_tokens:
            read_drafts = self._draft_loop.download_drafts(count, num_draft_tokens)
        slots = SlotView(self._slot_table.index_select(1, self._active_slots[:size]))
        draft_ids, _ = self._get_draft_ids(size, num_draft_tokens)
        logits = self._config.graph_forward(self._build_batch(slots, draft_ids))
        self._forward_shape = count, num_draft_tokens
        return ForwardResult(logits[: count * (1 + num_draft_tokens)], read_drafts)

    @torch.inference_mode()
    def commit(self, sampled_ids: Tensor) -> None:
        count, num_draft_tokens = self._forward_shape
        self._commit(count, sampled_ids, sampled_ids.new_empty(3 + 3 * num_draft_tokens, count))

    def _upload_active(self, active_slots: Sequence[int], size: int) -> None:
        """Upload the slots of the next launch, padded to `size`, and new blocks."""
        self._block_tables.flush()
        if self._draft_block_tables is not None:
            self._draft_block_tables.flush()
        padded = [*active_slots, *[self._null_slot] * (size + 1 - len(active_slots))]
        copy_to_device(torch.tensor(padded), self._active_slots[: size + 1])

    def _get_passes(
        self, size: int, num_draft_tokens: int, sampler_class: SamplerClass
    ) -> tuple[_CapturedStep, list[Callable[[], None]]]:
        """The target's pass, and the draft model's passes before it; captured on first use."""
        draft_passes = self._get_draft_passes(size, num_draft_tokens, sampler_class)
        key = (size, num_draft_tokens, sampler_class)
        if key not in self._captured:
            self._captured[key] = self._capture_step(*key)
        return self._captured[key], draft_passes

    def _get_draft_passes(
        self, size: int, num_draft_tokens: int, sampler_class: SamplerClass
    ) -> list[Callable[[], None]]:
        """The draft model's passes of a step; captured on first use."""
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
        return draft_passes

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
        hashes = torch.zeros(rows, dtype=torch.int64, device=device) if self._with_hashes else None

        def run() -> None:
            self._run_step(size, num_draft_tokens, sampler_class, result, hashes)

        self._active_slots.fill_(self._null_slot)
        fits = rows <= config.limits.max_rows
        return _CapturedStep(config.graphs.capture(run) if fits else run, result, hashes)

    def _run_step(
        self,
        count: int,
        num_draft_tokens: int,
        sampler_class: SamplerClass,
        result: Tensor,
        hashes: Tensor | None,
    ) -> None:
        """The target's pass over the last tokens and the draft, sampling, and commit."""
        config, width = self._config, 1 + num_draft_tokens
        slots = SlotView(self._slot_table.index_select(1, self._active_slots[:count]))
        draft_ids, _ = self._get_draft_ids(count, num_draft_tokens)
        logits = config.forward(self._build_batch(slots, draft_ids))
        if hashes is not None:
            hashes.copy_(hash_logits(logits))
        row_slots = SlotView(slots.values[:, :, None].expand(-1, -1, width).flatten(1))
        positions = (slots[SlotField.LENGTH][:, None] + torch.arange(width, device=logits.device)).view(-1)
        sampled = sample_slots(
            config.ops, logits, row_slots, positions, config.never_sampled_ids, sampler_class
        )
        self._commit(count, sampled, result)

    def _get_draft_ids(self, count: int, num_draft_tokens: int) -> tuple[Tensor, Tensor]:
        """Draft ids int64 [count, d], -1 after the last one, and their log-probabilities float64."""
        if self._draft_loop is not None:
            return self._draft_loop.get_draft_ids(count, num_draft_tokens)
        none = self._active_slots[:count, None][:, :0]
        return none, none.view(torch.float64)

    def _build_batch(self, slots: SlotView, draft_ids: Tensor) -> Batch:
        """The target's batch: the last token of each active slot, and its draft int64 [count, d]."""
        config, count = self._config, len(draft_ids)
        token_ids = torch.cat((slots[SlotField.LAST_TOKEN][:, None], draft_ids), 1)
        batch = config.ops.decode_ops.build_batch(
            token_ids,
            slots[SlotField.LENGTH] - 1,
            slots.alive[:, None] & (token_ids >= 0),
            self._block_tables.select(self._active_slots[: count + 1]),
            slots[SlotField.MROPE_OFFSET],
            config.block_size,
            config.limits.uses_mrope,
            only_last=False,
        )
        if not config.limits.uses_lora:
            return batch
        assert batch.request_index is not None
        # The last is that of padding
        by_request = torch.nn.functional.pad(slots[SlotField.LORA_SLOT], (0, 1), value=NO_LORA)
        return replace(batch, lora_slots=by_request.index_select(0, batch.request_index))

    def _commit(self, count: int, sampled_ids: Tensor, result: Tensor) -> None:
        """DecodeOps.commit() of the first `count` active slots."""
        active, sampled = self._active_slots[:count], sampled_ids.view(count, -1)
        drafts = self._get_draft_ids(count, sampled.shape[1] - 1)
        self._config.ops.decode_ops.commit(self._slot_table, active, sampled, *drafts, result)


def _iter_results(step: _InFlightStep) -> Iterator[tuple[int, DecodeResult]]:
    """(slot, result) of each slot that was alive; the layout is that of DecodeOps.commit."""
    result, *hashes = step.wait()
    num_draft_tokens = step.num_draft_tokens
    width = 1 + num_draft_tokens
    alive, emitted = result[:2].tolist()
    end = 2 + width
    sampled, draft_ids = result[2:end], result[end : end + num_draft_tokens]
    logprob_bits = result[end + num_draft_tokens :]
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
            run, kept = tuple(token_ids[:count]), tuple(token_id for token_id in drafted if token_id >= 0)
            row_hashes = tuple(hashes[0][i * width : i * width + count].tolist()) if hashes else ()
            yield slot, DecodeResult(run, kept, tuple(logprobs[: len(kept)]), row_hashes)
