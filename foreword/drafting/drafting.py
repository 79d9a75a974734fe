"""All drafters of an engine behind one door: who is asked, what is verified, and what if one fails."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence, Set
from typing import TypeVar

from foreword.core.draft import Draft
from foreword.core.events import DraftingStats
from foreword.core.request import RequestState
from foreword.drafting.base import Ask, Drafter, Lender, PassDrafter
from foreword.drafting.control.costs import Timings
from foreword.drafting.policy import Load, Offer, Policy, StepFacts

__all__ = ["Drafting"]

Result = TypeVar("Result")
NOTHING_ELSE = Load()

logger = logging.getLogger(__name__)


class Drafting:
    """Asks the drafters for each request that goes on, and lets the policy decide what is verified.

    drafters  those that only look things up
    never     ids that are never sampled, so that no draft goes beyond one
    passes    those that run a model; they are asked after the others, and only where the policy wants it
    timings   what the policy was told of this machine, if it was
    errors    exceptions caught, by drafter, and by "policy"
    resting   nobody was asked for this step, or it was one of rounds: its measure is of no interest
    lender    the drafter that guesses in rounds, if there is one
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        vocab_size: int,
        policy: Policy,
        passes: Sequence[PassDrafter] = (),
        never: Set[int] = frozenset(),
    ) -> None:
        self.drafters = tuple(drafters)
        self.passes = tuple(passes)
        self.vocab_size = vocab_size
        self.never = never
        self.policy = policy
        self.timings: Timings | None = None
        self.errors: Counter[str] = Counter()
        self._live: dict[str, tuple[Drafter, ...]] = {}
        self._offered: dict[str, tuple[int, list[Draft]]] = {}
        self.resting = False
        self.lender = next((one for one in passes if isinstance(one, Lender) and one.ahead is not None), None)
        self._rest = 0
        self._rested = self._unasked = 0  # steps of a rest so far, and how often in them a request was not asked
        self._stats: DraftingStats | None = None

    @property
    def off(self) -> bool:
        """No drafter runs: a step has nothing to do here."""
        return not self.drafters and not self.passes

    def start(self, state: RequestState) -> None:
        """A request begins; a drafter that cannot start it is not asked about it again."""
        self._rest = 0
        self._live[state.id] = tuple(
            drafter
            for drafter in self._chosen(state)
            if self._guarded(drafter.name, lambda d=drafter: d.start(state) or True)  # type: ignore[misc]
        )
        if self._live[state.id]:  # the policy meets the others in the steps that serve them
            self._guarded("policy", lambda: self.policy.start(state))

    def finish(self, request_id: str, output: Sequence[int] = ()) -> None:
        """A request is over; `output` is what was delivered of an answer that ended by itself."""
        drafters = self._live.pop(request_id, ())
        self._offered.pop(request_id, None)
        for drafter in drafters:
            self._guarded(drafter.name, lambda d=drafter: d.finish(request_id, output))  # type: ignore[misc]
        if drafters:
            self._guarded("policy", lambda: self.policy.finish(request_id))

    def give_up(self, request_id: str) -> None:
        """No model can be asked about a request any more: its pictures cannot be shown to it."""
        drafters = self._live[request_id]
        self._live[request_id] = tuple(drafter for drafter in drafters if drafter not in self.passes)
        for model in (drafter for drafter in drafters if drafter in self.passes):
            self.errors[model.name] += 1
            self._guarded(model.name, lambda m=model: m.finish(request_id))  # type: ignore[misc]

    def propose(self, states: Sequence[RequestState], load: Load = NOTHING_ELSE) -> tuple[Draft | None, ...]:
        """What the next step shall verify of each request that has one token left to compute; None for nothing."""
        nothing: tuple[Draft | None, ...] = (None,) * len(states)
        self.resting = bool(states) and (self._rest > 0 or not any(self._live[state.id] for state in states))
        if not states:
            return nothing  # a step of prompts alone is in the books, also in a rest
        if self.resting:
            self._sit_out(states)
            return nothing
        self._stats = None
        if self._rested:
            self._guarded("policy", lambda: self.policy.rested(self._rested, self._unasked))
            self._rested = self._unasked = 0
        drafts = self._guarded("policy", lambda: self._propose(states, load)) or nothing
        self._rest = self._guarded("policy", self.policy.rest) or 0
        return drafts

    def _sit_out(self, states: Sequence[RequestState]) -> None:
        """A step in which nobody is asked: of a rest, or because none of its requests may be drafted for."""
        if self._rest:
            self._rest -= 1
            self._rested += 1
            self._unasked += sum(bool(self._live[state.id]) for state in states)

    def foreseen(self, states: Sequence[RequestState], steps: int = 1) -> int | None:
        """What so many steps from the next one on verify of each of these, whatever comes out of them: 0, nothing, for nobody
        is asked; or so many guesses of the lender. None: that is decided step by step."""
        if self._rest >= steps or not any(self._live[state.id] for state in states):
            return 0
        if self._rest or any(self._live[state.id] != (self.lender,) for state in states):
            return None
        return self._guarded("policy", lambda: self.policy.steady([Ask(state) for state in states])) or None

    def lend(self, states: Sequence[RequestState], num_tokens: int) -> bool:
        """See Lender.lend(); an error is counted, and the answer is no."""
        lender = self._lender
        return self._guarded(lender.name, lambda: lender.lend(states, num_tokens)) or False

    def extend(self, states: Sequence[RequestState], num_tokens: int) -> bool:
        """See Lender.extend(), and lend()."""
        lender = self._lender
        return self._guarded(lender.name, lambda: lender.extend(states, num_tokens)) or False

    def lent(self, state: RequestState) -> Sequence[int]:
        """The block table of a request in the lender's cache."""
        return self._lender.blocks(state)

    def take_back(self, state: RequestState, known: int) -> None:
        """See Lender.take_back()."""
        lender = self._lender
        self._guarded(lender.name, lambda: lender.take_back(state, known))

    def verified(self, drafts: Sequence[tuple[RequestState, Draft, Sequence[int]]]) -> None:
        """Drafts that rounds made and verified, each with what the text went on with."""
        self.resting, self._stats = True, None
        offers = [Offer(Ask(state, len(draft.token_ids)), [draft]) for state, draft, _ in drafts]
        self._guarded("policy", lambda: self.policy.admit(offers, NOTHING_ELSE))
        for state, draft, run in drafts:
            self._guarded("policy", lambda s=state, d=draft, r=run: self.policy.score(s, d, r))  # type: ignore[misc]

    @property
    def _lender(self) -> Lender:
        assert self.lender is not None
        return self.lender

    def measured(self, facts: StepFacts) -> None:
        """A step is over."""
        self._guarded("policy", lambda: self.policy.measured(facts))

    def expect_ahead(self) -> None:
        """See Policy.expect_ahead()."""
        self._guarded("policy", self.policy.expect_ahead)

    def ran_ahead(self, facts: StepFacts) -> None:
        """A step of a rest was computed ahead."""
        self._guarded("policy", lambda: self.policy.ran_ahead(facts))

    def stats(self) -> DraftingStats:
        """What was decided so far; the same object while nobody is asked."""
        if self._stats is None:
            self._stats = self._guarded("policy", self.policy.stats) or DraftingStats()
        return self._stats

    def check(self) -> None:
        """Assert that drafters keep state of live requests alone."""
        assert all(request_id in self._live for request_id in self._offered)
        for drafter in (*self.drafters, *self.passes):
            drafter.check(self._live)

    def _propose(self, states: Sequence[RequestState], load: Load) -> tuple[Draft | None, ...]:
        offers = self._offers(states)
        for drafter in self.drafters:
            self._collect(drafter, [offer for offer in offers.values() if drafter in self._live[offer.ask.state.id]])
        for model in self.passes:
            self._collect(model, self._worth_a_pass(model, offers, load))
        listed = list(offers.values())
        chosen: list[Draft | None] = [None] * len(states)
        for index, offer, draft in zip(offers, listed, self.policy.admit(listed, load), strict=True):
            chosen[index] = draft
            if offer.drafts:
                self._offered[offer.ask.state.id] = offer.ask.length, offer.drafts
        return tuple(chosen)

    def _offers(self, states: Sequence[RequestState]) -> dict[int, Offer]:
        """Those that may draft now, by index, each with the longest draft of use; what was offered before is scored."""
        offers: dict[int, Offer] = {}
        for index, state in enumerate(states):
            if not self._live[state.id]:
                continue
            begin, drafts = self._offered.pop(state.id, (0, ()))
            for draft in drafts:
                self.policy.score(state, draft, state.tokens[begin:])
            length = min(self.policy.bound(Ask(state)), state.limit - len(state.tokens) - 1)
            if length > 0:
                offers[index] = Offer(Ask(state, length))
        return offers

    def _worth_a_pass(self, model: PassDrafter, offers: dict[int, Offer], load: Load) -> list[Offer]:
        """The offers that `model` shall add to, asked for as much as the policy says."""
        mine = [offer for offer in offers.values() if model in self._live[offer.ask.state.id]]
        counted = self._guarded(model.name, lambda: [model.backlog(offer.ask) for offer in mine]) or []
        able = [offer for offer, backlog in zip(mine, counted, strict=False) if backlog]
        backlogs = [backlog for backlog in counted if backlog]
        if not able:
            return []
        wanted: list[Offer] = []
        for offer, (length, worth) in zip(able, self.policy.passes(able, load, model.name, backlogs), strict=True):
            if length > 0:
                ask = offer.ask
                offer.ask = Ask(ask.state, min(length, ask.max_tokens), worth)
                wanted.append(offer)
        return wanted

    def _collect(self, drafter: Drafter, offers: Sequence[Offer]) -> None:
        """Add to the offers what one drafter says."""
        if not offers:
            return
        asks = [offer.ask for offer in offers]
        found = self._guarded(drafter.name, lambda: self._ask(drafter, asks))
        for offer, draft in zip(offers, found or (), strict=False):
            if draft is not None:
                offer.drafts.append(draft)

    def _ask(self, drafter: Drafter, asks: list[Ask]) -> list[Draft | None]:
        """What one drafter says, up to the first id that cannot be right. Raises whatever is wrong with it."""
        drafts = drafter.propose(asks)
        return [self._legal(ask, drafter, draft) for ask, draft in zip(asks, drafts, strict=True)]

    def _legal(self, ask: Ask, drafter: Drafter, draft: Draft | None) -> Draft | None:
        """The draft up to its first id that is never sampled or that the grammar refuses, and not longer than asked for."""
        if draft is None:
            return None
        length = min(len(draft.token_ids), ask.max_tokens)
        for index, token_id in enumerate(draft.token_ids[:length]):
            if type(token_id) is not int or not 0 <= token_id < self.vocab_size or token_id in self.never:
                length = index
                break
        if ask.state.grammar is not None:
            length = ask.state.grammar.legal(draft.token_ids[:length])
        if length == len(draft.token_ids) and length and draft.drafter == drafter.name:
            return draft
        return Draft(draft.token_ids[:length], drafter.name, draft.confidence[:length]) if length else None

    def _chosen(self, state: RequestState) -> tuple[Drafter, ...]:
        """The drafters that the request lets guess for it."""
        method, drafters = state.params.speculation.method, (*self.drafters, *self.passes)
        if method == "auto":
            return drafters
        return tuple(drafter for drafter in drafters if drafter.name == method)

    def _guarded(self, name: str, call: Callable[[], Result]) -> Result | None:
        try:
            return call()
        except Exception:
            self.errors[name] += 1
            count = self.errors[name]
            if count & (count - 1) == 0:  # 1, 2, 4, ...: what fails in every step would flood the log
                logger.exception("drafter %s failed, %d times so far; its drafts of these steps are dropped", name, count)
            return None
