"""How much to draft: measured costs, learned acceptance, and nobody slower than without.

Each step maximises expected tokens by cost over all requests together (admission), within what every request may be
delayed (ledger). Beliefs about costs and acceptance are corrected by each step; a watchdog doubts the result as a whole.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from foreword.core.draft import Draft
from foreword.core.events import DraftingStats
from foreword.core.request import RequestState
from foreword.drafting.acceptance import PASS_PRIORS, Rates, Record
from foreword.drafting.admission import best_count, split
from foreword.drafting.base import Ask
from foreword.drafting.cascade import FEW, Member, Plan, plans
from foreword.drafting.costs import Calibration, PassCost, Shape, sampling_class
from foreword.drafting.ledger import ALLOWANCE, Account, Ledger
from foreword.drafting.machine import Machine
from foreword.drafting.policy import Load, Offer, StepFacts
from foreword.drafting.watchdog import Budget

__all__ = ["Controller"]

LEAST_CHANCE = 0.01  # guesses less likely than this are never worth a row
PATIENCE = 4  # asks without a draft that pays before a request is left alone for a while
LONGEST_NAP = 8  # asks, while nothing is offered
LONGEST_SLEEP = 32  # asks, while what is offered does not pay
TRUST = 1.0  # a request may be delayed by so much of what it expects from its own draft
FITTINGS = 4  # of a choice into the ledger
AWAKE = 8  # rounds that nobody is left alone after a model drafted: it may for all in the same passes
PROVEN = 16  # guesses of a drafter that were scored, before more is invested in it than
STAKE = 5.0  # plain steps, once
PLANS = 12  # that are looked at for one that the ledger allows
LONGEST_PASSES = 16  # tokens that a model is asked for
TYPICAL_ANSWER = 128.0  # tokens, before any has ended
UNOFFERED, UNPAID, INDEBTED, WATCHED, ASLEEP = "nothing to guess from", "does not pay", "ledger", "watchdog", "asleep"

logger = logging.getLogger(__name__)


class _Request:
    """What the controller knows of a request.

    bound    longest draft of use: the request's own bound, or the server's
    kind     its sampling class
    records  how each drafter does on it
    missed   asks in a row without a draft that paid
    wakes    round of asks until which it is left alone
    read     drafters' models have read its prompt once
    context  tokens that its next row reads
    tried    model seconds of a pass whose only use was to learn
    """

    __slots__ = ("account", "bound", "context", "kind", "missed", "read", "records", "state", "tried", "wakes")

    def __init__(self, state: RequestState, bound: int, account: Account) -> None:
        own = state.params.speculation.max_tokens
        self.state = state
        self.account = account
        self.bound = bound if own is None else min(own, bound)
        self.kind = sampling_class(state.params)
        self.records: defaultdict[str, Record] = defaultdict(Record)
        self.missed = self.wakes = self.context = 0
        self.read = False
        self.tried = 0.0


@dataclass(slots=True)
class _Candidate:
    """The best draft of an offer: the chance of each guess, and the same less what its row costs beyond any row."""

    index: int
    request: _Request
    draft: Draft
    chances: Sequence[float]
    gains: Sequence[float]


@dataclass(frozen=True, slots=True)
class _Frame:
    """The next step without drafts: what it computes, what it costs, and what plain decoding would take for its tokens."""

    shape: Shape
    cost: float
    plain: float
    prompts: bool


class Controller:
    """The policy of adaptive drafting. All time comes in by measured(): the same calls give the same decisions.

    calibration  what steps cost on this machine
    max_tokens   longest draft
    passes       what a pass costs, of each drafter that runs a model
    """

    def __init__(self, calibration: Calibration, max_tokens: int, passes: Mapping[str, PassCost] | None = None) -> None:
        self._max_tokens = max_tokens
        self._machine = Machine(calibration, passes or {})
        self._rates: defaultdict[str, Rates] = defaultdict(Rates)
        self._rates.update({drafter: Rates(PASS_PRIORS) for drafter in passes or {}})
        self._ledger = Ledger()
        self._budget = Budget()
        self._requests: dict[str, _Request] = {}
        self._kinds: dict[str, int] = {}
        self._typical_answer = TYPICAL_ANSWER
        self._round = 0
        self._last_plan = -AWAKE
        self._asking: list[_Request] = []
        self._strangers: dict[str, Account] = {}
        self._frame: _Frame | None = None
        self._rate = 0.0
        self._drafting = 0.0
        self._stakes = 0.0
        self._lengths: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self._none: Counter[str] = Counter()

    def start(self, state: RequestState) -> None:
        account = self._ledger.open(state.id, state.params.max_tokens)
        request = self._requests[state.id] = _Request(state, self._max_tokens, account)
        if request.kind:
            self._kinds[state.id] = request.kind

    def finish(self, request_id: str) -> None:
        request = self._requests.pop(request_id)
        self._typical_answer += (request.state.num_output - self._typical_answer) / 16
        self._kinds.pop(request_id, None)
        self._ledger.close(request_id)

    def score(self, state: RequestState, draft: Draft, run: Sequence[int]) -> None:
        request = self._requests[state.id]
        right = self._rates[draft.drafter].score(draft, run, request.records[draft.drafter])
        if request.tried and self._machine.models(draft.drafter):
            if right:
                self._budget.refund(request.tried)
            request.tried = 0.0

    def bound(self, ask: Ask) -> int:
        request = self._requests[ask.state.id]
        request.context = ask.length
        self._asking.append(request)
        if self._machine.watchdog.resting:
            self._say_none(request, WATCHED)
            return 0
        if request.wakes > self._round >= self._last_plan + AWAKE:
            self._say_none(request, ASLEEP)
            return 0
        return request.bound

    def passes(self, offers: Sequence[Offer], load: Load, drafter: str, backlogs: Sequence[int]) -> list[tuple[int, float]]:
        wanted = [(0, 0.0)] * len(offers)
        if self._machine.watchdog.wants_plain or not offers:
            return wanted
        frame = self._framed(load)
        plan = self._plan(offers, drafter, backlogs, frame)
        if plan is None:
            self._explore(offers, drafter, backlogs, wanted)
            return wanted
        self._last_plan = self._round
        worth = self._worth(plan, drafter, frame)
        requests = [self._request(offers[member.index]) for member in plan.members]
        staked = self._staked(plan, requests, drafter)
        self._stakes += staked
        for member in plan.members:
            wanted[member.index] = plan.length, worth
        for request in self._asking if staked else requests:
            if staked or not request.read:
                request.account.lead += plan.invested
        for request in requests:
            request.read = True
        self._drafting += plan.seconds + plan.invested
        return wanted

    def admit(self, offers: Sequence[Offer], load: Load) -> list[Draft | None]:
        admitted: list[Draft | None] = [None] * len(offers)
        found = self._candidates(offers)
        lengths, reason = self._chosen(found, self._framed(load)) if found else ([], UNPAID)
        for candidate, length in zip(found, lengths, strict=True):
            if length:
                admitted[candidate.index] = self._give(candidate, length)
            else:
                self._miss(candidate.request, reason, LONGEST_SLEEP if reason is UNPAID else 0)
        self._asking.clear()
        self._round += 1
        self._frame = None
        return admitted

    def measured(self, facts: StepFacts) -> None:
        machine = self._machine
        tally = machine.tally(facts.served, self._kinds)
        plain = machine.costs.of(tally.plain.plus(len(self._ledger.ghosts), self._ledger.ghost_context))
        cost, drafting = machine.measured(tally, facts.seconds, self._drafting)
        self._drafting = 0.0
        self._ledger.settle(facts.served, plain, cost + drafting)
        self._budget.earn(cost + drafting)
        if len(self._ledger.accounts) > len(self._requests) or self._strangers:
            self._note_strangers({one.state.id for one in facts.served})

    def stats(self) -> DraftingStats:
        return DraftingStats(
            lengths={drafter: dict(lengths) for drafter, lengths in self._lengths.items()},
            none=dict(self._none),
            predicted_seconds=self._machine.predicted,
            realised_seconds=self._machine.realised,
            exploring_seconds=max(self._budget.spent, 0.0) * self._machine.drift,
        )

    # The next step

    def _framed(self, load: Load) -> _Frame:
        """The next step, from those that asked this round and those that never ask."""
        if self._frame is None:
            requests = len(self._asking) + len(self._strangers)
            context = sum(request.context for request in self._asking) + load.prompt_reads
            context += sum(account.context for account in self._strangers.values())
            extra = 0.0
            if self._kinds:
                extra = sum(self._machine.prices.extra(request.kind) for request in self._asking if request.kind)
            shape = Shape(requests + load.prompt_rows, requests, context, 0, extra)
            cost = plain = self._machine.costs.of(shape)
            if self._ledger.ghosts:
                plain = self._machine.costs.of(shape.plus(len(self._ledger.ghosts), self._ledger.ghost_context))
            self._frame = _Frame(shape, cost, plain, load.prompt_rows > 0)
        return self._frame

    def _note_strangers(self, served: set[str]) -> None:
        """Requests that may not be drafted for are known from the steps they are in, and forgotten with them."""
        for request_id in [id_ for id_ in self._ledger.accounts if id_ not in self._requests and id_ not in served]:
            self._ledger.close(request_id)
        self._strangers = {id_: a for id_, a in self._ledger.accounts.items() if id_ not in self._requests}

    def _patience_of_others(self, drafted_for: Iterable[_Request], frame: _Frame) -> float:
        """How much the next step may be delayed for the sake of some of its requests, as the others see it."""
        accounts = {id(request.account) for request in drafted_for}
        others = [request.account for request in self._asking if id(request.account) not in accounts]
        slacks = [account.slack(frame.plain) for account in (*others, *self._strangers.values())]
        if frame.prompts:
            slacks.append(ALLOWANCE * frame.plain)
        return max(min(slacks, default=float("inf")), 0.0)

    # Which drafts are verified

    def _candidates(self, offers: Sequence[Offer]) -> list[_Candidate]:
        """The best draft of each offer that has one with a chance."""
        watched = self._machine.watchdog.wants_plain
        found: list[_Candidate] = []
        for index, offer in enumerate(offers):
            request = self._request(offer)
            if watched or not offer.drafts:
                self._miss(request, WATCHED if watched else UNOFFERED, 0 if watched else LONGEST_NAP)
                continue
            candidate = self._candidate(index, request, offer.drafts)
            if candidate.gains:
                found.append(candidate)
            else:
                self._miss(request, UNPAID, LONGEST_SLEEP)
        return found

    def _candidate(self, index: int, request: _Request, drafts: Sequence[Draft]) -> _Candidate:
        best, chances, most = drafts[0], self._chances(request, drafts[0]), -1.0
        for draft in drafts[1:]:
            most = sum(chances) if most < 0.0 else most
            others = self._chances(request, draft)
            if (tokens := sum(others)) > most:
                best, chances, most = draft, others, tokens
        return _Candidate(index, request, best, chances, self._net(request, chances))

    def _chances(self, request: _Request, draft: Draft) -> list[float]:
        return self._rates[draft.drafter].chances(draft, request.records[draft.drafter], LEAST_CHANCE)

    def _net(self, request: _Request, chances: Sequence[float]) -> Sequence[float]:
        """Chances less the tokens that could be had in the time that each row takes beyond any row."""
        machine = self._machine
        price = self._rate * (machine.costs.reading(request.context) + machine.prices.extra(request.kind))
        return [chance - price for chance in chances if chance > price] if price else chances

    def _chosen(self, found: Sequence[_Candidate], frame: _Frame) -> tuple[list[int], str]:
        """How many tokens of each candidate are verified, and why not those of the others."""
        gains = [candidate.gains for candidate in found]
        costs = self._machine.costs.with_further(frame.shape, sum(map(len, gains)))
        sunk, nothing = self._drafting, [0] * len(found)
        rated = [cost + sunk for cost in costs] if sunk else costs
        limit = frame.plain + self._patience_of_others((candidate.request for candidate in found), frame)
        reason = UNPAID
        for fitting in range(FITTINGS):
            count = best_count(gains, frame.shape.sampled, rated, limit + sunk)
            if not count:
                return nothing, reason
            lengths = split(gains, count)
            reason = INDEBTED
            allowed = frame.plain + self._least_patience(found, lengths, frame)
            if costs[count] <= allowed:
                if self._wants_plain(frame):
                    return nothing, WATCHED
                self._rate = (frame.shape.sampled + _expected(found, lengths)) / rated[count]
                return lengths, UNPAID
            limit = allowed if fitting < FITTINGS - 2 else frame.plain
        return nothing, reason

    def _wants_plain(self, frame: _Frame) -> bool:
        """Give a step of speculation up, that the watchdog knows what plain ones take, if that was saved up for."""
        lost = frame.plain - frame.shape.sampled / self._rate if self._rate else frame.plain
        return self._machine.watchdog.stale and self._budget.take(max(lost, 0.0))

    def _least_patience(self, found: Sequence[_Candidate], lengths: Sequence[int], frame: _Frame) -> float:
        """How much the requests drafted for bear to be delayed, each in view of what it expects."""
        patience = min(
            candidate.request.account.slack(frame.plain) + TRUST * frame.plain * sum(candidate.chances[:length])
            for candidate, length in zip(found, lengths, strict=True)
        )
        return max(patience, 0.0)

    def _give(self, candidate: _Candidate, length: int) -> Draft:
        draft = candidate.draft
        candidate.request.missed = 0
        self._lengths[draft.drafter][length] += 1
        if length == len(draft.token_ids):
            return draft
        return Draft(draft.token_ids[:length], draft.drafter, draft.confidence[:length])

    def _miss(self, request: _Request, reason: str, longest: int) -> None:
        """No draft this time; a request that has had none for long is left alone for growing spells.

        Spells are powers of two and end where such a number divides the round: requests wake together, so that a model
        can draft for all of them in the same passes.
        """
        request.missed += 1
        if request.missed > PATIENCE and longest:
            spell = min(1 << min(request.missed - PATIENCE, 10), longest)
            request.wakes = (self._round // spell + 1) * spell
        self._say_none(request, reason)

    def _say_none(self, request: _Request, reason: str) -> None:
        self._none[reason] += 1
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("request %s: no draft: %s", request.state.id, reason)

    def _request(self, offer: Offer) -> _Request:
        return self._requests[offer.ask.state.id]

    # Drafters that run a model

    def _plan(self, offers: Sequence[Offer], drafter: str, backlogs: Sequence[int], frame: _Frame) -> Plan | None:
        """The best use of the drafter that pays and that nobody is delayed by too much."""
        found = {candidate.index: candidate for candidate in self._offered(offers)}
        lengths, _ = self._chosen(list(found.values()), frame) if found else ([], "")
        given = dict(zip(found, lengths, strict=True))
        members = [
            self._member(index, offer, drafter, backlog, found[index].chances[: given[index]] if index in found else ())
            for index, (offer, backlog) in enumerate(zip(offers, backlogs, strict=True))
        ]
        rows = sum(lengths)
        costs = self._machine.costs.with_further(frame.shape, rows + LONGEST_PASSES * len(members))
        tokens = frame.shape.sampled + sum(member.tokens for member in members)
        paying = plans(members, tokens, rows, costs, partial(self._machine.drafting, drafter))
        return next((plan for plan in paying[:PLANS] if self._bearable(plan, offers, drafter, frame)), None)

    def _offered(self, offers: Sequence[Offer]) -> list[_Candidate]:
        return [self._candidate(index, self._request(offer), offer.drafts) for index, offer in enumerate(offers) if offer.drafts]

    def _member(self, index: int, offer: Offer, drafter: str, backlog: int, given: Sequence[float]) -> Member:
        request, ask = self._request(offer), offer.ask
        record = request.records[drafter]
        chances = self._rates[drafter].foreseen(record, min(ask.max_tokens, LONGEST_PASSES))
        written = ask.length - ask.state.num_prompt
        left = min(max(self._typical_answer - written, self._typical_answer / 4), ask.state.limit - ask.length)
        return Member(index, chances, sum(given), len(given), backlog, max(left / (1 + sum(chances[:4])), 1.0))

    def _bearable(self, plan: Plan, offers: Sequence[Offer], drafter: str, frame: _Frame) -> bool:
        delay = plan.seconds + plan.cost - frame.plain
        requests = [self._request(offers[member.index]) for member in plan.members]
        staked = self._staked(plan, requests, drafter)
        if staked and self._stakes + staked > STAKE * frame.plain:
            return False
        if delay + plan.invested - staked > self._patience_of_others(requests, frame):
            return False
        return all(
            self._bears(plan, member, request, delay, frame.plain) for member, request in zip(plan.members, requests, strict=True)
        )

    def _staked(self, plan: Plan, requests: Iterable[_Request], drafter: str) -> float:
        """What is invested in a drafter of which nothing is known yet: all bear it, but once."""
        unproven = self._rates[drafter].trials < PROVEN and not all(request.read for request in requests)
        return plan.invested if unproven else 0.0

    def _bears(self, plan: Plan, member: Member, request: _Request, delay: float, step: float) -> bool:
        """Whether it is likely enough to pay for a request, on which a model's first look is spent but once."""
        hoped = TRUST * step * member.hoped(plan.length)
        slack = request.account.slack(step)
        if request.read:
            return delay + plan.invested <= slack + hoped
        return delay <= slack + hoped and plan.invested <= 0.5 * member.horizon * (hoped - delay)

    def _worth(self, plan: Plan, drafter: str, frame: _Frame) -> float:
        """The chance below which a further guess is not worth its pass and its row, as the drafter itself would state it."""
        members = len(plan.members)
        seconds = self._machine.drafting(drafter, members, members, 1) / members
        row = max(plan.cost - frame.cost, 0.0) / (members * plan.length)
        return self._rates[drafter].stated(plan.rate * (seconds + row))

    def _explore(self, offers: Sequence[Offer], drafter: str, backlogs: Sequence[int], wanted: list[tuple[int, float]]) -> None:
        """Try one token of a drafter that is not believed to pay, if that was saved up for."""
        least = max(min(backlogs), FEW)
        tried = [index for index, backlog in enumerate(backlogs) if backlog <= least]
        seconds = self._machine.drafting(drafter, sum(backlogs[index] for index in tried), len(tried), 1)
        if self._budget.take(seconds):
            self._drafting += seconds
            for index in tried:
                wanted[index] = 1, 0.0
                self._request(offers[index]).tried = seconds / len(tried)


def _expected(found: Sequence[_Candidate], lengths: Sequence[int]) -> float:
    """Tokens expected from the drafts, cut to `lengths`."""
    return sum(sum(candidate.chances[:length]) for candidate, length in zip(found, lengths, strict=True))
