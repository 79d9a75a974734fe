"""Rounds in process: the twin of what runs on a device, for tests of whoever launches and collects them.

A round is computed when it is launched, by the model's own forward pass and the host's sampler, and told when it is collected. So
what is under way has written to its blocks already, whatever becomes of its requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foreword.core.batch import Batch, Chunk, SampleRow, build_batch
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.engine.engine import Engine
from foreword.engine.overlap import OverlapLoop, make_overlap_loop
from foreword.executor.decode_loop import DecodeResult, DecodeSlot, SupportsDecodeLoop
from foreword.kernels.ops import Ops
from foreword.sampling.sampler import Sampler
from foreword.sampling.verify import verify
from foreword.speculation.drafters.draft_model import ModelDrafter

__all__ = ["TwinDecodeLoop", "TwinForward", "use_overlap"]

FAR_LENGTH = 1 << 20


def use_overlap(
    engine: Engine, on_call: Callable[[str, TwinForward], None] = lambda verb, twin: None
) -> OverlapLoop:
    """Let an engine run ahead by twins of its models. `strike` is called with each verb before it is done."""
    runner, drafting = engine.model_runner, engine.proposer
    twin = TwinForward(
        runner._forward, runner.sampler._ops, runner.vocab_size, engine.info.resolved.max_model_len, on_call
    )
    runner._forward = twin
    for drafter in drafting.model_drafters:
        if isinstance(drafter, ModelDrafter):
            own = TwinForward(
                drafter._eager_loop._forward,
                drafter.model.ops,
                drafter.model.vocab_size,
                drafter._window,
                on_call,
            )
            drafter.decode_loop_forward = own
            drafting.device_drafter = drafter
    ahead = make_overlap_loop(runner, engine.scheduler, drafting, engine.timer, engine.info.resolved)
    assert ahead is not None
    engine.overlap = ahead
    return ahead


class TwinForward:
    """A forward pass that RunsAhead. made: rounds by the drafter that they were made with; as of a device, they are kept."""

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

    @torch.inference_mode()
    def logits(self, chunks: Sequence[Chunk], block_size: int) -> Tensor:
        """Of the sampled rows [R, V]"""
        assert all(chunk.start + len(chunk.token_ids) <= self.max_len for chunk in chunks), (
            "beyond what the model can read"
        )
        return self.forward(build_batch(chunks, block_size, self.ops.row_tile, "cpu")).clone()


@dataclass(slots=True)
class _Slot:
    state: RequestState
    blocks: Sequence[int]
    draft_blocks: Sequence[int]
    alive: bool = True
    draft_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return self.state.tokens


class TwinDecodeLoop:
    """See executor/decode_loop.py. launched, collected: how many rounds so far."""

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
            mine = [i for i in never_sampled_ids.tolist() if i < drafter.vocab_size]
            mine += range(target.vocab_size, drafter.vocab_size)
            self._draft_sampler = Sampler(drafter.ops, drafter.vocab_size, mine)
        self._slots: list[_Slot] = []
        self._in_flight: deque[dict[int, DecodeResult]] = deque()
        self.launched = self.collected = 0

    def start(self, slots: Sequence[DecodeSlot]) -> None:
        self._target.on_call("begin", self._target)
        assert not self._in_flight, "a run begins while a round is under way"
        self._slots = [
            _Slot(_state(lane), tuple(lane.block_table), tuple(lane.draft_block_table)) for lane in slots
        ]

    def extend_blocks(
        self, slot: int, block_table: Sequence[int], draft_block_table: Sequence[int] = ()
    ) -> None:
        one = self._slots[slot]
        assert tuple(block_table[: len(one.blocks)]) == one.blocks, "a block table only grows"
        assert tuple(draft_block_table[: len(one.draft_blocks)]) == one.draft_blocks
        one.blocks, one.draft_blocks = tuple(block_table), tuple(draft_block_table)

    @torch.inference_mode()
    def launch(self, active_slots: Sequence[int], num_draft_tokens: int) -> None:
        self._target.on_call("launch", self._target)
        assert len(self._in_flight) < 2, "a third round is launched before the first is collected"
        assert active_slots and len(set(active_slots)) == len(active_slots)
        lanes = [self._slots[number] for number in active_slots if self._slots[number].alive]
        if self._drafter is not None and lanes:
            self._draft(self._drafter, lanes, num_draft_tokens)
        results = self._verify(lanes) if lanes else []
        numbers = [number for number in active_slots if self._slots[number].alive]
        self._in_flight.append(dict(zip(numbers, results, strict=True)))
        for lane, result in zip(lanes, results, strict=True):
            lane.alive = result.token_ids[-1] >= 0
            lane.token_ids.extend(token_id for token_id in result.token_ids if token_id >= 0)
        self.launched += 1

    def collect(self) -> dict[int, DecodeResult]:
        results = self._in_flight.popleft()
        self._target.on_call("collect", self._target)
        self.collected += 1
        return results

    def _draft(self, drafter: TwinForward, slots: Sequence[_Slot], num_draft: int) -> None:
        """The last two tokens are computed again; then one guess a pass."""
        chunks = []
        for lane in slots:
            lane.draft_ids, lane.logprobs = [], []
            known = [token_id if token_id < drafter.vocab_size else 0 for token_id in lane.token_ids[-2:]]
            chunks.append(Chunk(known, len(lane.token_ids) - len(known), lane.draft_blocks, 1))
        for _ in range(num_draft):
            logits = drafter.logits(chunks, self._block_size)
            rows = [SampleRow(lane.state, tuple(lane.draft_ids)) for lane in slots]
            guessed = self._draft_sampler(logits, rows, logprobs=False).token_ids
            scores = torch.log_softmax(logits.double(), 1)
            for number, (lane, token_id) in enumerate(zip(slots, guessed, strict=True)):
                lane.draft_ids.append(max(token_id, 0))
                lane.logprobs.append(min(float(scores[number, max(token_id, 0)]), 0.0))
            chunks = [
                Chunk(
                    lane.draft_ids[-1:], len(lane.token_ids) + len(lane.draft_ids) - 1, lane.draft_blocks, 1
                )
                for lane in slots
            ]

    def _verify(self, slots: Sequence[_Slot]) -> list[DecodeResult]:
        chunks = [
            Chunk(
                [lane.token_ids[-1], *lane.draft_ids],
                len(lane.token_ids) - 1,
                lane.blocks,
                1 + len(lane.draft_ids),
            )
            for lane in slots
        ]
        logits = self._target.logits(chunks, self._block_size)
        rows = [
            SampleRow(lane.state, tuple(lane.draft_ids[:n]))
            for lane in slots
            for n in range(len(lane.draft_ids) + 1)
        ]
        sampled = self._sampler(logits, rows)
        results, line = [], 0
        for lane in slots:
            end = line + len(lane.draft_ids) + 1
            run = sampled.token_ids[line:end]
            size = verify(run, lane.draft_ids) + 1
            hashes = tuple(sampled.logits_hashes[line : line + size])
            results.append(
                DecodeResult(tuple(run[:size]), tuple(lane.draft_ids), tuple(lane.logprobs), hashes)
            )
            line = end
        return results


def _state(lane: DecodeSlot) -> RequestState:
    """A request that samples alike, and has as many tokens."""
    how: Any = lane.sampling
    params = SamplingParams(
        temperature=0.0 if how.greedy else how.temperature,
        top_k=max(how.top_k, 0),
        top_p=how.top_p,
        min_p=how.min_p,
    )
    known = (0,) * (lane.num_tokens - len(lane.last_token_ids)) + lane.last_token_ids
    return RequestState(Request("lane", known, params, how.seed), 0, FAR_LENGTH)
