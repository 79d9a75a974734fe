"""A smaller model with the same tokenizer guesses by running ahead.

What a draft model has computed of one request.

A draft, pass by pass: what a DraftLoop does in one call, for backends and requests that have none.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from foreword.core.batch import NULL_BLOCK, Batch, Chunk, SampleRow, build_batch
from foreword.core.images import MRopePositions
from foreword.core.outputs import Draft
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.executor.decode_loop import SupportsDecodeLoop
from foreword.kernels.ops import DraftJob, DraftLoop, DraftSamplingParams, DraftTokens, Ops
from foreword.kv_cache.block_pool import BlockPool
from foreword.kv_cache.storage import KVStorage
from foreword.models.base import Model
from foreword.sampling.logits_processors import draft_sampling_params, only_filters
from foreword.sampling.sampler import Sampler
from foreword.speculation.base import DraftRequest

__all__ = ["NO_IMAGES", "ChunkImages", "DraftState", "EagerDraftLoop", "ImageFeatureSource", "ModelDrafter"]


@dataclass(slots=True)
class DraftState:
    """The KV cache holds what lies between origin and the end of `guessed`, at positions counted from origin.

    |<-- not read -->|<-------- computed -------->|<-- guessed -->|     indices in the text
                     origin                       known
    |<---------------------- the text --------------------->|
                                                         length

    The text is what the model reads: all tokens of the request, or, for a model that sees nothing, all but those of pictures.

    skipped   tokens of pictures that are left out of the text
    prompt    without them; empty: nothing was left out
    sights    index behind the last picture that the model is shown; 0: none
    places    where its tokens stand if it is shown any and reads from the beginning, for models that know several directions
    asked     somebody wanted a guess
    served    number of the last propose() that computed something of it
    guessed   what was guessed and computed beyond the known tokens, not yet compared with the text
    blocks    block ids that hold its KV, in order of position
    sampling  seed, temperature and filters of the request
    plain     it asked for no other step of the pipeline
    """

    sampling: DraftSamplingParams
    is_simple: bool
    num_skipped_image_tokens: int = 0
    text_prompt_ids: Sequence[int] = ()
    last_image_end: int = 0
    mrope_positions: MRopePositions | None = None
    was_requested: bool = False
    length: int = 0
    window_start: int = 0
    num_computed: int = 0
    last_used: int = 0
    draft_ids: tuple[int, ...] = ()
    block_table: array[int] = field(default_factory=lambda: array("q"))

    @classmethod
    def from_state(cls, state: RequestState, vocab_size: int, is_multimodal: bool = False) -> DraftState:
        """Of a request that begins, for a model with logits of this width that sees pictures or not."""
        sampling, plain = draft_sampling_params(state.request, vocab_size), only_filters(state.request)
        pictures = state.request.images
        if is_multimodal or not pictures:
            return cls(
                sampling,
                plain,
                last_image_end=pictures[-1].end if pictures else 0,
                mrope_positions=state.mrope_positions,
            )
        prompt = _text_only_prompt(state.request)
        return cls(sampling, plain, state.num_prompt - len(prompt), prompt)

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens that are not computed."""
        return self.length - self.num_computed

    def tokens_from(self, request: DraftRequest, index: int) -> Sequence[int]:
        """The text from an index on."""
        if index >= len(self.text_prompt_ids):
            return request.tokens_from(index + self.num_skipped_image_tokens)
        return [
            *self.text_prompt_ids[index:],
            *request.tokens_from(len(self.text_prompt_ids) + self.num_skipped_image_tokens),
        ]

    def sync(self, request: DraftRequest) -> None:
        """Keep the guesses that came true, and never the last known token: its row yields the first guess."""
        self.length = request.num_tokens - self.num_skipped_image_tokens
        if self.draft_ids:
            for guess, token_id in zip(
                self.draft_ids, self.tokens_from(request, self.num_computed), strict=False
            ):
                if guess != token_id:
                    break
                self.num_computed += 1
            self.draft_ids = ()
        self.num_computed = max(
            min(self.num_computed, self.length - 1), self.window_start
        )  # there may be no text but pictures

    def reset_at(self, window_start: int) -> None:
        """Forget what was computed and the blocks, which the caller has released; the text is read from `origin` on."""
        if window_start > self.window_start:
            self.mrope_positions = None
        self.window_start = self.num_computed = window_start
        self.draft_ids = ()
        del self.block_table[:]


def _text_only_prompt(request: Request) -> tuple[int, ...]:
    """The prompt as it is read by a model that sees nothing."""
    ends = (0, *(picture.end for picture in request.images))
    starts = (*(picture.start for picture in request.images), len(request.prompt_ids))
    return tuple(
        token_id
        for end, start in zip(ends, starts, strict=True)
        for token_id in request.prompt_ids[end:start]
    )


@dataclass(frozen=True, slots=True)
class ChunkImages:
    """What a chunk knows of pictures; the fields are those of Chunk."""

    positions: MRopePositions | None = None
    features: Sequence[tuple[int, Tensor]] = ()


NO_IMAGES = ChunkImages()


@dataclass(slots=True)
class _DraftProgress:
    """One lane while it drafts.

    pending   tokens that it computes next, from position `start` on
    features  of pictures among these
    total     sum of the log-probabilities
    """

    request: DraftRequest
    job: DraftJob
    positions: MRopePositions | None
    features: Sequence[tuple[int, Tensor]]
    pending_ids: Sequence[int]
    start: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    total_logprob: float = 0.0
    is_done: bool = False

    @property
    def row(self) -> SampleRow:
        return SampleRow(self.request.state, tuple(self.token_ids))

    def append(self, token_id: int, logprob: float) -> None:
        """Add a guess; a row without a legal token (-1) ends the draft instead."""
        self.start += len(self.pending_ids)
        self.pending_ids, self.features = [token_id], ()
        self.is_done = token_id < 0
        if self.is_done:
            return
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.total_logprob += logprob
        self.is_done = (
            len(self.token_ids) == self.job.max_tokens or self.total_logprob < self.job.min_logprob_sum
        )


class EagerDraftLoop:
    """One forward pass and one call of the sampler for each guess of all lanes.

    directions  the model knows positions in several directions
    """

    def __init__(
        self,
        forward: Callable[[Batch], Tensor],
        ops: Ops,
        sampler: Sampler,
        block_size: int,
        device: str,
        mrope: bool = False,
    ) -> None:
        self._forward = forward
        self._ops = ops
        self._sampler = sampler
        self._block_size = block_size
        self._device = device
        self._mrope = mrope

    def draft(
        self,
        requests: Sequence[DraftRequest],
        jobs: Sequence[DraftJob],
        images: Sequence[ChunkImages] | None = None,
    ) -> list[DraftTokens]:
        """One guess for each lane, which is that of the ask with its number; `shown` for each lane, None: nothing."""
        everyone = [
            _DraftProgress(ask, lane, one.positions, one.features, lane.token_ids, lane.start_position)
            for ask, lane, one in zip(requests, jobs, images or [NO_IMAGES] * len(jobs), strict=True)
        ]
        self._run_pass(everyone)
        active = [one for one in everyone if one.job.max_tokens]
        while active := [one for one in active if not one.is_done]:
            self._run_pass(active)
        return [DraftTokens(tuple(one.token_ids), tuple(one.logprobs)) for one in everyone]

    def _run_pass(self, drafts: Sequence[_DraftProgress]) -> None:
        """Compute what is pending, and sample the rows of those that want a guess."""
        sampled = [one for one in drafts if one.job.max_tokens]
        chunks = [
            Chunk(
                one.pending_ids,
                one.start,
                one.job.block_table,
                int(one.job.max_tokens > 0),
                one.positions,
                one.features,
            )
            for one in drafts
        ]
        logits = self._forward(
            build_batch(chunks, self._block_size, self._ops.row_tile, self._device, self._mrope)
        )
        if not sampled:
            return
        token_ids = self._sampler(logits, [one.row for one in sampled], logprobs=False).token_ids
        for one, token_id, logprob in zip(sampled, token_ids, self._logprobs(logits, token_ids), strict=True):
            one.append(token_id, logprob)

    def _logprobs(self, logits: Tensor, token_ids: Sequence[int]) -> list[float]:
        """Of one id a row (any id where it is -1), in the distribution that it was sampled from."""
        chosen = torch.tensor(token_ids, dtype=torch.int64, device=logits.device).clamp(min=0)[:, None]
        own = logits.gather(1, chosen)[:, 0].double()
        logprobs: list[float] = (own - self._ops.log_sum_exp(logits).double()).tolist()
        return logprobs


MAX_WINDOW = 4096  # tokens; what lies further back costs more to read than it tells of the next token
TIMED_DRAFT_LEN = 4
RECOMPUTED_TOKENS = (
    2  # known tokens that a round begins with: behind a draft that came true as a whole both have no KV
)


class ImageFeatureSource(Protocol):
    """What the draft model's own tower has seen of the pictures of requests."""

    def remaining_cost(self, state: RequestState, start: int) -> int:
        """Multiply-adds until all is seen behind its first `start` tokens."""

    def computable_until(self, state: RequestState, start: int) -> int:
        """How many of its tokens can be computed before a picture is needed, once those before `start` are."""

    def features(self, state: RequestState, start: int, end: int) -> Sequence[tuple[int, Tensor]]:
        """What stands for tokens [start, end) of a request: (index of the first behind `start`, [rows, width])."""


@dataclass(slots=True)
class _PendingDraft:
    """The part of one ask in one propose(). `shown`: of pictures among its known tokens, or before them."""

    index: int
    request: DraftRequest
    draft_state: DraftState
    job: DraftJob
    images: ChunkImages = NO_IMAGES

    @property
    def can_use_loop(self) -> bool:
        """The loop can sample for it, and knows where its tokens stand."""
        return (
            self.draft_state.is_simple
            and self.job.start_position >= self.draft_state.last_image_end - self.draft_state.window_start
        )


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
        self.forward = forward = model.compile_logits(kv)
        self._draft_loop = forward if isinstance(forward, DraftLoop) else None
        self.decode_loop_forward = (
            forward if model.vision_encoder is None and isinstance(forward, SupportsDecodeLoop) else None
        )
        self._mrope = model.uses_mrope
        self._eager_loop = EagerDraftLoop(
            forward, model.ops, sampler, block_size, kv.device, model.uses_mrope
        )
        self._image_source: ImageFeatureSource | None = None
        self._macs_per_row = 1
        self.model = model
        self._never_sampled_ids = sampler.never_sampled_ids
        self._vocab_size = model.vocab_size
        self._pool = pool
        self._block_size = block_size
        self._max_rows = max_rows
        self._window = min(max_len, MAX_WINDOW)
        self._states: dict[str, DraftState] = {}
        self._num_proposals = 0

    def set_image_source(self, source: ImageFeatureSource, macs_per_row: int) -> None:
        """The pictures of requests that begin from now on are shown to the model.

        row_cost  multiply-adds of its tower that take as long as one of its rows
        """
        self._image_source, self._macs_per_row = source, max(macs_per_row, 1)

    def start(self, state: RequestState) -> None:
        self._states[state.id] = DraftState.from_state(
            state, self._vocab_size, self._image_source is not None
        )

    def finish(self, request_id: str, output: Sequence[int] = ()) -> None:
        track = self._states.pop(request_id, None)
        if track is not None:
            self._pool.release(track.block_table)

    def check(self, live: Container[str]) -> None:
        assert all(request_id in live for request_id in self._states)
        self._pool.check(track.block_table for track in self._states.values())

    def num_pending_rows(self, request: DraftRequest) -> int:
        track = self._sync(request)
        unseen = (
            0
            if self._image_source is None or track.num_computed >= track.last_image_end
            else self._image_source.remaining_cost(request.state, track.num_computed)
        )
        if track.was_requested and self._num_computable(request, track) < track.num_pending_tokens:
            return 0
        return max(track.num_pending_tokens + unseen // self._macs_per_row, 1)

    def num_computed(self, state: RequestState) -> int:
        """How many tokens of a request need not be shown: those that are computed, or all of one that nobody asks about."""
        track = self._states.get(state.id)
        return track.num_computed if track is not None and track.was_requested else len(state.tokens)

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        drafts: list[Draft | None] = [None] * len(requests)
        for run, guess in self._draft(self._schedule(requests)):
            run.draft_state.num_computed += len(run.job.token_ids)
            run.draft_state.draft_ids = guess.token_ids[:-1]
            if guess.token_ids:
                drafts[run.index] = Draft(guess.token_ids, self.name, tuple(map(math.exp, guess.logprobs)))
        return drafts

    def acquire_device(self, states: Sequence[RequestState], num_tokens: int) -> bool:
        tracks = [self._sync(DraftRequest(state)) for state in states]
        return all(self._can_run_on_device(track) for track in tracks) and self.reserve_device(
            states, num_tokens
        )

    def reserve_device(self, states: Sequence[RequestState], num_tokens: int) -> bool:
        needs = [(self._states[state.id], len(state.tokens) + num_tokens) for state in states]
        if any(length > self._window for _, length in needs):
            return False
        missing = [max(self._num_missing_blocks(track, length), 0) for track, length in needs]
        if sum(missing) > self._pool.num_free:
            return False
        for (track, _), count in zip(needs, missing, strict=True):
            self._allocate(track, count)
        return True

    def device_blocks(self, state: RequestState) -> Sequence[int]:
        return self._states[state.id].block_table

    def release_device(self, state: RequestState, num_computed: int) -> None:
        track = self._states[state.id]
        track.length, track.num_computed, track.draft_ids = len(state.tokens), num_computed, ()

    def _can_run_on_device(self, draft_state: DraftState) -> bool:
        """It is read from its beginning, as the target reads it, and all is computed that a round does not compute again."""
        return (
            not (
                draft_state.window_start or draft_state.num_skipped_image_tokens or draft_state.last_image_end
            )
            and draft_state.num_pending_tokens <= RECOMPUTED_TOKENS
        )

    def pass_seconds(self, num_rows: int, num_sampled: int) -> float:
        """Where every row is sampled it is one of several passes, as in a draft of several tokens."""
        tokens = min(TIMED_DRAFT_LEN, self._window) if num_rows == num_sampled else 1
        runs = self._dummy_drafts(num_rows, num_sampled, tokens)
        with torch.inference_mode():
            started = time.perf_counter()
            lengths = [len(guess.token_ids) for _, guess in self._draft(runs)]
            seconds = time.perf_counter() - started
        return seconds / max(*lengths, 1)  # a broken model may end its drafts early, or say nothing

    def _draft(self, pending: Sequence[_PendingDraft]) -> Iterator[tuple[_PendingDraft, DraftTokens]]:
        """One call for the requests that it can sample for; the others pass by pass."""
        loop = self._draft_loop
        inside = [run for run in pending if run.can_use_loop] if loop is not None else []
        if loop is not None and inside:
            yield from zip(
                inside,
                loop.draft([run.job for run in inside], self._block_size, self._never_sampled_ids),
                strict=True,
            )
        outside = [run for run in pending if loop is None or not run.can_use_loop]
        if outside:
            lanes, shown = [run.job for run in outside], [run.images for run in outside]
            yield from zip(
                outside, self._eager_loop.draft([run.request for run in outside], lanes, shown), strict=True
            )

    def _schedule(self, requests: Sequence[DraftRequest]) -> list[_PendingDraft]:
        """Who is computed now, and how far: within max_rows and the memory, the shortest backlogs first."""
        self._num_proposals += 1
        tracks = [self._sync(ask) for ask in requests]
        budget = self._max_rows
        sizes: dict[int, int] = {}
        for number in sorted(range(len(requests)), key=lambda number: tracks[number].num_pending_tokens):
            track = tracks[number]
            track.was_requested = True
            size = min(self._num_computable(requests[number], track), budget)
            if size and self._reserve(track, track.num_computed + size - track.window_start):
                track.last_used = self._num_proposals
                sizes[number] = size
                budget -= size
        return [self._make_pending(n, requests[n], tracks[n], size) for n, size in sizes.items()]

    def _num_computable(self, request: DraftRequest, draft_state: DraftState) -> int:
        """Known tokens that could be computed now."""
        if self._image_source is None or draft_state.num_computed >= draft_state.last_image_end:
            return draft_state.num_pending_tokens
        return (
            self._image_source.computable_until(request.state, draft_state.num_computed)
            - draft_state.num_computed
        )

    def _make_pending(
        self, index: int, request: DraftRequest, draft_state: DraftState, num_tokens: int
    ) -> _PendingDraft:
        """The next `size` known tokens, and what there is to see of them."""
        lane = self._make_job(request, draft_state, num_tokens)
        if self._image_source is None or draft_state.num_computed >= draft_state.last_image_end:
            return _PendingDraft(index, request, draft_state, lane, ChunkImages(draft_state.mrope_positions))
        features = self._image_source.features(
            request.state, draft_state.num_computed, draft_state.num_computed + num_tokens
        )
        return _PendingDraft(
            index, request, draft_state, lane, ChunkImages(draft_state.mrope_positions, features)
        )

    def _make_job(self, request: DraftRequest, draft_state: DraftState, num_tokens: int) -> DraftJob:
        """The next `size` known tokens; guesses if these are all."""
        token_ids = draft_state.tokens_from(request, draft_state.num_computed)[:num_tokens]
        if max(token_ids) >= self._vocab_size:  # a row of the target that stands for no token
            token_ids = [token_id if token_id < self._vocab_size else 0 for token_id in token_ids]
        return DraftJob(
            token_ids=token_ids,
            start_position=draft_state.num_computed - draft_state.window_start,
            block_table=draft_state.block_table,
            first_draft_index=request.num_tokens,
            max_tokens=self._max_draft_len(draft_state, request.max_tokens)
            if num_tokens == draft_state.num_pending_tokens
            else 0,
            min_logprob_sum=math.log(request.min_prob) if request.min_prob > 0 else -math.inf,
            sampling=draft_state.sampling,
            mrope_offset=draft_state.mrope_positions.offset
            if self._mrope and draft_state.mrope_positions is not None
            else 0,
        )

    def _max_draft_len(self, draft_state: DraftState, max_tokens: int) -> int:
        """Guesses that can be made: all but the last lie in the window and have a slot."""
        length = draft_state.length - draft_state.window_start
        wanted = min(max_tokens, self._window - length + 1)
        missing = self._num_missing_blocks(draft_state, length + wanted - 1)
        if missing > 0:
            self._allocate(draft_state, min(missing, self._pool.num_free))
            wanted = min(wanted, len(draft_state.block_table) * self._block_size - length + 1)
        return wanted

    def _sync(self, request: DraftRequest) -> DraftState:
        """What is computed for an ask; nothing if the request has outgrown the window."""
        track = self._states[request.state.id]
        track.sync(request)
        if track.length - track.window_start > self._window:
            self._evict(track, max(track.length - max(self._window // 2, 1), track.last_image_end))
        return track

    def _reserve(self, draft_state: DraftState, length: int) -> bool:
        """Hold blocks for `length` tokens, taking them from those whose turn was the longest ago."""
        missing = self._num_missing_blocks(draft_state, length)
        while missing > self._pool.num_free:
            others = [
                t
                for t in self._states.values()
                if t.block_table and t.last_used < self._num_proposals and t is not draft_state
            ]
            if not others:
                return False
            victim = min(others, key=lambda t: (t.last_used, -t.num_pending_tokens))
            self._evict(victim, victim.window_start)
        self._allocate(draft_state, missing)
        return True

    def _num_missing_blocks(self, draft_state: DraftState, length: int) -> int:
        """Blocks for `length` tokens that are not there, negative if there are more."""
        return -(-length // self._block_size) - len(draft_state.block_table)

    def _allocate(self, draft_state: DraftState, num_blocks: int) -> None:
        for _ in range(num_blocks):
            draft_state.block_table.append(self._pool.allocate())

    def _evict(self, draft_state: DraftState, window_start: int) -> None:
        """Nothing of it is computed any more; it is read from `origin` on."""
        self._pool.release(draft_state.block_table)
        draft_state.reset_at(window_start)

    def _dummy_drafts(self, num_rows: int, num_sampled: int, draft_len: int) -> list[_PendingDraft]:
        """Of `rows` known tokens and `sampled` drafts, shared by requests that fit the window, on the scratch block."""
        state = RequestState(Request("", (0,), SamplingParams(), seed=0), 0, self._window)
        track = DraftState.from_state(state, self._vocab_size)
        count = max(num_sampled, -(-num_rows // (self._window - draft_len + 1)))
        blocks = [NULL_BLOCK] * -(-self._window // self._block_size)
        lanes = [
            DraftJob(
                [0] * len(range(n, num_rows, count)),
                0,
                blocks,
                1,
                draft_len if n < num_sampled else 0,
                -math.inf,
                track.sampling,
            )
            for n in range(count)
        ]
        return [_PendingDraft(n, DraftRequest(state), track, lane) for n, lane in enumerate(lanes)]
