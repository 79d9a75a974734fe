"""What the door of drafting asks whoever decides how much to draft, and the simplest such decision."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from foreword.core.draft import Draft
from foreword.core.events import DraftingStats
from foreword.core.request import RequestState
from foreword.drafting.base import Ask

__all__ = ["FixedLength", "Load", "Offer", "Policy", "Served", "StepFacts"]


@dataclass(slots=True)
class Offer:
    """An ask with what was guessed for it so far, in the order of the drafters."""

    ask: Ask
    drafts: list[Draft] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Load:
    """What the next step computes beside the requests that ask: rows of prompts, and the tokens that these rows read."""

    prompt_rows: int = 0
    prompt_reads: int = 0


@dataclass(frozen=True, slots=True)
class Served:
    """One request in one step.

    num_tokens  known tokens that were computed
    num_draft   drafted tokens that were verified
    samples     a token came out
    emitted     tokens emitted
    context     tokens whose KV its last row read
    """

    state: RequestState
    num_tokens: int
    num_draft: int
    samples: bool
    emitted: int
    context: int


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What a step did, and its seconds by stage (schedule, assemble, forward, sample, draft, commit)."""

    served: tuple[Served, ...]
    seconds: Mapping[str, float]


class Policy(Protocol):
    """Decides, for all requests of a step together, who drafts and how much. Guesses change no token, so neither does this.

    The door calls, before each step: score() for what was offered last, bound() for each ask, passes() for each
    drafter that runs a model, admit(), rest(), and after it measured().
    """

    def start(self, state: RequestState) -> None:
        """A request begins."""

    def finish(self, request_id: str) -> None:
        """A request is over."""

    def bound(self, ask: Ask) -> int:
        """Longest draft worth looking for; 0: leave the request alone this time."""

    def passes(self, offers: Sequence[Offer], load: Load, drafter: str, backlogs: Sequence[int]) -> list[tuple[int, float]]:
        """For each offer, (tokens, worth) that `drafter`, which runs a model, should guess; 0 tokens for none.

        backlogs  rows that its model must compute before the first guess
        """

    def admit(self, offers: Sequence[Offer], load: Load) -> list[Draft | None]:
        """For each offer the draft that is verified: one of its drafts, cut; None for none."""

    def steady(self, asks: Sequence[Ask]) -> int:
        """How many tokens a drafter that runs a model guesses for each of these in all steps to come, as long as there are no
        others, and all are verified; 0: that is decided step by step. admit() and score() tell what became of it."""

    def rest(self) -> int:
        """For how many steps nobody needs to be asked, unless a request begins; they have no drafts, and are not measured."""

    def rested(self, steps: int, asks: int) -> None:
        """A rest is over after so many steps, in which `asks` times a request was not asked."""

    def score(self, state: RequestState, draft: Draft, run: Sequence[int]) -> None:
        """What the text went on with where `draft` began, be it verified or not: all tokens since, at least one."""

    def measured(self, facts: StepFacts) -> None:
        """A step is over."""

    def expect_ahead(self) -> None:
        """Steps without drafts can be computed ahead of the host from now on, if nobody needs to be asked for several."""

    def ran_ahead(self, facts: StepFacts) -> None:
        """A step without drafts was computed ahead: what it took is what a draft has to beat."""

    def stats(self) -> DraftingStats:
        """Totals since the engine started."""


class FixedLength:
    """The first draft there is, at the server's bound, lowered by the request's own."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._lengths: defaultdict[str, Counter[int]] = defaultdict(Counter)

    def start(self, state: RequestState) -> None: ...

    def finish(self, request_id: str) -> None: ...

    def bound(self, ask: Ask) -> int:
        own = ask.state.params.speculation.max_tokens
        return self.max_tokens if own is None else min(self.max_tokens, own)

    def passes(self, offers: Sequence[Offer], load: Load, drafter: str, backlogs: Sequence[int]) -> list[tuple[int, float]]:
        return [(0 if offer.drafts else offer.ask.max_tokens, 0.0) for offer in offers]

    def admit(self, offers: Sequence[Offer], load: Load) -> list[Draft | None]:
        for offer in offers:
            if offer.drafts:
                self._lengths[offer.drafts[0].drafter][len(offer.drafts[0].token_ids)] += 1
        return [offer.drafts[0] if offer.drafts else None for offer in offers]

    def steady(self, asks: Sequence[Ask]) -> int:
        lengths = {self.bound(ask) for ask in asks}
        return lengths.pop() if len(lengths) == 1 else 0

    def rest(self) -> int:
        return 0

    def rested(self, steps: int, asks: int) -> None: ...

    def score(self, state: RequestState, draft: Draft, run: Sequence[int]) -> None: ...

    def measured(self, facts: StepFacts) -> None: ...

    def expect_ahead(self) -> None: ...

    def ran_ahead(self, facts: StepFacts) -> None: ...

    def stats(self) -> DraftingStats:
        return DraftingStats(lengths={drafter: dict(lengths) for drafter, lengths in self._lengths.items()})
