"""Drafting pass by pass, for requests and backends that the native loop does not support."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from foreword.core.batch import Batch, Chunk, SampleRow, at_fixed_positions, build_batch
from foreword.core.images import MRopePositions
from foreword.core.outputs import Draft
from foreword.kernels.ops import DraftJob, DraftTokens, Ops
from foreword.models.interfaces import MarkovHead
from foreword.sampling.logits_processors import only_filters
from foreword.sampling.sampler import Sampler
from foreword.speculation.engine_drafter import DraftRequest, NoFiniteLogits


@dataclass(frozen=True, slots=True)
class ChunkImages:
    """M-RoPE positions and image features of a Chunk."""

    positions: MRopePositions | None = None
    features: Sequence[tuple[int, Tensor]] = ()


NO_IMAGES = ChunkImages()


@dataclass(slots=True)
class _DraftProgress:
    """One draft job between passes."""

    request: DraftRequest
    job: DraftJob
    positions: MRopePositions | None
    features: Sequence[tuple[int, Tensor]]  # features of images among the pending tokens
    pending_ids: Sequence[int]  # computed by the next pass, from position `start` on
    start: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    total_logprob: float = 0.0
    is_done: bool = False

    @property
    def row(self) -> SampleRow:
        return SampleRow(self.request.state, tuple(self.token_ids))

    def append(self, token_id: int, logprob: float) -> None:
        """Add a draft token; a row without a legal token (-1) ends the draft instead."""
        self.start += len(self.pending_ids)
        self.pending_ids, self.features = [token_id], ()
        self.is_done = token_id < 0
        if self.is_done:
            return
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.total_logprob += logprob
        is_full = len(self.token_ids) == self.job.max_tokens
        self.is_done = is_full or self.total_logprob < self.job.min_logprob_sum


class EagerDraftLoop:
    """Drafts with one forward pass and one sampler call per token, for all jobs together.

    For backends without a DraftLoop, and for requests that need penalties, masks or images.
    """

    def __init__(
        self,
        forward: Callable[[Batch], Tensor],
        ops: Ops,
        sampler: Sampler,
        block_size: int,
        device: str,
        mrope: bool = False,
        with_prev_slots: bool = False,
        markov: MarkovHead | None = None,
    ) -> None:
        """forward  yields hidden states instead of logits for a Markov head"""
        self._forward = forward
        self._ops = ops
        self._sampler = sampler
        self._block_size = block_size
        self._device = device
        self._mrope = mrope
        self._with_prev_slots = with_prev_slots
        self._markov = markov

    def draft(
        self,
        requests: Sequence[DraftRequest],
        jobs: Sequence[DraftJob],
        images: Sequence[ChunkImages] | None = None,
    ) -> list[DraftTokens]:
        """Draft for each job, with its request and images (None: no images)."""
        drafts = [
            _DraftProgress(request, job, image.positions, image.features, job.token_ids, job.start_position)
            for request, job, image in zip(requests, jobs, images or [NO_IMAGES] * len(jobs), strict=True)
        ]
        logits = self._run_pass(drafts)
        active = [draft for draft in drafts if draft.job.max_tokens]
        if active and active[0].job.in_one_pass:  # all jobs are
            self._sample_one_pass(logits, active)
            active = []
        while active:
            self._sample(logits, active)
            active = [draft for draft in active if not draft.is_done]
            if active:
                logits = self._run_pass(active)
        return [DraftTokens(tuple(draft.token_ids), tuple(draft.logprobs)) for draft in drafts]

    def _run_pass(self, drafts: Sequence[_DraftProgress]) -> Tensor:
        """Compute the pending tokens: logits of the rows to sample."""
        chunks = [
            Chunk(d.pending_ids, d.start, d.job.block_table, d.job.num_sampled, d.positions, d.features)
            for d in drafts
        ]
        batch = build_batch(
            chunks,
            self._block_size,
            self._ops.row_tile,
            self._device,
            self._mrope,
            with_request_index=self._ops.supports_graphs,
            with_prev_slots=self._with_prev_slots,
        )
        fixed = [draft.job.fixed_position for draft in drafts if draft.job.fixed_position is not None]
        if fixed:
            batch = at_fixed_positions(batch, fixed)
        if batch.prev_slots is not None and drafts[0].job.mask_slot is not None:  # all jobs have it
            prev_slots = torch.full_like(batch.prev_slots, drafts[0].job.mask_slot)
            firsts = torch.tensor(batch.query_start_loc[:-1], device=prev_slots.device)
            batch = replace(batch, prev_slots=prev_slots.index_copy_(0, firsts, batch.prev_slots[firsts]))
        return self._forward(batch)

    def _sample_one_pass(self, output: Tensor, drafts: Sequence[_DraftProgress]) -> None:
        """Sample all tokens of each draft; output [sum of max_tokens, V or hidden size]."""
        logits = output if self._markov is None else self._markov.logits(output)
        starts = list(accumulate((draft.job.max_tokens for draft in drafts), initial=0))
        pairs = list(zip(drafts, starts, strict=False))
        at_once = [pair for pair in pairs if self._are_independent(pair[0])]
        active = [pair for pair in pairs if not self._are_independent(pair[0])]
        if at_once:
            places = [(draft, start, i) for draft, start in at_once for i in range(draft.job.max_tokens)]
            chosen = torch.tensor([start + i for _, start, i in places], device=logits.device)
            rows = [SampleRow(draft.request.state, (0,) * i) for draft, _, i in places]
            samples = self._sample_rows(logits[chosen] if active else logits, rows)
            for (draft, _, _), sample in zip(places, samples, strict=True):
                if not draft.is_done:
                    draft.append(*sample)
        self._sample_in_turn(output, logits, active)

    def _sample_in_turn(
        self, output: Tensor, logits: Tensor, drafts: Sequence[tuple[_DraftProgress, int]]
    ) -> None:
        """Sample token after token: penalties, grammars and Markov heads read those before.

        output, logits  as in _sample_one_pass(); drafts: with the first row of each
        """
        markov, active = self._markov, list(drafts)
        state = None if markov is None else markov.initial_state(len(active))
        while active:
            rows = torch.tensor([start + len(draft.token_ids) for draft, start in active])
            rows = rows.to(logits.device)
            values, logprobs = logits[rows], None
            if markov is not None and state is not None:
                last_ids = [(draft.token_ids or draft.job.token_ids[:1])[-1] for draft, _ in active]
                step = markov.step(output[rows], torch.tensor(last_ids, device=logits.device), state)
                values += step.bias
                state, logprobs = step.state, step.logprobs
            self._sample(values, [draft for draft, _ in active], logprobs)
            left = [index for index, (draft, _) in enumerate(active) if not draft.is_done]
            active = [active[index] for index in left]
            state = None if state is None else state[left]

    def _are_independent(self, draft: _DraftProgress) -> bool:
        """Whether a token of a pass does not depend on the one before."""
        return self._markov is None and only_filters(draft.request.state.request)

    def _sample(
        self, logits: Tensor, drafts: Sequence[_DraftProgress], logprobs: Tensor | None = None
    ) -> None:
        """Sample the next token of each draft; logits [len(drafts), V].

        logprobs  [len(drafts)] of a confidence head; None: those of the tokens themselves
        """
        samples = self._sample_rows(logits, [draft.row for draft in drafts])
        given = [None] * len(drafts) if logprobs is None else logprobs.tolist()
        for draft, (token_id, logprob), own in zip(drafts, samples, given, strict=True):
            draft.append(token_id, logprob if own is None else own)

    def _sample_rows(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[tuple[int, float]]:
        """Tokens and their log-probabilities; logits [len(rows), V] are overwritten."""
        token_ids = self._sampler(logits, rows, logprobs=False).token_ids
        # the sampler has overwritten the logits with the distribution that it sampled from
        chosen = torch.tensor(token_ids, dtype=torch.int64, device=logits.device).clamp(min=0)[:, None]
        values = logits.gather(1, chosen)[:, 0].double() - self._ops.log_sum_exp(logits).double()
        return list(zip(token_ids, values.tolist(), strict=True))


def check_finite(requests: Sequence[DraftRequest], drafts: Sequence[Draft | None]) -> None:
    """Raise NoFiniteLogits for empty drafts of requests whose sampling masks no token."""
    broken_ids = [
        request.state.id
        for request, draft in zip(requests, drafts, strict=True)
        if draft is not None and not draft.token_ids and only_filters(request.state.request)
    ]
    if broken_ids:
        raise NoFiniteLogits(broken_ids)
