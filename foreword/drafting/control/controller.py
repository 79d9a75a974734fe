"""How much to draft: measured costs, learned acceptance, and nobody slower than without.

Each step maximises expected tokens by cost over all requests together (admission), within what every request may be
delayed (ledger). Beliefs about costs and acceptance are corrected by each step; a watchdog doubts the result as a whole.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

from foreword.core.draft import Draft
from foreword.core.events import DraftingStats
from foreword.core.request import RequestState
from foreword.drafting.base import Ask
from foreword.drafting.control.acceptance import PASS_PRIOR_TRIALS, PASS_PRIORS, Rates
from foreword.drafting.control.admission import Candidate, Choice, choose, nearest
from foreword.drafting.control.cascade import FEW, LONGEST, Cascade, Member, Plan, plans
from foreword.drafting.control.costs import Calibration, PassCost, Shape
from foreword.drafting.control.frame import Frame, Tracked
from foreword.drafting.control.ledger import Account, Ledger
from foreword.drafting.control.machine import Machine
from foreword.drafting.control.naps import Naps
from foreword.drafting.control.watchdog import Budget
from foreword.drafting.policy import Load, Offer, StepFacts

__all__ = ["Controller"]

ROWS_TOGETHER, LEAST_BOUND = 128, 4  # guesses that all requests together are asked for, and each at least
LEAST_CHANCE = 0.01  # guesses less likely than this are never worth a row
LONGEST_NAP = 32  # rounds, while nothing is offered
LONGEST_SLEEP = 64  # rounds, while what is offered does not pay
LONGEST_WAIT = 8  # asks, while others would be delayed by too much: asking in vain delays them as well
AWAKE = 8  # rounds that nobody is left alone after a model drafted: it may for all in the same passes
MEASURED = 2  # last steps of a rest, for the watchdog to compare with what comes after
BETWEEN_TRIALS = 32  # rounds
PROVEN = 16  # guesses of a model that were scored, before more is invested in it than a stake
TYPICAL_ANSWER = 128.0  # tokens, before any has ended
UNOFFERED, UNPAID, INDEBTED, WATCHED, ASLEEP = "nothing to guess from", "does not pay", "ledger", "watchdog", "asleep"

logger = logging.getLogger(__name__)


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
        self._rates.update({drafter: Rates(PASS_PRIORS, PASS_PRIOR_TRIALS) for drafter in passes or {}})
        self._cascades = {drafter: Cascade() for drafter in passes or {}}
        self._ledger = Ledger()
        self._budget = Budget()
        self._requests: dict[str, Tracked] = {}
        self._kinds: dict[str, int] = {}
        self._strangers: dict[str, Account] = {}
        self._typical_answer = TYPICAL_ANSWER
        self._round = 0
        self._last_plan = -AWAKE
        self._last_trial = 0
        self._asking: list[Tracked] = []
        self._frame: Frame | None = None
        self._rate = 0.0
        self._drafting = 0.0
        self._idle = 0
        self._vain: Counter[str] = Counter()
        self._unplanned: Counter[str] = Counter()
        self._in_vain = False
        self._naps = Naps()
        self._step = 0.0
        self._lengths: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self._none: Counter[str] = Counter()

    # The life of a request

    def start(self, state: RequestState) -> None:
        account = self._ledger.open(state.id, state.params.max_tokens)
        request = self._requests[state.id] = Tracked(state, self._max_tokens, account)
        self._naps.start(request, self._ledger.typical)
        self._unplanned.clear()
        if request.kind:
            self._kinds[state.id] = request.kind

    def finish(self, request_id: str) -> None:
        request = self._requests.pop(request_id)
        self._typical_answer += (request.state.num_output - self._typical_answer) / 16
        self._kinds.pop(request_id, None)
        self._ledger.close(request_id)

    # A round

    def score(self, state: RequestState, draft: Draft, run: Sequence[int]) -> None:
        request = self._requests[state.id]
        right = self._rates[draft.drafter].score(draft, run, request.records[draft.drafter])
        if request.tried and draft.drafter in self._cascades:
            if right:
                self._budget.refund(request.tried)
            request.tried = 0.0
        request.guessed |= right > 0

    def bound(self, ask: Ask) -> int:
        request = self._requests[ask.state.id]
        request.context = ask.length
        if not self._asking:
            self._drafting = 0.0  # of a step that was not measured
        self._asking.append(request)
        if self._machine.watchdog.resting:
            self._say_none(request, WATCHED)
            return 0
        if request.wakes > self._round >= self._last_plan + AWAKE:
            self._say_none(request, ASLEEP)
            return 0
        self._ledger.note(request.account, request.guessed)
        request.guessed = False
        return min(request.bound, max(ROWS_TOGETHER // len(self._requests), LEAST_BOUND))

    def passes(self, offers: Sequence[Offer], load: Load, drafter: str, backlogs: Sequence[int]) -> list[tuple[int, float]]:
        wanted = [(0, 0.0)] * len(offers)
        if self._watched(load) or not offers:
            return wanted
        frame = self._framed(load)
        if self._round < self._unplanned[drafter]:
            return wanted
        plan = self._plan(offers, drafter, backlogs, frame)
        if plan is None:
            self._vain[drafter] += 1
            self._unplanned[drafter] = self._round + self._naps.spell(self._vain[drafter], LONGEST_NAP)
            self._explore(offers, drafter, backlogs, wanted)
            return wanted
        self._vain[drafter] = 0
        worth = self._worth(plan, drafter, frame)
        for member in plan.members:
            wanted[member.index] = plan.length, worth
        self._last_plan = self._round
        self._drafting += plan.seconds + plan.invested
        return wanted

    def admit(self, offers: Sequence[Offer], load: Load) -> list[Draft | None]:
        admitted: list[Draft | None] = [None] * len(offers)
        found = self._candidates(offers, self._watched(load))
        choice, reason = self._chosen(found, self._framed(load)) if found else (Choice(()), UNPAID)
        for candidate, length in zip(found, choice.lengths, strict=True):
            if length:
                admitted[candidate.index] = self._give(candidate, length)
            else:
                self._miss(candidate.request, reason, LONGEST_SLEEP if reason is UNPAID else LONGEST_WAIT)
        self._in_vain = bool(offers) and not self._drafting
        self._idle = 0 if any(choice.lengths) else self._idle_rounds()
        self._frame = None
        self._round += 1
        self._asking.clear()
        return admitted

    def steady(self, asks: Sequence[Ask]) -> int:
        """Never: what a draft is worth is known once it is there, and what it costs only where its passes are timed."""
        return 0

    def rest(self) -> int:
        idle, self._idle = self._idle, 0
        return idle

    def rested(self, steps: int, asks: int) -> None:
        self._round += steps
        self._none[WATCHED if self._machine.watchdog.resting else ASLEEP] += asks
        self._machine.watchdog.rested(steps)
        self._ledger.wait(steps * self._step)

    def measured(self, facts: StepFacts) -> None:
        machine = self._machine
        tally = machine.tally(facts.served, self._kinds)
        self._step = self._plainly(tally.plain, not tally.decoding)
        cost, drafting = machine.measured(tally, facts.seconds, self._drafting)
        if self._in_vain:
            self._naps.asked_in_vain(drafting / cost + 1.0 - self._ahead(not tally.decoding))
        self._drafting = 0.0
        self._ledger.settle(facts.served, self._step, cost + drafting, machine.costs.saved(tally.plain))
        self._budget.earn((cost + drafting) * machine.drift)
        if len(self._ledger.accounts) > len(self._requests) or self._strangers:
            self._note_strangers({one.state.id for one in facts.served})

    def expect_ahead(self) -> None:
        self._machine.expect_ahead()

    def ran_ahead(self, facts: StepFacts) -> None:
        self._machine.ran_ahead(self._machine.tally(facts.served, self._kinds), facts.seconds)

    def stats(self) -> DraftingStats:
        return DraftingStats(
            lengths={drafter: dict(lengths) for drafter, lengths in self._lengths.items()},
            none=dict(self._none),
            predicted_seconds=self._machine.predicted,
            realised_seconds=self._machine.realised,
            exploring_seconds=self._budget.spent,
        )

    # The next step

    def _framed(self, load: Load) -> Frame:
        """The next step, from those that asked this round and those that never ask."""
        if self._frame is None:
            machine = self._machine
            accounts = [request.account for request in self._asking]
            context = load.prompt_reads + sum(request.context for request in self._asking)
            if self._strangers:
                accounts += self._strangers.values()
                context += sum(account.context for account in self._strangers.values())
            extra = sum(machine.prices.extra(request.kind) for request in self._asking) if self._kinds else 0.0
            shape = Shape(len(accounts) + load.prompt_rows, len(accounts), context, 0, extra)
            self._frame = Frame(
                shape, machine.costs.of(shape), self._plainly(shape, load.prompt_rows > 0), accounts, load.prompt_rows > 0
            )
        return self._frame

    def _ahead(self, prompts: bool) -> float:
        """What the next step takes without drafts, as a share of what it takes if they are asked for."""
        return 1.0 if prompts else self._machine.ahead_of(self._kinds.values())

    def _plainly(self, shape: Shape, prompts: bool) -> float:
        """What plain decoding would take for a step, which would still serve the ghosts."""
        ghosts = self._ledger.ghosts
        costs = self._machine.costs
        return self._ahead(prompts) * costs.of(shape.plus(len(ghosts), self._ledger.ghost_context) if ghosts else shape)

    def _costs(self, frame: Frame, rows: int) -> Sequence[float]:
        """Of the step with 0, 1, ... drafted rows; without any it could be computed ahead."""
        costs, ahead = self._machine.costs.with_further(frame.shape, rows), self._ahead(frame.prompts)
        return costs if ahead == 1.0 else [ahead * costs[0], *costs[1:]]

    def _idle_rounds(self) -> int:
        """For how many rounds from the next on nobody would draft. Who has not asked yet could at any time."""
        watchdog = self._machine.watchdog
        if len(self._asking) < len(self._requests) or not self._asking:
            return 0
        if watchdog.resting:
            return max(watchdog.resting - MEASURED, 0)
        if self._round + 1 < self._last_plan + AWAKE:
            return 0
        return max(min(request.wakes for request in self._asking) - (self._round + 1), 0)

    def _note_strangers(self, served: set[str]) -> None:
        """Requests that may not be drafted for are known from the steps they are in, and forgotten with them."""
        for request_id in [id_ for id_ in self._ledger.accounts if id_ not in self._requests and id_ not in served]:
            self._ledger.close(request_id)
        self._strangers = {id_: a for id_, a in self._ledger.accounts.items() if id_ not in self._requests}

    # Which drafts are verified

    def _watched(self, load: Load) -> bool:
        """The watchdog wants a plain step; one that computes prompts beside would tell it nothing."""
        return self._machine.watchdog.wants_plain and not load.prompt_rows

    def _candidates(self, offers: Sequence[Offer], watched: bool) -> list[Candidate]:
        """The best draft of each offer that has one with a chance."""
        found: list[Candidate] = []
        for index, offer in enumerate(offers):
            request = self._request(offer)
            if not offer.drafts:
                self._miss(request, UNOFFERED, LONGEST_NAP)
                continue
            if watched:
                self._say_none(request, WATCHED)
                continue
            candidate = self._candidate(index, request, offer.drafts)
            if candidate.gains:
                found.append(candidate)
            else:
                self._miss(request, UNPAID, LONGEST_SLEEP)
        return found

    def _candidate(self, index: int, request: Tracked, drafts: Sequence[Draft]) -> Candidate:
        best, chances = drafts[0], self._chances(request, drafts[0])
        for draft in drafts[1:]:
            others = self._chances(request, draft)
            if sum(others) > sum(chances):
                best, chances = draft, others
        return Candidate(index, request, best, chances, self._net(request, chances))

    def _chances(self, request: Tracked, draft: Draft) -> list[float]:
        return self._rates[draft.drafter].chances(draft, request.records[draft.drafter], LEAST_CHANCE)

    def _net(self, request: Tracked, chances: Sequence[float]) -> Sequence[float]:
        """Chances less the tokens that could be had in the time that each row takes beyond any row."""
        machine = self._machine
        price = self._rate * (machine.costs.reading(request.context) + machine.prices.extra(request.kind))
        return [chance - price for chance in chances if chance > price] if price else chances

    def _chosen(self, found: Sequence[Candidate], frame: Frame) -> tuple[Choice, str]:
        """How many tokens of each candidate are verified, and why not those of the others."""
        costs = self._costs(frame, sum(len(candidate.gains) for candidate in found))
        choice = choose(found, frame, costs, self._drafting, self._naps.asking)
        if choice.indebted and not choice.rate:
            return choice, INDEBTED
        if not choice.rate:
            return self._trial(found, frame, costs), UNPAID
        self._rate = choice.rate
        if self._machine.watchdog.stale and self._budget.take(self._worth_of_a_step(frame)):
            return Choice([0] * len(found)), WATCHED
        return choice, UNPAID

    def _trial(self, found: Sequence[Candidate], frame: Frame, costs: Sequence[float]) -> Choice:
        """Rows that nearly pay are tried now and then: their costs are corrected only where they are used."""
        nothing = Choice([0] * len(found))
        if self._round < self._last_trial + BETWEEN_TRIALS:
            return nothing
        choice = nearest(found, frame, costs)
        lost = costs[sum(choice.lengths)] - choice.rate * costs[sum(choice.lengths)] * frame.cost / frame.shape.sampled
        if not choice.rate or not self._budget.take(max(lost, 0.0) * self._machine.drift):
            return nothing
        self._last_trial = self._round
        return choice

    def _worth_of_a_step(self, frame: Frame) -> float:
        """Seconds lost by a plain step that only shows what plain steps take."""
        return max(frame.plain - frame.shape.sampled / self._rate, 0.0) * self._machine.drift

    def _give(self, candidate: Candidate, length: int) -> Draft:
        draft = candidate.draft
        candidate.request.missed = 0
        self._lengths[draft.drafter][length] += 1
        if length == len(draft.token_ids):
            return draft
        return Draft(draft.token_ids[:length], draft.drafter, draft.confidence[:length])

    def _miss(self, request: Tracked, reason: str, longest: int) -> None:
        """No draft this time; after many of these a request is left alone, for at most so many rounds."""
        self._naps.miss(request, self._round, longest)
        self._say_none(request, reason)

    def _say_none(self, request: Tracked, reason: str) -> None:
        self._none[reason] += 1
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("request %s: no draft: %s", request.state.id, reason)

    def _request(self, offer: Offer) -> Tracked:
        return self._requests[offer.ask.state.id]

    # Drafters that run a model

    def _plan(self, offers: Sequence[Offer], drafter: str, backlogs: Sequence[int], frame: Frame) -> Plan | None:
        """The best use of the drafter, beside what would be verified without it."""
        given = self._given(offers, frame)
        members = [
            self._member(index, offer, drafter, backlog, given.get(index, ()))
            for index, (offer, backlog) in enumerate(zip(offers, backlogs, strict=True))
        ]
        rows = sum(map(len, given.values()))
        tokens = frame.shape.sampled + sum(map(sum, given.values()))
        costs = self._costs(frame, rows + LONGEST * len(members))
        paying = plans(members, tokens, rows, costs, partial(self._machine.drafting, drafter))
        return self._cascades[drafter].plan(paying, frame, self._rates[drafter].trials >= PROVEN)

    def _given(self, offers: Sequence[Offer], frame: Frame) -> dict[int, Sequence[float]]:
        """Chances of the guesses that would be verified as things stand, by offer."""
        offered = [(index, offer) for index, offer in enumerate(offers) if offer.drafts]
        found = [self._candidate(index, self._request(offer), offer.drafts) for index, offer in offered]
        if not found:
            return {}
        costs = self._costs(frame, sum(len(one.gains) for one in found))
        lengths = choose(found, frame, costs, 0.0).lengths
        return {one.index: one.chances[:length] for one, length in zip(found, lengths, strict=True)}

    def _member(self, index: int, offer: Offer, drafter: str, backlog: int, given: Sequence[float]) -> Member:
        request, ask = self._request(offer), offer.ask
        chances = self._rates[drafter].foreseen(request.records[drafter], min(ask.max_tokens, LONGEST))
        written = ask.length - ask.state.num_prompt
        left = min(max(self._typical_answer - written, self._typical_answer / 4), ask.state.limit - ask.length)
        horizon = max(left / (1 + sum(chances[:4])), 1.0)
        return Member(index, request, chances, sum(given), len(given), backlog, horizon)

    def _worth(self, plan: Plan, drafter: str, frame: Frame) -> float:
        """The chance below which a further guess is not worth its pass and its row, as the drafter itself would state it."""
        members = len(plan.members)
        seconds = self._machine.drafting(drafter, members, members, 1) / members
        row = max(plan.cost - frame.cost, 0.0) / (members * plan.length)
        return self._rates[drafter].stated(plan.rate * (seconds + row))

    def _explore(self, offers: Sequence[Offer], drafter: str, backlogs: Sequence[int], wanted: list[tuple[int, float]]) -> None:
        """Try one token of a drafter that is not believed to pay, if that was saved up for."""
        least = max(min(backlogs), FEW)
        tried = [index for index, backlog in enumerate(backlogs) if backlog <= least]
        passes = self._machine.drafting(drafter, sum(backlogs[index] for index in tried), len(tried), 1)
        seconds = passes * self._machine.drift
        if self._budget.take(seconds):
            self._drafting += passes
            for index in tried:
                wanted[index] = 1, 0.0
                self._request(offers[index]).tried = seconds / len(tried)
