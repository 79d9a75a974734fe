# ruff: noqa: B027 (optional hooks have empty bodies)
"""The policy interface: which requests draft, and how much; what it is told of a step; the fixed length."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from foreword.core.outputs import Draft, DraftingStats
from foreword.core.request import RequestState
from foreword.speculation.engine_drafter import DraftRequest

NUM_COLD_STEPS = 3  # after proposing, until the caches are those of plain decoding


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """Prefill that shares the next step: its rows, and the context tokens that they read."""

    num_rows: int = 0
    num_context_tokens: int = 0


class RequestStep(NamedTuple):
    """One request in one step."""

    state: RequestState
    num_tokens: int  # known tokens that were computed
    num_draft_tokens: int  # verified
    is_sampled: bool  # whether a token was sampled
    num_emitted: int
    context_len: int  # tokens whose KV its last row read


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The requests of a step, and its duration."""

    requests: tuple[RequestStep, ...]
    seconds_by_stage: Mapping[str, float]  # schedule, assemble, forward, sample, draft, commit


@dataclass(slots=True)
class Proposal:
    """A draft request and the drafts proposed so far, in the order of the drafters."""

    request: DraftRequest
    drafts: list[Draft] = field(default_factory=list)


class Policy(ABC):
    """Decides who drafts and how much, for all requests of a step together. It never changes the output.

    Calls of a step: record_acceptance() for the last drafts, max_draft_len() for each request,
    may_propose() for each drafter, record_proposing() for those whose time is measured,
    plan_draft_model() for each model-based drafter, select(), num_steps_to_skip(), record_step() at its end.
    """

    def start(self, state: RequestState) -> int:
        """A request begins. Returns the steps before its first draft: skipping need not end for it."""
        return 0

    def finish(self, request_id: str) -> None:
        """A request ends."""

    @abstractmethod
    def max_draft_len(self, state: RequestState) -> int:
        """Longest draft to look for; 0: no draft in this step."""

    def may_propose(self, drafter: str, load: PrefillLoad) -> bool:
        """Whether to ask a drafter in this step."""
        return True

    def record_proposing(self, drafter: str, seconds: float) -> None:
        """The time that a lookup drafter took since the last call, also to start and finish requests."""

    @abstractmethod
    def plan_draft_model(
        self, proposals: Sequence[Proposal], load: PrefillLoad, drafter: str, pending_rows: Sequence[int]
    ) -> list[tuple[int, float]]:
        """(max_draft_tokens, min_prob) of each proposal for a model-based drafter; 0 tokens for no draft.

        pending_rows  rows that its model must compute before the first draft token
        """

    @abstractmethod
    def select(self, proposals: Sequence[Proposal], load: PrefillLoad) -> list[Draft | None]:
        """The draft to verify for each proposal: one of its drafts, possibly cut, or None."""

    def fixed_draft_len(self, states: Sequence[RequestState]) -> int:
        """Draft length of the device drafter for all these requests in all steps to come.

        0: decided per step. The device loop then reports its drafts with select() and record_acceptance().
        """
        return 0

    def num_steps_to_skip(self) -> int:
        """Steps without drafting from the next one on, unless a request begins; they are not recorded."""
        return 0

    def record_skipped(self, num_steps: int, num_requests: int) -> None:
        """Skipped steps are over; `num_requests` is summed over these steps."""

    def record_acceptance(self, state: RequestState, draft: Draft, output_ids: Sequence[int]) -> None:
        """The output from where `draft` began, verified or not: all tokens since, at least one.

        A model's draft is empty where no token was legal; then there are no output ids.
        """

    def record_step(self, step_record: StepRecord) -> None:
        """A step is over."""

    def enable_overlap(self) -> None:
        """From now on, steps without drafts can overlap with the host, if several are skipped in a row."""

    def record_plain_step(self, step_record: StepRecord) -> None:
        """A step in a row without proposing is over: its cost is the baseline of a draft."""

    @abstractmethod
    def stats(self) -> DraftingStats:
        """Totals since the engine started."""


class FixedLength(Policy):
    """The first proposed draft, up to the server's bound and the request's own."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._length_counts: defaultdict[str, Counter[int]] = defaultdict(Counter)

    def max_draft_len(self, state: RequestState) -> int:
        bound = state.params.speculation.max_draft_tokens
        return self.max_tokens if bound is None else min(self.max_tokens, bound)

    def plan_draft_model(
        self, proposals: Sequence[Proposal], load: PrefillLoad, drafter: str, pending_rows: Sequence[int]
    ) -> list[tuple[int, float]]:
        return [(0 if proposal.drafts else proposal.request.max_draft_tokens, 0.0) for proposal in proposals]

    def select(self, proposals: Sequence[Proposal], load: PrefillLoad) -> list[Draft | None]:
        selected = [proposal.drafts[0] if proposal.drafts else None for proposal in proposals]
        for draft in selected:
            if draft is not None:
                self._length_counts[draft.drafter][len(draft.token_ids)] += 1
        return selected

    def fixed_draft_len(self, states: Sequence[RequestState]) -> int:
        lengths = {self.max_draft_len(state) for state in states}
        return lengths.pop() if len(lengths) == 1 else 0

    def stats(self) -> DraftingStats:
        return DraftingStats({drafter: dict(lengths) for drafter, lengths in self._length_counts.items()})
