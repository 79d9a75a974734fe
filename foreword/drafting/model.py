"""A smaller model with the same tokenizer guesses by running ahead."""

from __future__ import annotations

import math
import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from foreword.cache.blocks import BlockPool
from foreword.cache.storage import KVStorage
from foreword.core.batch import SCRATCH_BLOCK
from foreword.core.draft import Draft
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.drafting.base import Ask
from foreword.drafting.model_passes import UNSEEN, PassByPass, Shown
from foreword.drafting.model_track import Track
from foreword.kernels.ops import DraftLane, DraftLoop, Guess
from foreword.kernels.rounds import RunsAhead
from foreword.models.base import Model
from foreword.sampling.sampler import Sampler

__all__ = ["ModelDrafter", "Sight"]

MAX_WINDOW = 4096  # tokens; what lies further back costs more to read than it tells of the next token
TIMED_TOKENS = 4
COMPUTED_AGAIN = 2  # known tokens that a round begins with: behind a draft that came true as a whole both have no KV


class Sight(Protocol):
    """What the draft model's own tower has seen of the pictures of requests."""

    def cost(self, state: RequestState, start: int) -> int:
        """Multiply-adds until all is seen behind its first `start` tokens."""

    def reach(self, state: RequestState, start: int) -> int:
        """How many of its tokens can be computed before a picture is needed, once those before `start` are."""

    def features(self, state: RequestState, start: int, end: int) -> Sequence[tuple[int, Tensor]]:
        """What stands for tokens [start, end) of a request: (index of the first behind `start`, [rows, width])."""


@dataclass(slots=True)
class _Run:
    """The part of one ask in one propose(). `shown`: of pictures among its known tokens, or before them."""

    number: int
    ask: Ask
    track: Track
    lane: DraftLane
    shown: Shown = UNSEEN

    @property
    def inside(self) -> bool:
        """The loop can sample for it, and knows where its tokens stand."""
        return self.track.plain and self.lane.start >= self.track.sights - self.track.origin


class ModelDrafter:
    """Runs the draft model for all asking requests at once, one more token each a pass.

    It samples with the target's parameters and noise, so that it agrees as often as the two distributions allow.
    Its KV lives in blocks of its own; when they run out, the request whose turn was longest ago loses them and is
    caught up later. A request that outgrows the window is read again from the last half of the window on.

    A model that sees is shown the pictures of a request once it is asked about it; until its tower has seen them it says
    nothing. One that sees nothing reads the text without them. Behind the window no picture is looked at again.

    max_rows  rows of one pass; a longer backlog (a new prompt) is caught up over several steps
    max_len   positions that the model can be used for
    forward   the pass, compiled
    ahead     drafts in rounds, if the backend can; not for a model that sees, whose tokens may have other places
    """

    name = "draft"

    def __init__(
        self,
        model: Model,
        kv: KVStorage,
        sampler: Sampler,
        pool: BlockPool,
        block_size: int,
        max_rows: int,
        max_len: int,
    ) -> None:
        self.forward = forward = model.compiled(kv)
        self._loop = forward if isinstance(forward, DraftLoop) else None
        self.ahead = forward if model.tower is None and isinstance(forward, RunsAhead) else None
        self._directions = model.directions
        self._passes = PassByPass(forward, model.ops, sampler, block_size, kv.device, model.directions)
        self._sight: Sight | None = None
        self._row_cost = 1
        self.model = model
        self._unused = sampler.unused_ids
        self._vocab_size = model.vocab_size
        self._pool = pool
        self._block_size = block_size
        self._max_rows = max_rows
        self._window = min(max_len, MAX_WINDOW)
        self._tracks: dict[str, Track] = {}
        self._proposals = 0

    def see_with(self, sight: Sight, row_cost: int) -> None:
        """The pictures of requests that begin from now on are shown to the model.

        row_cost  multiply-adds of its tower that take as long as one of its rows
        """
        self._sight, self._row_cost = sight, max(row_cost, 1)

    def start(self, state: RequestState) -> None:
        self._tracks[state.id] = Track.of(state, self._vocab_size, self._sight is not None)

    def finish(self, request_id: str, output: Sequence[int] = ()) -> None:
        track = self._tracks.pop(request_id, None)
        if track is not None:
            self._pool.release(track.blocks)

    def check(self, live: Container[str]) -> None:
        assert all(request_id in live for request_id in self._tracks)
        self._pool.check(track.blocks for track in self._tracks.values())

    def backlog(self, ask: Ask) -> int:
        track = self._follow(ask)
        unseen = 0 if self._sight is None or track.known >= track.sights else self._sight.cost(ask.state, track.known)
        if track.asked and self._computable(ask, track) < track.backlog:
            return 0
        return max(track.backlog + unseen // self._row_cost, 1)

    def known(self, state: RequestState) -> int:
        """How many tokens of a request need not be shown: those that are computed, or all of one that nobody asks about."""
        track = self._tracks.get(state.id)
        return track.known if track is not None and track.asked else len(state.tokens)

    @torch.inference_mode()
    def propose(self, asks: Sequence[Ask]) -> list[Draft | None]:
        drafts: list[Draft | None] = [None] * len(asks)
        for run, guess in self._guess(self._runs(asks)):
            run.track.known += len(run.lane.token_ids)
            run.track.guessed = guess.token_ids[:-1]
            if guess.token_ids:
                drafts[run.number] = Draft(guess.token_ids, self.name, tuple(map(math.exp, guess.logprobs)))
        return drafts

    def lend(self, states: Sequence[RequestState], num_tokens: int) -> bool:
        tracks = [self._follow(Ask(state)) for state in states]
        return all(self._lendable(track) for track in tracks) and self.extend(states, num_tokens)

    def extend(self, states: Sequence[RequestState], num_tokens: int) -> bool:
        needs = [(self._tracks[state.id], len(state.tokens) + num_tokens) for state in states]
        if any(length > self._window for _, length in needs):
            return False
        missing = [max(self._missing(track, length), 0) for track, length in needs]
        if sum(missing) > self._pool.num_free:
            return False
        for (track, _), count in zip(needs, missing, strict=True):
            self._grow(track, count)
        return True

    def blocks(self, state: RequestState) -> Sequence[int]:
        return self._tracks[state.id].blocks

    def take_back(self, state: RequestState, known: int) -> None:
        track = self._tracks[state.id]
        track.length, track.known, track.guessed = len(state.tokens), known, ()

    def _lendable(self, track: Track) -> bool:
        """It is read from its beginning, as the target reads it, and all is computed that a round does not compute again."""
        return not (track.origin or track.skipped or track.sights) and track.backlog <= COMPUTED_AGAIN

    def pass_seconds(self, rows: int, sampled: int) -> float:
        """Where every row is sampled it is one of several passes, as in a draft of several tokens."""
        tokens = min(TIMED_TOKENS, self._window) if rows == sampled else 1
        runs = self._scratch_runs(rows, sampled, tokens)
        with torch.inference_mode():
            started = time.perf_counter()
            lengths = [len(guess.token_ids) for _, guess in self._guess(runs)]
            seconds = time.perf_counter() - started
        return seconds / max(*lengths, 1)  # a broken model may end its drafts early, or say nothing

    def _guess(self, runs: Sequence[_Run]) -> Iterator[tuple[_Run, Guess]]:
        """One call for the requests that it can sample for; the others pass by pass."""
        loop = self._loop
        inside = [run for run in runs if run.inside] if loop is not None else []
        if loop is not None and inside:
            yield from zip(inside, loop.draft([run.lane for run in inside], self._block_size, self._unused), strict=True)
        outside = [run for run in runs if loop is None or not run.inside]
        if outside:
            lanes, shown = [run.lane for run in outside], [run.shown for run in outside]
            yield from zip(outside, self._passes.draft([run.ask for run in outside], lanes, shown), strict=True)

    def _runs(self, asks: Sequence[Ask]) -> list[_Run]:
        """Who is computed now, and how far: within max_rows and the memory, the shortest backlogs first."""
        self._proposals += 1
        tracks = [self._follow(ask) for ask in asks]
        budget = self._max_rows
        sizes: dict[int, int] = {}
        for number in sorted(range(len(asks)), key=lambda number: tracks[number].backlog):
            track = tracks[number]
            track.asked = True
            size = min(self._computable(asks[number], track), budget)
            if size and self._reserve(track, track.known + size - track.origin):
                track.served = self._proposals
                sizes[number] = size
                budget -= size
        return [self._run(n, asks[n], tracks[n], size) for n, size in sizes.items()]

    def _computable(self, ask: Ask, track: Track) -> int:
        """Known tokens that could be computed now."""
        if self._sight is None or track.known >= track.sights:
            return track.backlog
        return self._sight.reach(ask.state, track.known) - track.known

    def _run(self, number: int, ask: Ask, track: Track, size: int) -> _Run:
        """The next `size` known tokens, and what there is to see of them."""
        lane = self._lane(ask, track, size)
        if self._sight is None or track.known >= track.sights:
            return _Run(number, ask, track, lane, Shown(track.places))
        features = self._sight.features(ask.state, track.known, track.known + size)
        return _Run(number, ask, track, lane, Shown(track.places, features))

    def _lane(self, ask: Ask, track: Track, size: int) -> DraftLane:
        """The next `size` known tokens; guesses if these are all."""
        token_ids = track.tokens_from(ask, track.known)[:size]
        if max(token_ids) >= self._vocab_size:  # a row of the target that stands for no token
            token_ids = [token_id if token_id < self._vocab_size else 0 for token_id in token_ids]
        return DraftLane(
            token_ids=token_ids,
            start=track.known - track.origin,
            blocks=track.blocks,
            first=ask.length,
            max_tokens=self._room(track, ask.max_tokens) if size == track.backlog else 0,
            floor=math.log(ask.worth) if ask.worth > 0 else -math.inf,
            sampling=track.sampling,
            shift=track.places.shift if self._directions and track.places is not None else 0,
        )

    def _room(self, track: Track, max_tokens: int) -> int:
        """Guesses that can be made: all but the last lie in the window and have a slot."""
        length = track.length - track.origin
        wanted = min(max_tokens, self._window - length + 1)
        missing = self._missing(track, length + wanted - 1)
        if missing > 0:
            self._grow(track, min(missing, self._pool.num_free))
            wanted = min(wanted, len(track.blocks) * self._block_size - length + 1)
        return wanted

    def _follow(self, ask: Ask) -> Track:
        """What is computed for an ask; nothing if the request has outgrown the window."""
        track = self._tracks[ask.state.id]
        track.follow(ask)
        if track.length - track.origin > self._window:
            self._drop(track, max(track.length - max(self._window // 2, 1), track.sights))
        return track

    def _reserve(self, track: Track, length: int) -> bool:
        """Hold blocks for `length` tokens, taking them from those whose turn was the longest ago."""
        missing = self._missing(track, length)
        while missing > self._pool.num_free:
            others = [t for t in self._tracks.values() if t.blocks and t.served < self._proposals and t is not track]
            if not others:
                return False
            victim = min(others, key=lambda t: (t.served, -t.backlog))
            self._drop(victim, victim.origin)
        self._grow(track, missing)
        return True

    def _missing(self, track: Track, length: int) -> int:
        """Blocks for `length` tokens that are not there, negative if there are more."""
        return -(-length // self._block_size) - len(track.blocks)

    def _grow(self, track: Track, count: int) -> None:
        for _ in range(count):
            track.blocks.append(self._pool.allocate())

    def _drop(self, track: Track, origin: int) -> None:
        """Nothing of it is computed any more; it is read from `origin` on."""
        self._pool.release(track.blocks)
        track.begin_at(origin)

    def _scratch_runs(self, rows: int, sampled: int, tokens: int) -> list[_Run]:
        """Of `rows` known tokens and `sampled` drafts, shared by requests that fit the window, on the scratch block."""
        state = RequestState(Request("", (0,), SamplingParams(), seed=0), 0, self._window)
        track = Track.of(state, self._vocab_size)
        count = max(sampled, -(-rows // (self._window - tokens + 1)))
        blocks = [SCRATCH_BLOCK] * -(-self._window // self._block_size)
        lanes = [
            DraftLane([0] * len(range(n, rows, count)), 0, blocks, 1, tokens if n < sampled else 0, -math.inf, track.sampling)
            for n in range(count)
        ]
        return [_Run(n, Ask(state), track, lane) for n, lane in enumerate(lanes)]
