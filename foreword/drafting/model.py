"""A smaller model with the same tokenizer guesses by running ahead."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foreword.cache.blocks import BlockPool
from foreword.cache.storage import KVStorage
from foreword.core.batch import Chunk, build_batch
from foreword.core.draft import Draft
from foreword.core.request import RequestState
from foreword.core.rows import SampleRow
from foreword.drafting.base import Ask
from foreword.models.base import Model
from foreword.sampling.sampler import Sampler

__all__ = ["ModelDrafter"]


@dataclass(slots=True)
class _Track:
    """What the draft model has computed of one request.

    computed  tokens whose KV is in its cache; those from `checked` on were guesses at that time
    """

    computed: list[int] = field(default_factory=list)
    checked: int = 0
    blocks: list[int] = field(default_factory=list)

    def keep_common(self, ask: Ask) -> None:
        """Forget guesses that were rejected, and always the last known token: its row yields the first guess."""
        common = min(self.checked, len(self.computed))
        for ours, theirs in zip(self.computed[common:], ask.tokens_from(common), strict=False):
            if ours != theirs:
                break
            common += 1
        self.checked = min(common, ask.length - 1)
        del self.computed[self.checked :]


@dataclass(slots=True)
class _Run:
    """One request in one propose(): its guess as it grows, and the tokens to compute next."""

    ask: Ask
    track: _Track
    pending: list[int]
    guess: list[int] = field(default_factory=list)


class ModelDrafter:
    """Runs the draft model for all asking requests at once, one more token each a pass.

    It samples with the target's sampler, parameters and noise, so that it agrees as often as the
    two distributions allow. Its KV lives in blocks of its own; when they run out, the request that
    drafted longest ago loses them and is caught up later. Positions beyond its own context get no draft.

    max_rows  rows of one pass; a longer backlog (a new prompt) is caught up over several steps
    """

    name = "draft"

    def __init__(
        self, model: Model, kv: KVStorage, sampler: Sampler, pool: BlockPool, block_size: int, max_rows: int, max_len: int
    ) -> None:
        self._model = model
        self._kv = kv
        self._logits = model.compiled(kv)
        self._sampler = sampler
        self._pool = pool
        self._block_size = block_size
        self._max_rows = max_rows
        self._max_len = max_len
        self._tracks: dict[str, _Track] = {}

    def start(self, state: RequestState) -> None:
        self._tracks[state.id] = _Track()

    def finish(self, request_id: str) -> None:
        track = self._tracks.pop(request_id, None)
        if track is not None:
            self._pool.release(track.blocks)

    def check(self, live: Container[str]) -> None:
        assert all(request_id in live for request_id in self._tracks)
        self._pool.check(track.blocks for track in self._tracks.values())

    def propose(self, asks: Sequence[Ask]) -> list[Draft | None]:
        runs = [self._run(ask) for ask in asks]
        active = self._catch_up([run for run in runs if run is not None])
        while active:
            active = [run for run in active if len(run.guess) < run.ask.max_tokens and self._room(run)]
            if active:
                self._pass(active, [1] * len(active))
        return [Draft(tuple(run.guess), self.name) if run and run.guess else None for run in runs]

    def _run(self, ask: Ask) -> _Run | None:
        """What there is to compute for an ask; None beyond this model's context."""
        if ask.length >= self._max_len:
            return None
        track = self._tracks.pop(ask.state.id)
        self._tracks[ask.state.id] = track  # most recently used last
        track.keep_common(ask)
        return _Run(ask, track, ask.tokens_from(len(track.computed)))

    def _catch_up(self, runs: list[_Run]) -> list[_Run]:
        """Compute known tokens, within max_rows; return the runs that have their first guess."""
        budget = self._max_rows
        chosen: list[_Run] = []
        sizes: list[int] = []
        keep = {run.ask.state.id for run in runs}
        for run in sorted(runs, key=lambda r: len(r.pending)):
            size = min(len(run.pending), budget)
            if size and self._reserve(run.track, len(run.track.computed) + size, keep):
                chosen.append(run)
                sizes.append(size)
                budget -= size
        if chosen:
            self._pass(chosen, sizes)
        return [run for run in chosen if run.guess]

    def _room(self, run: _Run) -> bool:
        """Whether one more token can be computed: within the context, with a slot for it."""
        end = len(run.track.computed) + 1
        return end < self._max_len and self._reserve(run.track, end, keep=None)

    def _pass(self, runs: list[_Run], sizes: list[int]) -> None:
        """One forward pass over the next sizes[i] pending tokens of each run; sample where none is left."""
        chunks: list[Chunk] = []
        rows: list[SampleRow] = []
        for run, size in zip(runs, sizes, strict=True):
            last = size == len(run.pending)
            chunks.append(Chunk(run.pending[:size], len(run.track.computed), run.track.blocks, int(last)))
            if last:
                rows.append(SampleRow(run.ask.state, (*run.ask.run, *run.guess)))
        logits = self._forward(chunks)
        sampled = iter(self._sampler(logits, rows, logprobs=False).token_ids if rows else ())
        for run, size in zip(runs, sizes, strict=True):
            run.track.computed += run.pending[:size]
            del run.pending[:size]
            if not run.pending:
                _extend(run, next(sampled))

    def _forward(self, chunks: list[Chunk]) -> Tensor:
        batch = build_batch(chunks, self._block_size, self._model.ops.row_tile, self._kv.device)
        with torch.inference_mode():
            return self._logits(batch)

    def _reserve(self, track: _Track, num_tokens: int, keep: set[str] | None) -> bool:
        """Hold blocks for `num_tokens`, taking them from requests that do not draft now; `keep` None takes from nobody."""
        missing = -(-num_tokens // self._block_size) - len(track.blocks)
        while missing > self._pool.num_free and keep is not None:
            victim = next((t for id_, t in self._tracks.items() if t.blocks and id_ not in keep), None)
            if victim is None:
                break
            self._pool.release(victim.blocks)
            victim.blocks.clear()
            victim.computed.clear()
        if missing > self._pool.num_free:
            return False
        track.blocks += [self._pool.allocate() for _ in range(missing)]
        return True


def _extend(run: _Run, token_id: int) -> None:
    """Add a guess; a row without a legal token ends the draft instead."""
    if token_id < 0:
        run.ask = Ask(run.ask.state, run.ask.run, max_tokens=len(run.guess))
        return
    run.guess.append(token_id)
    run.pending.append(token_id)
