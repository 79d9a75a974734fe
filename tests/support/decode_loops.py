"""Decode loops in process: a reference of the device loop, for tests of overlap scheduling.

A step is computed when it is launched, by the model's forward pass and the host's sampler, and returned when
it is collected. So a step in flight has written to its blocks, whatever happens to its requests.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foreword.core.batch import Batch, Chunk, SampleRow, build_batch
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.cuda_graphs.decode_loop import DecodeResult, DecodeSlot, ForwardResult, SupportsDecodeLoop
from foreword.engine.engine import Engine
from foreword.engine.overlap_scheduling import OverlapLoop, make_overlap_loop
from foreword.kernels.ops import DraftJob, DraftTokens, Ops
from foreword.sampling.sampler import Sampler
from foreword.sampling.verify import verify
from foreword.speculation.drafters.draft_model import DraftState, ModelDrafter
from foreword.speculation.drafters.eager_draft_loop import EagerDraftLoop
from foreword.speculation.engine_drafter import DraftRequest

FAR_LENGTH = 1 << 20
NO_DRAFT = DraftTokens((), ())


def use_overlap(
    engine: Engine, on_call: Callable[[str, TwinForward], None] = lambda verb, twin: None
) -> OverlapLoop:
    """Give an engine an overlap loop; `on_call` is called before "begin", "launch", "collect", "commit"."""
    runner, proposer = engine.model_runner, engine.proposer
    twin = TwinForward(
        runner.forward, runner.sampler._ops, runner.vocab_size, engine.info.resolved.max_model_len, on_call
    )
    runner.forward = twin
    for drafter in proposer.model_drafters:
        if isinstance(drafter, ModelDrafter):
            forward = TwinForward(
                drafter._eager_loop._forward,
                drafter.model.ops,
                drafter.model.vocab_size,
                drafter._window,
                on_call,
            )
            drafter.decode_loop_forward = forward
            proposer.device_drafter = drafter
    overlap = make_overlap_loop(runner, engine.scheduler, proposer, engine.timer, engine.info.resolved)
    assert overlap is not None
    engine.overlap = overlap
    return overlap


class TwinForward:
    """A forward pass with decode loops, which are kept per drafter as on a device."""

    def __init__(
        self,
        forward: Callable[[Batch], Tensor],
        ops: Ops,
        vocab_size: int,
        max_len: int,
        on_call: Callable[[str, TwinForward], None],
    ) -> None:
        self.max_len = max_len
        self.forward = forward
        self.ops = ops
        self.vocab_size = vocab_size
        self.on_call = on_call
        self.made: dict[int | None, TwinDecodeLoop] = {}

    def __call__(self, batch: Batch) -> Tensor:
        assert int(batch.positions.max()) < self.max_len, "a position exceeds the context of the model"
        return self.forward(batch)

    def get_decode_loop(
        self,
        block_size: int,
        never_sampled_ids: Tensor,
        drafter: SupportsDecodeLoop | None = None,
        with_hashes: bool = False,
    ) -> TwinDecodeLoop:
        assert drafter is None or isinstance(drafter, TwinForward)
        key = None if drafter is None else id(drafter)
        if key not in self.made:
            self.made[key] = TwinDecodeLoop(self, drafter, block_size, never_sampled_ids, with_hashes)
        return self.made[key]


@dataclass(slots=True)
class _Slot:
    state: RequestState
    blocks: Sequence[int]
    draft_blocks: Sequence[int]
    alive: bool = True
    draft: DraftTokens = NO_DRAFT

    @property
    def token_ids(self) -> list[int]:
        return self.state.tokens


class TwinDecodeLoop:
    """A DecodeLoop (cuda_graphs/decode_loop.py) that counts its steps."""

    def __init__(
        self,
        target: TwinForward,
        drafter: TwinForward | None,
        block_size: int,
        never_sampled_ids: Tensor,
        with_hashes: bool,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._block_size = block_size
        self._sampler = Sampler(target.ops, target.vocab_size, never_sampled_ids.tolist(), with_hashes)
        if drafter is not None:
            unused_ids = [i for i in never_sampled_ids.tolist() if i < drafter.vocab_size]
            unused_ids += range(target.vocab_size, drafter.vocab_size)
            sampler = Sampler(drafter.ops, drafter.vocab_size, unused_ids)
            self._draft_loop = EagerDraftLoop(drafter, drafter.ops, sampler, block_size, "cpu")
        self._slots: list[_Slot] = []
        self._in_flight: deque[dict[int, DecodeResult]] = deque()
        self._uncommitted: list[_Slot] = []
        self.launched = self.collected = 0

    def start(self, slots: Sequence[DecodeSlot]) -> None:
        self._target.on_call("begin", self._target)
        assert not self._in_flight, "a run starts with a step in flight"
        self._uncommitted = []
        self._slots = [
            _Slot(_state(slot), tuple(slot.block_table), tuple(slot.draft_block_table)) for slot in slots
        ]

    def extend_blocks(
        self, slot: int, block_table: Sequence[int], draft_block_table: Sequence[int] = ()
    ) -> None:
        state = self._slots[slot]
        assert tuple(block_table[: len(state.blocks)]) == state.blocks, "a block table only grows"
        assert tuple(draft_block_table[: len(state.draft_blocks)]) == state.draft_blocks
        state.blocks, state.draft_blocks = tuple(block_table), tuple(draft_block_table)

    @torch.inference_mode()
    def launch(self, active_slots: Sequence[int], num_draft_tokens: int) -> None:
        self._target.on_call("launch", self._target)
        assert len(self._in_flight) < 2, "a third step is launched before the first is collected"
        assert active_slots and len(set(active_slots)) == len(active_slots)
        indices = [index for index in active_slots if self._slots[index].alive]
        slots = [self._slots[index] for index in indices]
        results = []
        if slots:
            logits = self._forward(slots, num_draft_tokens)
            sampled = self._sampler(logits, sample_rows((s.state, s.draft) for s in slots))
            results = self._verify(slots, sampled.token_ids, sampled.logits_hashes)
        self._in_flight.append(dict(zip(indices, results, strict=True)))
        self.launched += 1

    def collect(self) -> dict[int, DecodeResult]:
        results = self._in_flight.popleft()
        self._target.on_call("collect", self._target)
        self.collected += 1
        return results

    @torch.inference_mode()
    def launch_forward(self, active_slots: Sequence[int], num_draft_tokens: int) -> ForwardResult:
        """The logits of slots with a broken row mean nothing, as those of padding."""
        self._target.on_call("launch", self._target)
        assert not self._in_flight and not self._uncommitted, "a second step is launched before commit()"
        assert active_slots and len(set(active_slots)) == len(active_slots)
        self._uncommitted = [self._slots[index] for index in active_slots]
        logits = self._forward(self._uncommitted, num_draft_tokens)
        for index, slot in enumerate(self._uncommitted):
            if not slot.alive:
                logits[index * (1 + num_draft_tokens) : (index + 1) * (1 + num_draft_tokens)] = 0.0
        drafts = [slot.draft for slot in self._uncommitted]
        self.launched += 1
        return ForwardResult(logits, (lambda: drafts) if num_draft_tokens else None)

    def commit(self, sampled_ids: Tensor) -> None:
        self._target.on_call("commit", self._target)
        slots, self._uncommitted = self._uncommitted, []
        self._verify(slots, sampled_ids.tolist(), ())
        self.collected += 1

    def _forward(self, slots: Sequence[_Slot], num_draft_tokens: int) -> Tensor:
        """Logits of the last token of each slot, and of its new draft."""
        if self._drafter is not None:
            self._draft(self._drafter.vocab_size, slots, num_draft_tokens)
        chunks = []
        for slot in slots:
            token_ids = [slot.token_ids[-1], *slot.draft.token_ids]
            chunks.append(Chunk(token_ids, len(slot.token_ids) - 1, slot.blocks, len(token_ids)))
        return self._target(build_batch(chunks, self._block_size, self._target.ops.row_tile, "cpu")).clone()

    def _draft(self, vocab_size: int, slots: Sequence[_Slot], num_draft: int) -> None:
        """Recompute the last two tokens, then draft one token per pass."""
        jobs = []
        for slot in slots:
            num_tokens = len(slot.token_ids)
            known = [token_id if token_id < vocab_size else 0 for token_id in slot.token_ids[-2:]]
            sampling = DraftState.from_state(slot.state, vocab_size).sampling
            place = num_tokens - len(known), slot.draft_blocks, num_tokens
            jobs.append(DraftJob(known, *place, num_draft, -math.inf, sampling))
        drafts = self._draft_loop.draft([DraftRequest(slot.state) for slot in slots], jobs)
        for slot, draft in zip(slots, drafts, strict=True):
            slot.draft = draft

    def _verify(
        self, slots: Sequence[_Slot], sampled_ids: Sequence[int], hashes: Sequence[int]
    ) -> list[DecodeResult]:
        """Advance the slots by what their rows sampled."""
        results, first = [], 0
        for slot in slots:
            draft = slot.draft
            end = first + len(draft.token_ids) + 1
            count = verify(sampled_ids[first:end], draft.token_ids) + 1
            token_ids, kept = tuple(sampled_ids[first : first + count]), tuple(hashes[first : first + count])
            results.append(DecodeResult(token_ids, draft.token_ids, draft.logprobs, kept))
            slot.alive = token_ids[-1] >= 0
            slot.token_ids.extend(token_id for token_id in token_ids if token_id >= 0)
            first = end
        return results


def sample_rows(drafts: Iterable[tuple[RequestState, DraftTokens]]) -> list[SampleRow]:
    """Rows of the last tokens and of each draft token."""
    return [
        SampleRow(state, draft.token_ids[:place])
        for state, draft in drafts
        for place in range(len(draft.token_ids) + 1)
    ]


def _state(slot: DecodeSlot) -> RequestState:
    """A request with the same sampling parameters and number of tokens."""
    sampling: Any = slot.sampling
    params = SamplingParams(
        temperature=0.0 if sampling.greedy else sampling.temperature,
        top_k=max(sampling.top_k, 0),
        top_p=sampling.top_p,
        min_p=sampling.min_p,
    )
    token_ids = (0,) * (slot.num_tokens - len(slot.last_token_ids)) + slot.last_token_ids
    return RequestState(Request("slot", token_ids, params, sampling.seed), 0, FAR_LENGTH)
