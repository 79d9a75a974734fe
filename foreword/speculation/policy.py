"""What the door of drafting asks whoever decides how much to draft, and the simplest such decision."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from foreword.core.outputs import Draft, DraftingStats
from foreword.core.request import RequestState
from foreword.speculation.base import DraftRequest

__all__ = ["FixedLength", "Policy", "PrefillLoad", "Proposal", "RequestStep", "StepRecord"]


@dataclass(slots=True)
class Proposal:
    """An ask with what was guessed for it so far, in the order of the drafters."""

    request: DraftRequest
    drafts: list[Draft] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """What the next step computes beside the requests that ask: rows of prompts, and the tokens that these rows read."""

    num_rows: int = 0
    num_context_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestStep:
    """One request in one step.

    num_tokens  known tokens that were computed
    num_draft   drafted tokens that were verified
    samples     a token came out
    emitted     tokens emitted
    context     tokens whose KV its last row read
    """

    state: RequestState
    num_tokens: int
    num_draft_tokens: int
    is_sampled: bool
    num_emitted: int
    context_len: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What a step did, and its seconds by stage (schedule, assemble, forward, sample, draft, commit)."""

    requests: tuple[RequestStep, ...]
    seconds_by_stage: Mapping[str, float]


class Policy(Protocol):
    """Decides, for all requests of a step together, who drafts and how much. Guesses change no token, so neither does this.

    The door calls, before each step: score() for what was offered last, bound() for each ask, passes() for each
    drafter that runs a model, admit(), rest(), and after it measured().
    """

    def start(self, state: RequestState) -> None:
        """A request begins."""

    def finish(self, request_id: str) -> None:
        """A request is over."""

    def max_draft_len(self, draft_request: DraftRequest) -> int:
        """Longest draft worth looking for; 0: leave the request alone this time."""

    def plan_draft_model(
        self, proposals: Sequence[Proposal], load: PrefillLoad, drafter: str, pending_rows: Sequence[int]
    ) -> list[tuple[int, float]]:
        """For each offer, (tokens, worth) that `drafter`, which runs a model, should guess; 0 tokens for none.

        backlogs  rows that its model must compute before the first guess
        """

    def select(self, proposals: Sequence[Proposal], load: PrefillLoad) -> list[Draft | None]:
        """For each offer the draft that is verified: one of its drafts, cut; None for none."""

    def fixed_draft_len(self, draft_requests: Sequence[DraftRequest]) -> int:
        """How many tokens a drafter that runs a model guesses for each of these in all steps to come, as long as there are no
        others, and all are verified; 0: that is decided step by step. admit() and score() tell what became of it."""

    def num_steps_to_skip(self) -> int:
        """For how many steps nobody needs to be asked, unless a request begins; they have no drafts, and are not measured."""

    def record_skipped(self, num_steps: int, num_requests: int) -> None:
        """A rest is over after so many steps, in which `asks` times a request was not asked."""

    def record_acceptance(self, state: RequestState, draft: Draft, output_ids: Sequence[int]) -> None:
        """What the text went on with where `draft` began, be it verified or not: all tokens since, at least one."""

    def record_step(self, step_record: StepRecord) -> None:
        """A step is over."""

    def enable_overlap(self) -> None:
        """Steps without drafts can be computed ahead of the host from now on, if nobody needs to be asked for several."""

    def record_overlap_step(self, step_record: StepRecord) -> None:
        """A step without drafts was computed ahead: what it took is what a draft has to beat."""

    def stats(self) -> DraftingStats:
        """Totals since the engine started."""


class FixedLength:
    """The first draft there is, at the server's bound, lowered by the request's own."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._length_counts: defaultdict[str, Counter[int]] = defaultdict(Counter)

    def start(self, state: RequestState) -> None: ...

    def finish(self, request_id: str) -> None: ...

    def max_draft_len(self, draft_request: DraftRequest) -> int:
        own = draft_request.state.params.speculation.max_tokens
        return self.max_tokens if own is None else min(self.max_tokens, own)

    def plan_draft_model(
        self, proposals: Sequence[Proposal], load: PrefillLoad, drafter: str, pending_rows: Sequence[int]
    ) -> list[tuple[int, float]]:
        return [(0 if offer.drafts else offer.request.max_tokens, 0.0) for offer in proposals]

    def select(self, proposals: Sequence[Proposal], load: PrefillLoad) -> list[Draft | None]:
        for offer in proposals:
            if offer.drafts:
                self._length_counts[offer.drafts[0].drafter][len(offer.drafts[0].token_ids)] += 1
        return [offer.drafts[0] if offer.drafts else None for offer in proposals]

    def fixed_draft_len(self, draft_requests: Sequence[DraftRequest]) -> int:
        lengths = {self.max_draft_len(ask) for ask in draft_requests}
        return lengths.pop() if len(lengths) == 1 else 0

    def num_steps_to_skip(self) -> int:
        return 0

    def record_skipped(self, num_steps: int, num_requests: int) -> None: ...

    def record_acceptance(self, state: RequestState, draft: Draft, output_ids: Sequence[int]) -> None: ...

    def record_step(self, step_record: StepRecord) -> None: ...

    def enable_overlap(self) -> None: ...

    def record_overlap_step(self, step_record: StepRecord) -> None: ...

    def stats(self) -> DraftingStats:
        return DraftingStats(
            draft_length_counts={drafter: dict(lengths) for drafter, lengths in self._length_counts.items()}
        )
