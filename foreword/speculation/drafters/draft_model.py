"""Drafts from a smaller model with the same tokenizer and a KV cache of its own."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from foreword.core.batch import NULL_BLOCK
from foreword.core.images import MRopePositions
from foreword.core.outputs import Draft
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.cuda_graphs.decode_loop import SupportsDecodeLoop
from foreword.cuda_graphs.graph_runner import with_graphs
from foreword.kernels.ops import DraftJob, DraftLoop, DraftSamplingParams, DraftTokens
from foreword.kv_cache.block_manager import BlockManager
from foreword.kv_cache.block_pool import BlockPool
from foreword.kv_cache.storage import KVStorage
from foreword.models.decoder import Decoder
from foreword.sampling.logits_processors import draft_sampling_params, only_filters
from foreword.sampling.sampler import Sampler
from foreword.speculation.drafters.eager_draft_loop import (
    NO_IMAGES,
    ChunkImages,
    EagerDraftLoop,
    check_finite,
)
from foreword.speculation.engine_drafter import DeviceDrafter, DraftRequest, OnePass


@dataclass(slots=True)
class DraftState:
    """The draft model's progress on one request. Its KV has positions counted from window_start.

    |<-- not read -->|<-------- computed -------->|<-- draft -->|     indices in the text
                     window_start                 num_computed
    |<---------------------- the text --------------------->|
                                                         length

    The text is all tokens of the request; a text-only draft model leaves out those of images.
    """

    sampling: DraftSamplingParams
    is_simple: bool  # the request needs only temperature and filters
    num_skipped_image_tokens: int = 0
    text_prompt_ids: Sequence[int] = ()  # the prompt without image tokens; empty: none were skipped
    last_image_end: int = 0  # index after the last image that the model sees; 0: none
    mrope_positions: MRopePositions | None = None  # while the model reads images from the beginning
    was_requested: bool = False  # a draft was requested
    length: int = 0
    window_start: int = 0
    num_computed: int = 0
    last_used: int = 0  # number of the last propose() that computed some of it
    draft_ids: tuple[int, ...] = ()  # computed after the known tokens, not yet compared with the text
    blocks: array[int] = field(default_factory=lambda: array("q"))

    @classmethod
    def from_state(cls, state: RequestState, vocab_size: int, is_multimodal: bool = False) -> DraftState:
        """The state of a new request, for a model with logits of width `vocab_size`."""
        sampling, simple = draft_sampling_params(state.request, vocab_size), only_filters(state.request)
        images = state.request.images
        if is_multimodal or not images:
            end = images[-1].end if images else 0
            return cls(sampling, simple, last_image_end=end, mrope_positions=state.mrope_positions)
        ids = state.request.prompt_ids
        starts, ends = [*(image.start for image in images), len(ids)], [0, *(image.end for image in images)]
        prompt = tuple(chain.from_iterable(ids[end:start] for end, start in zip(ends, starts, strict=True)))
        return cls(sampling, simple, state.num_prompt - len(prompt), prompt)

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens without KV."""
        return self.length - self.num_computed

    def tokens_from(self, request: DraftRequest, index: int) -> Sequence[int]:
        """The text from an index on."""
        prompt, tokens = self.text_prompt_ids, request.state.tokens
        if index >= len(prompt):
            return tokens[index + self.num_skipped_image_tokens :]
        return [*prompt[index:], *tokens[len(prompt) + self.num_skipped_image_tokens :]]

    def sync(self, request: DraftRequest) -> None:
        """Keep accepted draft tokens, but never the last known token: its row yields the next draft token."""
        self.length = request.num_tokens - self.num_skipped_image_tokens
        if self.draft_ids:
            for draft_id, token_id in zip(
                self.draft_ids, self.tokens_from(request, self.num_computed), strict=False
            ):
                if draft_id != token_id:
                    break
                self.num_computed += 1
            self.draft_ids = ()
        # max: the text is empty if the prompt has only images
        self.num_computed = max(min(self.num_computed, self.length - 1), self.window_start)

    def reset_at(self, window_start: int) -> None:
        """Forget all computed tokens; the text is read again from `window_start` on."""
        if window_start > self.window_start:
            self.mrope_positions = None
        self.window_start = self.num_computed = window_start
        self.draft_ids = ()


MAX_WINDOW = 4096  # tokens; older context costs more than it adds to acceptance
TIMED_DRAFT_LEN = 4  # tokens per draft while timing passes
DUMMY_STRIDE = 7919  # distance of the ids of neighbouring tokens while timing passes; prime
RECOMPUTED_TOKENS = 2  # last known tokens that a device step recomputes: neither has KV after full acceptance


class ImageFeatureSource(Protocol):
    """Image features from the draft model's own vision encoder."""

    def remaining_cost(self, state: RequestState, start: int) -> int:
        """Multiply-adds to encode the images after the first `start` tokens."""

    def computable_until(self, state: RequestState, start: int) -> int:
        """First index >= start that needs an image not yet encoded."""

    def features(self, state: RequestState, start: int, end: int) -> Sequence[tuple[int, Tensor]]:
        """Features of tokens [start, end): (index of the first relative to `start`, [rows, width])."""


@dataclass(slots=True)
class _PendingDraft:
    """The job of one request in one propose()."""

    index: int
    request: DraftRequest
    draft_state: DraftState
    job: DraftJob
    images: ChunkImages = NO_IMAGES

    @property
    def can_use_loop(self) -> bool:
        """Whether a DraftLoop supports its sampling, and its positions: all images are computed."""
        state = self.draft_state
        return state.is_simple and self.job.start_position >= state.last_image_end - state.window_start


class ModelDrafter(DeviceDrafter):
    """Runs the draft model for all requests at once, one token each per pass.

    It samples with the target's parameters and noise, so acceptance is as high as both distributions allow.
    When its blocks run out, the least recently used request loses them and is recomputed later. A request
    that outgrows the window is recomputed from the last half of the window on.

    A multimodal model needs the images encoded before it drafts; a text-only model reads only the text.
    Images before the window are not encoded again.
    """

    name = "draft"
    one_pass: OnePass | None = None

    def __init__(
        self,
        model: Decoder,
        kv: KVStorage,
        sampler: Sampler,
        pool: BlockPool,
        block_size: int,
        max_rows: int,
        max_len: int,
    ) -> None:
        """max_rows  rows per pass; longer prompts take several steps; max_len  the model's context length"""
        self.forward = forward = with_graphs(model.ops, model.compile_logits(kv))
        self._draft_loop = forward if isinstance(forward, DraftLoop) else None
        # not for multimodal models: their positions may differ from the target's
        can_loop = model.vision_encoder is None
        self.decode_loop_forward = forward if can_loop and isinstance(forward, SupportsDecodeLoop) else None
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
        self._block_manager = BlockManager(pool, block_size)
        self._block_size = block_size
        self._max_rows = max_rows
        self._window = min(max_len, MAX_WINDOW)
        self._states: dict[str, DraftState] = {}
        self._num_proposals = 0

    def set_image_source(self, source: ImageFeatureSource, macs_per_row: int) -> None:
        """Show the model the images of requests that begin from now on.

        macs_per_row  multiply-adds of its vision encoder that take as long as one row
        """
        self._image_source, self._macs_per_row = source, max(macs_per_row, 1)

    def start(self, state: RequestState) -> None:
        self._states[state.id] = DraftState.from_state(
            state, self._vocab_size, self._image_source is not None
        )

    def finish(self, request_id: str, output: Sequence[int] = ()) -> None:
        draft_state = self._states.pop(request_id, None)
        if draft_state is not None:
            self._block_manager.release(draft_state)

    def check(self, live: Container[str]) -> None:
        assert all(request_id in live for request_id in self._states)
        self._pool.check(draft_state.blocks for draft_state in self._states.values())

    def num_pending_rows(self, request: DraftRequest) -> int:
        draft_state = self._sync(request)
        num_pending = draft_state.num_pending_tokens
        if draft_state.was_requested and self._num_computable(request, draft_state) < num_pending:
            return 0
        macs = 0
        if self._image_source is not None and draft_state.num_computed < draft_state.last_image_end:
            macs = self._image_source.remaining_cost(request.state, draft_state.num_computed)
        return max(num_pending + macs // self._macs_per_row, 1)

    def num_computed(self, state: RequestState) -> int:
        """Tokens that need no image features any more; all tokens if no draft was requested."""
        draft_state = self._states.get(state.id)
        if draft_state is None or not draft_state.was_requested:
            return len(state.tokens)
        return draft_state.num_computed

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        drafts: list[Draft | None] = [None] * len(requests)
        for pending, draft in self._draft(self._schedule(requests)):
            pending.draft_state.num_computed += len(pending.job.token_ids)
            pending.draft_state.draft_ids = draft.token_ids[:-1]
            if pending.job.max_tokens:
                confidence = tuple(map(math.exp, draft.logprobs))
                drafts[pending.index] = Draft(draft.token_ids, self.name, confidence)
        check_finite(requests, drafts)
        return drafts

    def acquire_device(self, states: Sequence[RequestState], num_tokens: int) -> bool:
        synced = [self._sync(DraftRequest(state)) for state in states]
        # the device loop reads the text from its beginning, as the target does
        is_ready = all(
            draft_state.num_pending_tokens <= RECOMPUTED_TOKENS
            and not draft_state.window_start
            and not draft_state.num_skipped_image_tokens
            and not draft_state.last_image_end
            for draft_state in synced
        )
        return is_ready and self.reserve_device(states, num_tokens)

    def reserve_device(self, states: Sequence[RequestState], num_tokens: int) -> bool:
        needs = [(self._states[state.id], len(state.tokens) + num_tokens) for state in states]
        if any(length > self._window for _, length in needs):
            return False
        return self._block_manager.allocate_all(needs)

    def device_blocks(self, state: RequestState) -> Sequence[int]:
        return self._states[state.id].blocks

    def release_device(self, state: RequestState, num_computed: int) -> None:
        draft_state = self._states[state.id]
        draft_state.length, draft_state.num_computed, draft_state.draft_ids = (
            len(state.tokens),
            num_computed,
            (),
        )

    def pass_seconds(self, num_rows: int, num_sampled: int) -> float:
        """If every row is sampled, the mean of a draft of several tokens, else one pass."""
        draft_len = min(TIMED_DRAFT_LEN, self._window) if num_rows == num_sampled else 1
        dummies = self._dummy_drafts(num_rows, num_sampled, draft_len)
        with torch.inference_mode():
            started = time.perf_counter()
            lengths = [len(draft.token_ids) for _, draft in self._draft(dummies)]
            seconds = time.perf_counter() - started
        return seconds / max(*lengths, 1)  # NaN logits end drafts early

    def _draft(self, pending: Sequence[_PendingDraft]) -> Iterator[tuple[_PendingDraft, DraftTokens]]:
        """Draft with one DraftLoop call where it is supported, the rest pass by pass."""
        loop = self._draft_loop
        in_loop = [p for p in pending if p.can_use_loop] if loop is not None else []
        if loop is not None and in_loop:
            drafts = loop.draft([p.job for p in in_loop], self._block_size, self._never_sampled_ids)
            yield from zip(in_loop, drafts, strict=True)
        eager = [p for p in pending if loop is None or not p.can_use_loop]
        if eager:
            requests, jobs, images = zip(*((p.request, p.job, p.images) for p in eager), strict=True)
            yield from zip(eager, self._eager_loop.draft(requests, jobs, images), strict=True)

    def _schedule(self, requests: Sequence[DraftRequest]) -> list[_PendingDraft]:
        """Choose the requests to compute, and how many tokens of each: the fewest pending tokens first.

        Bounded by max_rows and free blocks.
        """
        self._num_proposals += 1
        synced = [self._sync(request) for request in requests]
        budget = self._max_rows
        sizes: dict[int, int] = {}
        for index in sorted(range(len(requests)), key=lambda index: synced[index].num_pending_tokens):
            draft_state = synced[index]
            draft_state.was_requested = True
            size = min(self._num_computable(requests[index], draft_state), budget)
            end = draft_state.num_computed + size - draft_state.window_start
            if size and self._reserve(draft_state, end):
                draft_state.last_used = self._num_proposals
                sizes[index] = size
                budget -= size
        return [self._make_pending(i, requests[i], synced[i], size) for i, size in sizes.items()]

    def _num_computable(self, request: DraftRequest, draft_state: DraftState) -> int:
        """Pending tokens that need no image that is not encoded yet."""
        start = draft_state.num_computed
        if self._image_source is None or start >= draft_state.last_image_end:
            return draft_state.num_pending_tokens
        return self._image_source.computable_until(request.state, start) - start

    def _make_pending(
        self, index: int, request: DraftRequest, draft_state: DraftState, num_tokens: int
    ) -> _PendingDraft:
        """Compute the next `num_tokens` known tokens, with their image features."""
        job = self._make_job(request, draft_state, num_tokens)
        start = draft_state.num_computed
        features: Sequence[tuple[int, Tensor]] = ()
        if self._image_source is not None and start < draft_state.last_image_end:
            features = self._image_source.features(request.state, start, start + num_tokens)
        images = ChunkImages(draft_state.mrope_positions, features)
        return _PendingDraft(index, request, draft_state, job, images)

    def _make_job(self, request: DraftRequest, draft_state: DraftState, num_tokens: int) -> DraftJob:
        """Compute the next `num_tokens` known tokens, and draft if no others are pending."""
        token_ids = draft_state.tokens_from(request, draft_state.num_computed)[:num_tokens]
        if max(token_ids) >= self._vocab_size:  # a padding row of the target's vocabulary
            token_ids = [token_id if token_id < self._vocab_size else 0 for token_id in token_ids]
        is_last = num_tokens == draft_state.num_pending_tokens
        mrope_positions = draft_state.mrope_positions if self._mrope else None
        return DraftJob(
            token_ids=token_ids,
            start_position=draft_state.num_computed - draft_state.window_start,
            block_table=draft_state.blocks,
            first_draft_index=request.num_tokens,
            max_tokens=self._max_draft_len(draft_state, request.max_draft_tokens) if is_last else 0,
            min_logprob_sum=math.log(request.min_prob) if request.min_prob > 0 else -math.inf,
            sampling=draft_state.sampling,
            mrope_offset=0 if mrope_positions is None else mrope_positions.offset,
        )

    def _max_draft_len(self, draft_state: DraftState, max_tokens: int) -> int:
        """Longest possible draft: all but its last token need a slot in the window."""
        length = draft_state.length - draft_state.window_start
        wanted = min(max_tokens, self._window - length + 1)
        room = (len(draft_state.blocks) + self._pool.num_free) * self._block_size
        wanted = min(wanted, room - length + 1)
        self._block_manager.allocate(draft_state, length + wanted - 1)
        return wanted

    def _sync(self, request: DraftRequest) -> DraftState:
        """The request's state, compared with its text; reset if the text has outgrown the window."""
        draft_state = self._states[request.state.id]
        draft_state.sync(request)
        if draft_state.length - draft_state.window_start > self._window:
            half = draft_state.length - max(self._window // 2, 1)
            self._evict(draft_state, max(half, draft_state.last_image_end))
        return draft_state

    def _reserve(self, draft_state: DraftState, length: int) -> bool:
        """Allocate blocks for `length` tokens, evicting the least recently used requests."""
        while self._block_manager.blocks_needed(draft_state, length) > self._pool.num_free:
            evictable = [
                other
                for other in self._states.values()
                if other.blocks and other.last_used < self._num_proposals and other is not draft_state
            ]
            if not evictable:
                return False
            victim = min(evictable, key=lambda other: (other.last_used, -other.num_pending_tokens))
            self._evict(victim, victim.window_start)
        self._block_manager.allocate(draft_state, length)
        return True

    def _evict(self, draft_state: DraftState, window_start: int) -> None:
        """Free the request's blocks; its text is read again from `window_start` on."""
        self._block_manager.release(draft_state)
        draft_state.reset_at(window_start)

    def _dummy_drafts(self, num_rows: int, num_sampled: int, draft_len: int) -> list[_PendingDraft]:
        """Jobs of `num_rows` tokens and `num_sampled` drafts, spread over requests that fit the window."""
        state = RequestState(Request("", (0,), SamplingParams(), seed=0), 0, self._window)
        draft_state = DraftState.from_state(state, self._vocab_size)
        count = max(num_sampled, -(-num_rows // (self._window - draft_len + 1)))
        blocks = [NULL_BLOCK] * -(-self._window // self._block_size)
        dummies = []
        for n in range(count):
            # Tokens differ: rows of the same token would choose the same experts.
            token_ids = [row * DUMMY_STRIDE % self._vocab_size for row in range(n, num_rows, count)]
            max_tokens = draft_len if n < num_sampled else 0
            job = DraftJob(token_ids, 0, blocks, 1, max_tokens, -math.inf, draft_state.sampling)
            dummies.append(_PendingDraft(n, DraftRequest(state), draft_state, job))
        return dummies
