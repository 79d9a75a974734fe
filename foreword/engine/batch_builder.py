"""From a plan to tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from foreword.core.batch import Batch, Chunk, SampleRow, build_batch
from foreword.core.request import RequestState
from foreword.engine.pooler import num_pool_rows
from foreword.engine.schedule import ScheduledRequest, ScheduleOutput

__all__ = ["BatchBuilder", "ModelInput", "PromptLogprobRow"]

GetFeatures = Callable[[RequestState, int, int], Sequence[tuple[int, Tensor]]]


@dataclass(frozen=True, slots=True)
class PromptLogprobRow:
    """A row of the prompt whose logprobs are wanted: logits line `line`, of token `target`."""

    logits_index: int
    target_id: int


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A plan with its tensors.

    forward      input of the model
    rows         the rows to be sampled, request by request; `lines[i]` is the line of logits of rows[i]
    prompt_rows  per piece of work, the prompt rows to be scored
    """

    scheduled: ScheduleOutput
    batch: Batch
    sample_rows: tuple[SampleRow, ...]
    logits_indices: tuple[int, ...]
    prompt_logprob_rows: tuple[tuple[PromptLogprobRow, ...], ...]


def _no_features(state: RequestState, start: int, end: int) -> Sequence[tuple[int, Tensor]]:
    return ()


class BatchBuilder:
    """Lays out the rows of a plan for a backend that wants multiples of `row_tile` rows.

    directions  the model knows positions in several directions
    owners      the backend asks whose each row is
    features    of a request, what stands for its tokens from one index to another: (index behind the first, [rows, width])
    """

    def __init__(
        self,
        block_size: int,
        row_tile: int,
        device: str,
        mrope: bool = False,
        get_features: GetFeatures = _no_features,
        with_request_index: bool = False,
    ) -> None:
        self.block_size = block_size
        self.row_tile = row_tile
        self.device = device
        self.mrope = mrope
        self.get_features = get_features
        self.with_request_index = with_request_index

    def build(self, scheduled: ScheduleOutput) -> ModelInput:
        rows: list[SampleRow] = []
        lines: list[int] = []
        prompt_rows: list[tuple[PromptLogprobRow, ...]] = []
        chunks: list[Chunk] = []
        num_lines = 0
        for work in scheduled.requests:
            chunk = self._build_chunk(work)
            prompt_rows.append(_prompt_logprob_rows(work, num_lines) if _needs_prompt_logprobs(work) else ())
            num_lines += chunk.num_sampled
            if work.is_sampled:
                draft = tuple(work.state.draft[: work.num_draft_tokens])
                rows += [SampleRow(work.state, draft[:n]) for n in range(len(draft) + 1)]
                lines += range(num_lines - len(draft) - 1, num_lines)
            chunks.append(chunk)
        return ModelInput(scheduled, self.flatten(chunks), tuple(rows), tuple(lines), tuple(prompt_rows))

    def build_pooling(self, scheduled: ScheduleOutput) -> Batch:
        """The pass over the prompts that become vectors."""
        return self.flatten([_build_pooling_chunk(work) for work in scheduled.pooling_requests])

    def flatten(self, chunks: Sequence[Chunk]) -> Batch:
        """The chunks as one batch."""
        return build_batch(
            chunks, self.block_size, self.row_tile, self.device, self.mrope, self.with_request_index
        )

    def _build_chunk(self, request: ScheduledRequest) -> Chunk:
        state = request.state
        token_ids = (
            state.tokens[request.start : request.start + request.num_tokens]
            + state.draft[: request.num_draft_tokens]
        )
        num_sampled = 1 + request.num_draft_tokens if request.is_sampled else 0
        if _needs_prompt_logprobs(request):
            num_sampled = len(token_ids)
        features = self.get_features(state, request.start, request.start + request.num_tokens)
        return Chunk(token_ids, request.start, state.blocks, num_sampled, state.mrope_positions, features)


def _build_pooling_chunk(request: ScheduledRequest) -> Chunk:
    return Chunk(
        request.state.tokens[request.start : request.start + request.num_tokens],
        request.start,
        request.state.blocks,
        num_pool_rows(request),
    )


def _needs_prompt_logprobs(request: ScheduledRequest) -> bool:
    """Whether rows of this work score prompt tokens that were not scored before a preemption."""
    state = request.state
    asked = state.params.prompt_logprobs is not None
    return (
        asked and len(state.prompt_logprobs) < state.num_prompt - 1 and request.start < state.num_prompt - 1
    )


def _prompt_logprob_rows(request: ScheduledRequest, first_index: int) -> tuple[PromptLogprobRow, ...]:
    """Row p scores token p + 1. Positions before `scored` were scored before a preemption."""
    state = request.state
    scored = len(state.prompt_logprobs)
    end = min(request.start + request.num_tokens, state.num_prompt - 1)
    return tuple(
        PromptLogprobRow(first_index + p - request.start, state.tokens[p + 1])
        for p in range(max(request.start, scored), end)
    )
