"""Batches: from scheduled requests to the tensors of a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from foreword.core.batch import Batch, Chunk, SampleRow, build_batch, num_segments
from foreword.core.request import RequestState
from foreword.engine.pooler import num_pool_rows
from foreword.engine.scheduler import ScheduledRequest
from foreword.kv_cache.state_cache import anchors_between

# state, start, end -> image features of tokens [start, end) as (offset from start, [rows, width])
GetFeatures = Callable[[RequestState, int, int], Sequence[tuple[int, Tensor]]]


@dataclass(frozen=True, slots=True)
class PromptLogprobRow:
    """A row of logits that scores one prompt token."""

    logits_index: int
    target_id: int


@dataclass(frozen=True, slots=True)
class ModelInput:
    requests: Sequence[ScheduledRequest]
    batch: Batch
    sample_rows: tuple[SampleRow, ...]  # rows to sample, request by request
    logits_indices: tuple[int, ...]  # row of logits of each sample row
    prompt_logprob_rows: tuple[tuple[PromptLogprobRow, ...], ...]  # per request


class BatchBuilder:
    def __init__(
        self,
        block_size: int,
        row_tile: int,  # the backend computes multiples of this many rows
        device: str,
        mrope: bool = False,  # positions have three axes
        get_features: GetFeatures = lambda state, start, end: (),
        with_request_index: bool = False,  # the backend needs the request index of each row
        with_lora: bool = False,  # the model has adapters
        with_states: bool = False,  # the model has layers with state
        with_prev_slots: bool = False,  # the model has a trained head
    ) -> None:
        self.block_size = block_size
        self.row_tile = row_tile
        self.device = device
        self.mrope = mrope
        self.get_features = get_features
        self.with_request_index = with_request_index
        self.with_lora = with_lora
        self.with_states = with_states
        self.with_prev_slots = with_prev_slots

    def build(self, requests: Sequence[ScheduledRequest]) -> ModelInput:
        rows: list[SampleRow] = []
        logits_indices: list[int] = []
        prompt_rows: list[tuple[PromptLogprobRow, ...]] = []
        chunks: list[Chunk] = []
        num_logits = 0
        for request in requests:
            state, start, num_tokens, is_sampled, num_draft = request
            end = start + num_tokens
            token_ids = state.tokens[start:end]
            if num_draft:
                token_ids += state.draft[:num_draft]
            scored = () if state.params.prompt_logprobs is None else _prompt_logprob_rows(request, num_logits)
            num_sampled = len(token_ids) if scored else (1 + num_draft) * is_sampled
            features = self.get_features(state, start, end) if state.request.images else ()
            mrope_positions, slot = state.mrope_positions, state.lora_slot
            chunk = Chunk(token_ids, start, state.blocks, num_sampled, mrope_positions, features, slot)
            chunks.append(self._with_states(chunk, state) if self.with_states else chunk)
            prompt_rows.append(scored)
            num_logits += num_sampled
            if is_sampled:
                rows.append(SampleRow(state))
                if num_draft:
                    draft = tuple(state.draft[:num_draft])
                    rows += [SampleRow(state, draft[:n]) for n in range(1, num_draft + 1)]
                logits_indices += range(num_logits - num_draft - 1, num_logits)
        return ModelInput(
            requests, self.flatten(chunks), tuple(rows), tuple(logits_indices), tuple(prompt_rows)
        )

    def build_pooling(self, requests: Sequence[ScheduledRequest]) -> Batch:
        """The pass over prompts to be embedded."""
        chunks = []
        for request in requests:
            state, start, end = request.state, request.start, request.start + request.num_tokens
            token_ids, num_sampled = state.tokens[start:end], num_pool_rows(request)
            chunk = Chunk(token_ids, start, state.blocks, num_sampled, lora_slot=state.lora_slot)
            chunks.append(self._with_states(chunk, state) if self.with_states else chunk)
        return self.flatten(chunks)

    def _with_states(self, chunk: Chunk, state: RequestState) -> Chunk:
        """Slot and anchors; dummy requests have slot 0, and anchor 0 everywhere."""
        anchors = [0] * num_segments(chunk)
        if state.state_slot:
            anchors = anchors_between(state, chunk.start, chunk.start + len(chunk.token_ids))
        return chunk._replace(state_slot=state.state_slot, anchors=anchors)

    def flatten(self, chunks: Sequence[Chunk]) -> Batch:
        inputs = (self.mrope, self.with_request_index, self.with_lora)
        options = (*inputs, self.with_states, self.with_prev_slots)
        return build_batch(chunks, self.block_size, self.row_tile, self.device, *options)


def _prompt_logprob_rows(request: ScheduledRequest, first_index: int) -> tuple[PromptLogprobRow, ...]:
    """Rows whose prompt logprobs are wanted: row p scores token p + 1, if not scored before a preemption."""
    state = request.state
    start = max(request.start, len(state.prompt_logprobs))
    end = min(request.start + request.num_tokens, state.num_prompt - 1)
    return tuple(
        PromptLogprobRow(first_index + p - request.start, state.tokens[p + 1]) for p in range(start, end)
    )
