"""From a plan to tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from foreword.core.batch import Batch, Chunk, build_batch
from foreword.core.request import RequestState
from foreword.core.rows import SampleRow
from foreword.engine.plan import Plan, Work
from foreword.engine.pooling import num_pooled

__all__ = ["Assembler", "PromptRow", "StepBatch"]

FeaturesOf = Callable[[RequestState, int, int], Sequence[tuple[int, Tensor]]]


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A row of the prompt whose logprobs are wanted: logits line `line`, of token `target`."""

    line: int
    target: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A plan with its tensors.

    forward      input of the model
    rows         the rows to be sampled, request by request; `lines[i]` is the line of logits of rows[i]
    prompt_rows  per piece of work, the prompt rows to be scored
    """

    plan: Plan
    forward: Batch
    rows: tuple[SampleRow, ...]
    lines: tuple[int, ...]
    prompt_rows: tuple[tuple[PromptRow, ...], ...]


def _no_features(state: RequestState, start: int, end: int) -> Sequence[tuple[int, Tensor]]:
    return ()


class Assembler:
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
        directions: bool = False,
        features: FeaturesOf = _no_features,
        owners: bool = False,
    ) -> None:
        self.block_size = block_size
        self.row_tile = row_tile
        self.device = device
        self.directions = directions
        self.features = features
        self.owners = owners

    def build(self, plan: Plan) -> StepBatch:
        rows: list[SampleRow] = []
        lines: list[int] = []
        prompt_rows: list[tuple[PromptRow, ...]] = []
        chunks: list[Chunk] = []
        num_lines = 0
        for work in plan.work:
            chunk = self._chunk(work)
            prompt_rows.append(_prompt_rows(work, num_lines) if _scores_prompt(work) else ())
            num_lines += chunk.num_sampled
            if work.samples:
                draft = tuple(work.state.draft[: work.num_draft])
                rows += [SampleRow(work.state, draft[:n]) for n in range(len(draft) + 1)]
                lines += range(num_lines - len(draft) - 1, num_lines)
            chunks.append(chunk)
        return StepBatch(plan, self.lay_out(chunks), tuple(rows), tuple(lines), tuple(prompt_rows))

    def pooled(self, plan: Plan) -> Batch:
        """The pass over the prompts that become vectors."""
        return self.lay_out([_pooled_chunk(work) for work in plan.pooled])

    def lay_out(self, chunks: Sequence[Chunk]) -> Batch:
        """The chunks as one batch."""
        return build_batch(chunks, self.block_size, self.row_tile, self.device, self.directions, self.owners)

    def _chunk(self, work: Work) -> Chunk:
        state = work.state
        token_ids = state.tokens[work.start : work.start + work.num_tokens] + state.draft[: work.num_draft]
        num_sampled = 1 + work.num_draft if work.samples else 0
        if _scores_prompt(work):
            num_sampled = len(token_ids)
        features = self.features(state, work.start, work.start + work.num_tokens)
        return Chunk(token_ids, work.start, state.blocks, num_sampled, state.positions, features)


def _pooled_chunk(work: Work) -> Chunk:
    return Chunk(work.state.tokens[work.start : work.start + work.num_tokens], work.start, work.state.blocks, num_pooled(work))


def _scores_prompt(work: Work) -> bool:
    """Whether rows of this work score prompt tokens that were not scored before a preemption."""
    state = work.state
    asked = state.params.prompt_logprobs is not None
    return asked and len(state.prompt_logprobs) < state.num_prompt - 1 and work.start < state.num_prompt - 1


def _prompt_rows(work: Work, first_line: int) -> tuple[PromptRow, ...]:
    """Row p scores token p + 1. Positions before `scored` were scored before a preemption."""
    state = work.state
    scored = len(state.prompt_logprobs)
    end = min(work.start + work.num_tokens, state.num_prompt - 1)
    return tuple(PromptRow(first_line + p - work.start, state.tokens[p + 1]) for p in range(max(work.start, scored), end))
