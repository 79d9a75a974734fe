"""Drafts from a trained head, which reads the target's hidden states."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise

import torch

from foreword.core.batch import NULL_BLOCK
from foreword.core.outputs import Draft
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.kernels.ops import DraftJob, DraftLoop, DraftTokens, Ops
from foreword.kv_cache.storage import KVStorage
from foreword.models.interfaces import Head
from foreword.sampling.logits_processors import draft_sampling_params, only_filters
from foreword.sampling.sampler import Sampler
from foreword.speculation.drafters.draft_model import DUMMY_STRIDE, TIMED_DRAFT_LEN
from foreword.speculation.drafters.eager_draft_loop import ChunkImages, EagerDraftLoop, check_finite
from foreword.speculation.engine_drafter import DraftRequest, ModelBasedDrafter, OnePass

MAX_PASS_ROWS = 256  # draft rows in one pass: each has logits of the whole vocabulary


class HeadDrafter(ModelBasedDrafter):
    """Drafts for all requests at once, one token each per pass, or all in one. It keeps nothing of a request.

    The target's own passes write the head's memory of known tokens. A draft writes to the slots of its
    tokens; those that the request has no blocks for are in scratch blocks: the i-th request of a propose()
    uses strip i. The next pass of the target writes all of them again.

    |<------ blocks of the request ------>|<- strip i ->|     slots
    |<----- computed by the target ----->|<--- draft -->|
                                    last token: first row of the draft, masks behind it if it is one pass
    """

    def __init__(
        self,
        head: Head,
        ops: Ops,
        kv: KVStorage,
        sampler: Sampler,
        max_draft_len: int,
        max_len: int,
        vocab_size: int,
    ) -> None:
        """max_len  of a request, prompt and output; vocab_size  of the target"""
        assert kv.head is not None
        self.name = head.method
        forward = head.compile_draft(kv)
        markov = None if head.parallel is None else head.parallel.markov
        # The native loop samples the tokens of a pass independently of each other
        self._draft_loop = forward if isinstance(forward, DraftLoop) and markov is None else None
        options = (kv.block_size, kv.device, head.uses_mrope)
        self._eager_loop = EagerDraftLoop(
            forward, ops, sampler, *options, with_prev_slots=True, markov=markov
        )
        self._never_sampled_ids = sampler.never_sampled_ids
        self._vocab_size = vocab_size
        self._block_size = kv.block_size
        self._first_scratch_block = kv.num_blocks + 1
        self._strip_size = num_strip_blocks(head, max_draft_len, kv.block_size)
        # A draft has two known tokens before it, and one of the target's behind it
        self._max_draft_len = max(min(max_draft_len, max_len - 3), 1)
        self._num_timed_tokens = min(2, max_len - 1)  # known tokens of a timed draft
        self._has_fixed_position = head.has_fixed_position
        self.one_pass: OnePass | None = None
        self._parallel, self._mask_slot = head.parallel, None
        if head.parallel is not None:
            self._max_draft_len = min(self._max_draft_len, head.parallel.max_tokens)
            self.one_pass = OnePass(self._max_draft_len, head.parallel.num_rows(0))
            self._mask_slot = kv.head.mask_slot if head.parallel.reads_mask_state else None

    def num_pending_rows(self, request: DraftRequest) -> int:
        """One: the target's passes compute the known tokens. 0 before a second token is known."""
        return int(_can_draft(request.state))

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        jobs = {
            index: self._make_job(request, index)
            for index, request in enumerate(requests)
            if _can_draft(request.state)
        }
        drafts: list[Draft | None] = [None] * len(requests)
        tokens = self._draft([requests[index] for index in jobs], list(jobs.values()))
        for index, draft in zip(jobs, tokens, strict=True):
            confidence = tuple(map(math.exp, draft.logprobs))
            drafts[index] = Draft(draft.token_ids, self.name, confidence)
        check_finite(requests, drafts)
        return drafts

    def pass_seconds(self, num_rows: int, num_sampled: int) -> float:
        """The mean pass of a draft of several tokens; every row of a head is sampled.

        A head that drafts in one pass: a pass with about `num_rows` rows in all, in drafts as long as can be.
        """
        num_requests, count = num_sampled, min(TIMED_DRAFT_LEN, self._max_draft_len)
        if self._parallel is not None:
            most = self._parallel.num_rows(self._max_draft_len)  # rows of a request
            num_rows = min(num_rows, MAX_PASS_ROWS // most * most)
            num_requests = -(-num_rows // most)
            count = max(num_rows // num_requests - self._parallel.num_rows(0), 1)
        known = (0,) * self._num_timed_tokens
        state = RequestState(Request("", known, SamplingParams(), seed=0), 0, count + 3)
        requests = [DraftRequest(state, count)] * num_requests
        blocks = [NULL_BLOCK] * -(-(count + 3) // self._block_size)
        jobs = [self._job(request, blocks) for request in requests]
        for row, job in enumerate(jobs):  # tokens differ: rows of the same one would choose the same experts
            job.token_ids = [row * DUMMY_STRIDE % self._vocab_size, *job.token_ids[1:]]
        with torch.inference_mode():
            started = time.perf_counter()
            lengths = [len(draft.token_ids) for draft in self._draft(requests, jobs)]
            seconds = time.perf_counter() - started
        num_passes = 1 if self._parallel is not None else max(*lengths, 1)  # NaN logits end drafts early
        return seconds / num_passes

    def _draft(self, requests: Sequence[DraftRequest], jobs: Sequence[DraftJob]) -> list[DraftTokens]:
        parts = [slice(None)] if self._parallel is None else split_passes(jobs)
        return [draft for part in parts for draft in self._draft_part(requests[part], jobs[part])]

    def _draft_part(self, requests: Sequence[DraftRequest], jobs: Sequence[DraftJob]) -> list[DraftTokens]:
        """With one DraftLoop call where sampling allows it, the rest pass by pass."""
        drafts: dict[int, DraftTokens] = {}
        in_loop = [
            index
            for index, request in enumerate(requests)
            if self._draft_loop is not None and only_filters(request.state.request)
        ]
        if self._draft_loop is not None and in_loop:
            loop_jobs = [jobs[index] for index in in_loop]
            tokens = self._draft_loop.draft(loop_jobs, self._block_size, self._never_sampled_ids)
            drafts |= zip(in_loop, tokens, strict=True)
        eager = [index for index in range(len(requests)) if index not in drafts]
        if eager:
            chosen = [requests[index] for index in eager]
            # The target's passes have read the images; M-RoPE's positions of the text depend on them
            images = [ChunkImages(request.state.mrope_positions) for request in chosen]
            tokens = self._eager_loop.draft(chosen, [jobs[index] for index in eager], images)
            drafts |= zip(eager, tokens, strict=True)
        return [drafts[index] for index in range(len(requests))]

    def _make_job(self, request: DraftRequest, index: int) -> DraftJob:
        """The job of the request at `index` of a propose(), with its strip."""
        first = self._first_scratch_block + index * self._strip_size
        rows = len(self._token_ids(request)) if self._parallel is not None else self._length(request)
        length = request.num_tokens - 1 + rows
        num_blocks = -(-length // self._block_size)
        blocks = [*request.state.blocks[:num_blocks]]
        blocks += range(first, first + num_blocks - len(blocks))
        return self._job(request, blocks)

    def _length(self, request: DraftRequest) -> int:
        return min(request.max_draft_tokens, self._max_draft_len)

    def _token_ids(self, request: DraftRequest) -> list[int]:
        """The last token, and the masks of a draft in one pass."""
        if self._parallel is None:
            return [request.state.tokens[-1]]
        num_masks = self._length(request) - self._parallel.samples_last_token
        return [request.state.tokens[-1], *[self._parallel.mask_token_id] * num_masks]

    def _job(self, request: DraftRequest, blocks: Sequence[int]) -> DraftJob:
        state = request.state
        return DraftJob(
            token_ids=self._token_ids(request),
            start_position=request.num_tokens - 1,
            block_table=blocks,
            first_draft_index=request.num_tokens,
            max_tokens=self._length(request),
            min_logprob_sum=math.log(request.min_prob) if request.min_prob > 0 else -math.inf,
            sampling=draft_sampling_params(state.request, self._vocab_size),
            fixed_position=max(request.num_tokens - 2, 0) if self._has_fixed_position else None,
            in_one_pass=self._parallel is not None,
            mask_slot=self._mask_slot,
            mrope_offset=0 if state.mrope_positions is None else state.mrope_positions.offset,
        )


def num_strip_blocks(head: Head, max_draft_len: int, block_size: int) -> int:
    """Scratch blocks of a request: for all rows of a draft, if its own blocks are full."""
    rows = max_draft_len if head.parallel is None else head.parallel.num_rows(max_draft_len)
    return -(-rows // block_size)


def split_passes(jobs: Sequence[DraftJob]) -> list[slice]:
    """The jobs of each pass: in order, as many as fit into MAX_PASS_ROWS, and at least one."""
    starts, rows = [0], 0
    for index, job in enumerate(jobs):
        rows += len(job.token_ids)
        if rows > MAX_PASS_ROWS and index > starts[-1]:
            starts.append(index)
            rows = len(job.token_ids)
    return [slice(*ends) for ends in pairwise([*starts, len(jobs)])]


def _can_draft(state: RequestState) -> bool:
    """The target has computed all tokens but the last, and at least one."""
    return 0 < state.num_computed == len(state.tokens) - 1
