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

from foreword.core.batch import Batch, Chunk, build_batch
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.core.rows import SampleRow
from foreword.drafting.model import ModelDrafter
from foreword.engine.ahead import Ahead, ahead_of
from foreword.engine.engine import Engine
from foreword.kernels.ops import Ops
from foreword.kernels.rounds import RoundLane, RoundResult, RunsAhead
from foreword.sampling.sampler import Sampler
from foreword.sampling.verify import verify

__all__ = ["Twin", "TwinRounds", "run_ahead"]

FAR = 1 << 20


def run_ahead(engine: Engine, strike: Callable[[str, Twin], None] = lambda verb, twin: None) -> Ahead:
    """Let an engine run ahead by twins of its models. `strike` is called with each verb before it is done."""
    runner, drafting = engine.runner, engine.drafting
    twin = Twin(runner._logits, runner.sampler._ops, runner.vocab_size, engine.info.resolved.max_model_len, strike)
    runner._logits = twin
    for drafter in drafting.passes:
        if isinstance(drafter, ModelDrafter):
            own = Twin(drafter._passes._forward, drafter.model.ops, drafter.model.vocab_size, drafter._window, strike)
            drafter.ahead = own
            drafting.lender = drafter
    ahead = ahead_of(runner, engine.scheduler, drafting, engine.stages, engine.info.resolved)
    assert ahead is not None
    engine.ahead = ahead
    return ahead


class Twin:
    """A forward pass that RunsAhead. made: rounds by the drafter that they were made with; as of a device, they are kept."""

    def __init__(
        self, forward: Callable[[Batch], Tensor], ops: Ops, vocab_size: int, max_len: int, strike: Callable[[str, Twin], None]
    ) -> None:
        self.max_len = max_len
        self.forward = forward
        self.ops = ops
        self.vocab_size = vocab_size
        self.strike = strike
        self.made: dict[int | None, TwinRounds] = {}

    def __call__(self, batch: Batch) -> Tensor:
        return self.forward(batch)

    def rounds(self, block_size: int, unused: Tensor, drafter: RunsAhead | None = None, hashed: bool = False) -> TwinRounds:
        assert drafter is None or isinstance(drafter, Twin)
        key = None if drafter is None else id(drafter)
        if key not in self.made:
            self.made[key] = TwinRounds(self, drafter, block_size, unused, hashed)
        return self.made[key]

    @torch.inference_mode()
    def logits(self, chunks: Sequence[Chunk], block_size: int) -> Tensor:
        """Of the sampled rows [R, V]"""
        assert all(chunk.start + len(chunk.token_ids) <= self.max_len for chunk in chunks), "beyond what the model can read"
        return self.forward(build_batch(chunks, block_size, self.ops.row_tile, "cpu")).clone()


@dataclass(slots=True)
class _Lane:
    state: RequestState
    blocks: Sequence[int]
    draft_blocks: Sequence[int]
    alive: bool = True
    guesses: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def known(self) -> list[int]:
        return self.state.tokens


class TwinRounds:
    """See kernels/rounds.py. launched, collected: how many rounds so far."""

    def __init__(self, target: Twin, drafter: Twin | None, block_size: int, unused: Tensor, hashed: bool) -> None:
        self._target = target
        self._drafter = drafter
        self._block_size = block_size
        self._sampler = Sampler(target.ops, target.vocab_size, unused.tolist(), hashed)
        if drafter is not None:
            mine = [i for i in unused.tolist() if i < drafter.vocab_size]
            mine += range(target.vocab_size, drafter.vocab_size)
            self._guesser = Sampler(drafter.ops, drafter.vocab_size, mine)
        self._lanes: list[_Lane] = []
        self._under_way: deque[dict[int, RoundResult]] = deque()
        self.launched = self.collected = 0

    def begin(self, lanes: Sequence[RoundLane]) -> None:
        self._target.strike("begin", self._target)
        assert not self._under_way, "a run begins while a round is under way"
        self._lanes = [_Lane(_state(lane), tuple(lane.blocks), tuple(lane.draft_blocks)) for lane in lanes]

    def grow(self, lane: int, blocks: Sequence[int], draft_blocks: Sequence[int] = ()) -> None:
        one = self._lanes[lane]
        assert tuple(blocks[: len(one.blocks)]) == one.blocks, "a block table only grows"
        assert tuple(draft_blocks[: len(one.draft_blocks)]) == one.draft_blocks
        one.blocks, one.draft_blocks = tuple(blocks), tuple(draft_blocks)

    @torch.inference_mode()
    def launch(self, active: Sequence[int], num_draft: int) -> None:
        self._target.strike("launch", self._target)
        assert len(self._under_way) < 2, "a third round is launched before the first is collected"
        assert active and len(set(active)) == len(active)
        lanes = [self._lanes[number] for number in active if self._lanes[number].alive]
        if self._drafter is not None and lanes:
            self._guess(self._drafter, lanes, num_draft)
        results = self._verify(lanes) if lanes else []
        numbers = [number for number in active if self._lanes[number].alive]
        self._under_way.append(dict(zip(numbers, results, strict=True)))
        for lane, result in zip(lanes, results, strict=True):
            lane.alive = result.token_ids[-1] >= 0
            lane.known.extend(token_id for token_id in result.token_ids if token_id >= 0)
        self.launched += 1

    def collect(self) -> dict[int, RoundResult]:
        results = self._under_way.popleft()
        self._target.strike("collect", self._target)
        self.collected += 1
        return results

    def _guess(self, drafter: Twin, lanes: Sequence[_Lane], num_draft: int) -> None:
        """The last two tokens are computed again; then one guess a pass."""
        chunks = []
        for lane in lanes:
            lane.guesses, lane.logprobs = [], []
            known = [token_id if token_id < drafter.vocab_size else 0 for token_id in lane.known[-2:]]
            chunks.append(Chunk(known, len(lane.known) - len(known), lane.draft_blocks, 1))
        for _ in range(num_draft):
            logits = drafter.logits(chunks, self._block_size)
            rows = [SampleRow(lane.state, tuple(lane.guesses)) for lane in lanes]
            guessed = self._guesser(logits, rows, logprobs=False).token_ids
            scores = torch.log_softmax(logits.double(), 1)
            for number, (lane, token_id) in enumerate(zip(lanes, guessed, strict=True)):
                lane.guesses.append(max(token_id, 0))
                lane.logprobs.append(min(float(scores[number, max(token_id, 0)]), 0.0))
            chunks = [Chunk(lane.guesses[-1:], len(lane.known) + len(lane.guesses) - 1, lane.draft_blocks, 1) for lane in lanes]

    def _verify(self, lanes: Sequence[_Lane]) -> list[RoundResult]:
        chunks = [
            Chunk([lane.known[-1], *lane.guesses], len(lane.known) - 1, lane.blocks, 1 + len(lane.guesses)) for lane in lanes
        ]
        logits = self._target.logits(chunks, self._block_size)
        rows = [SampleRow(lane.state, tuple(lane.guesses[:n])) for lane in lanes for n in range(len(lane.guesses) + 1)]
        sampled = self._sampler(logits, rows)
        results, line = [], 0
        for lane in lanes:
            end = line + len(lane.guesses) + 1
            run = sampled.token_ids[line:end]
            size = verify(run, lane.guesses) + 1
            hashes = tuple(sampled.hashes[line : line + size])
            results.append(RoundResult(tuple(run[:size]), tuple(lane.guesses), tuple(lane.logprobs), hashes))
            line = end
        return results


def _state(lane: RoundLane) -> RequestState:
    """A request that samples alike, and has as many tokens."""
    how: Any = lane.sampling
    params = SamplingParams(
        temperature=0.0 if how.greedy else how.temperature, top_k=max(how.top_k, 0), top_p=how.top_p, min_p=how.min_p
    )
    known = (0,) * (lane.length - len(lane.token_ids)) + lane.token_ids
    return RequestState(Request("lane", known, params, how.seed), 0, FAR)
