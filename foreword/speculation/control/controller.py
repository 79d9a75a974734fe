"""How much to draft: measured costs, learned acceptance, and nobody slower than without.

Each step maximises expected tokens by cost over all requests together (admission), within what every request may be
delayed (ledger). Beliefs about costs and acceptance are corrected by each step; a watchdog doubts the result as a whole.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

from foreword.core.outputs import Draft, DraftingStats
from foreword.core.request import RequestState
from foreword.speculation.base import DraftRequest
from foreword.speculation.control.acceptance import MODEL_PRIOR_TRIALS, MODEL_PRIORS, AcceptanceModel
from foreword.speculation.control.backoff import Backoff
from foreword.speculation.control.cost_model import Calibration, CostModel, PassCost, StepShape
from foreword.speculation.control.fairness import BaseStep, DelayBudget, DelayLedger, TrackedRequest
from foreword.speculation.control.selection import (
    FEW_PENDING_ROWS,
    MAX_DRAFT_LEN,
    Candidate,
    DraftModelGate,
    DraftModelPlan,
    DraftModelRequest,
    Selection,
    nearest_paying,
    rank_plans,
    select_rows,
)
from foreword.speculation.control.watchdog import ExplorationBudget
from foreword.speculation.policy import PrefillLoad, Proposal, StepRecord

__all__ = ["DraftLengthController"]

MAX_TOTAL_DRAFT_TOKENS, MIN_DRAFT_LEN_BOUND = (
    128,
    4,
)  # guesses that all requests together are asked for, and each at least
MIN_PREFIX_PROB = 0.01  # guesses less likely than this are never worth a row
MAX_BACKOFF_NO_CANDIDATE = 32  # rounds, while nothing is offered
MAX_BACKOFF_NOT_WORTH_IT = 64  # rounds, while what is offered does not pay
MAX_BACKOFF_DELAY_BUDGET = (
    8  # asks, while others would be delayed by too much: asking in vain delays them as well
)
NO_BACKOFF_STEPS = (
    8  # rounds that nobody is left alone after a model drafted: it may for all in the same passes
)
NUM_BASELINE_STEPS = 2  # last steps of a rest, for the watchdog to compare with what comes after
STEPS_BETWEEN_PROBES = 32  # rounds
MIN_SCORED = 16  # guesses of a model that were scored, before more is invested in it than a stake
DEFAULT_OUTPUT_TOKENS = 128.0  # tokens, before any has ended
NO_CANDIDATE, NOT_WORTH_IT, DELAY_BUDGET, BASELINE_STEP, BACKOFF = (
    "nothing to guess from",
    "does not pay",
    "ledger",
    "watchdog",
    "asleep",
)

logger = logging.getLogger(__name__)


class DraftLengthController:
    """The policy of adaptive drafting. All time comes in by measured(): the same calls give the same decisions.

    calibration  what steps cost on this machine
    max_tokens   longest draft
    passes       what a pass costs, of each drafter that runs a model
    """

    def __init__(
        self, calibration: Calibration, max_tokens: int, pass_costs: Mapping[str, PassCost] | None = None
    ) -> None:
        self._max_tokens = max_tokens
        self._cost_model = CostModel(calibration, pass_costs or {})
        self._acceptance: defaultdict[str, AcceptanceModel] = defaultdict(AcceptanceModel)
        self._acceptance.update(
            {drafter: AcceptanceModel(MODEL_PRIORS, MODEL_PRIOR_TRIALS) for drafter in pass_costs or {}}
        )
        self._gates = {drafter: DraftModelGate() for drafter in pass_costs or {}}
        self._delay_ledger = DelayLedger()
        self._exploration_budget = ExplorationBudget()
        self._requests: dict[str, TrackedRequest] = {}
        self._sampler_classes: dict[str, int] = {}
        self._nonspeculative: dict[str, DelayBudget] = {}
        self._mean_output_tokens = DEFAULT_OUTPUT_TOKENS
        self._step_index = 0
        self._last_plan_step = -NO_BACKOFF_STEPS
        self._last_probe_step = 0
        self._requests_this_step: list[TrackedRequest] = []
        self._base_step: BaseStep | None = None
        self._token_rate = 0.0
        self._draft_cost = 0.0
        self._steps_to_skip = 0
        self._failures: Counter[str] = Counter()
        self._no_plan_until: Counter[str] = Counter()
        self._last_was_empty = False
        self._backoff = Backoff()
        self._last_plain_cost = 0.0
        self._length_counts: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self._no_draft_counts: Counter[str] = Counter()

    # The life of a request

    def start(self, state: RequestState) -> None:
        account = self._delay_ledger.open(state.id, state.params.max_tokens)
        request = self._requests[state.id] = TrackedRequest(state, self._max_tokens, account)
        self._backoff.start(request, self._delay_ledger.mean_hit_rate)
        self._no_plan_until.clear()
        if request.sampler_class:
            self._sampler_classes[state.id] = request.sampler_class

    def finish(self, request_id: str) -> None:
        request = self._requests.pop(request_id)
        self._mean_output_tokens += (request.state.num_output - self._mean_output_tokens) / 16
        self._sampler_classes.pop(request_id, None)
        self._delay_ledger.close(request_id)

    # A round

    def record_acceptance(self, state: RequestState, draft: Draft, output_ids: Sequence[int]) -> None:
        request = self._requests[state.id]
        right = self._acceptance[draft.drafter].update(draft, output_ids, request.acceptance[draft.drafter])
        if request.probe_cost and draft.drafter in self._gates:
            if right:
                self._exploration_budget.refund(request.probe_cost)
            request.probe_cost = 0.0
        request.first_hit |= right > 0

    def max_draft_len(self, draft_request: DraftRequest) -> int:
        request = self._requests[draft_request.state.id]
        request.context_len = draft_request.num_tokens
        if not self._requests_this_step:
            self._draft_cost = 0.0  # of a step that was not measured
        self._requests_this_step.append(request)
        if self._cost_model.watchdog.pause_steps:
            self._count_no_draft(request, BASELINE_STEP)
            return 0
        if request.skip_until > self._step_index >= self._last_plan_step + NO_BACKOFF_STEPS:
            self._count_no_draft(request, BACKOFF)
            return 0
        self._delay_ledger.record_hit(request.delay_budget, request.first_hit)
        request.first_hit = False
        return min(
            request.max_draft_len, max(MAX_TOTAL_DRAFT_TOKENS // len(self._requests), MIN_DRAFT_LEN_BOUND)
        )

    def plan_draft_model(
        self, proposals: Sequence[Proposal], load: PrefillLoad, drafter: str, pending_rows: Sequence[int]
    ) -> list[tuple[int, float]]:
        wanted = [(0, 0.0)] * len(proposals)
        if self._wants_baseline(load) or not proposals:
            return wanted
        frame = self._make_base_step(load)
        if self._step_index < self._no_plan_until[drafter]:
            return wanted
        plan = self._best_plan(proposals, drafter, pending_rows, frame)
        if plan is None:
            self._failures[drafter] += 1
            self._no_plan_until[drafter] = self._step_index + self._backoff.length(
                self._failures[drafter], MAX_BACKOFF_NO_CANDIDATE
            )
            self._explore(proposals, drafter, pending_rows, wanted)
            return wanted
        self._failures[drafter] = 0
        worth = self._min_prob(plan, drafter, frame)
        for member in plan.requests:
            wanted[member.index] = plan.draft_len, worth
        self._last_plan_step = self._step_index
        self._draft_cost += plan.draft_cost + plan.catch_up_cost
        return wanted

    def select(self, proposals: Sequence[Proposal], load: PrefillLoad) -> list[Draft | None]:
        admitted: list[Draft | None] = [None] * len(proposals)
        found = self._find_candidates(proposals, self._wants_baseline(load))
        choice, reason = (
            self._select_drafts(found, self._make_base_step(load)) if found else (Selection(()), NOT_WORTH_IT)
        )
        for candidate, length in zip(found, choice.lengths, strict=True):
            if length:
                admitted[candidate.index] = self._accept(candidate, length)
            else:
                self._reject(
                    candidate.request,
                    reason,
                    MAX_BACKOFF_NOT_WORTH_IT if reason is NOT_WORTH_IT else MAX_BACKOFF_DELAY_BUDGET,
                )
        self._last_was_empty = bool(proposals) and not self._draft_cost
        self._steps_to_skip = 0 if any(choice.lengths) else self._skippable_steps()
        self._base_step = None
        self._step_index += 1
        self._requests_this_step.clear()
        return admitted

    def fixed_draft_len(self, draft_requests: Sequence[DraftRequest]) -> int:
        """Never: what a draft is worth is known once it is there, and what it costs only where its passes are timed."""
        return 0

    def num_steps_to_skip(self) -> int:
        idle, self._steps_to_skip = self._steps_to_skip, 0
        return idle

    def record_skipped(self, num_steps: int, num_requests: int) -> None:
        self._step_index += num_steps
        self._no_draft_counts[BASELINE_STEP if self._cost_model.watchdog.pause_steps else BACKOFF] += (
            num_requests
        )
        self._cost_model.watchdog.record_skipped(num_steps)
        self._delay_ledger.advance_time(num_steps * self._last_plain_cost)

    def record_step(self, step_record: StepRecord) -> None:
        machine = self._cost_model
        tally = machine.summarize(step_record.requests, self._sampler_classes)
        self._last_plain_cost = self._plain_cost(tally.plain_shape, not tally.is_decode_only)
        cost, drafting = machine.record_step(tally, step_record.seconds_by_stage, self._draft_cost)
        if self._last_was_empty:
            self._backoff.record_cost(drafting / cost + 1.0 - self._overlap_ratio(not tally.is_decode_only))
        self._draft_cost = 0.0
        self._delay_ledger.record_step(
            step_record.requests,
            self._last_plain_cost,
            cost + drafting,
            machine.step_costs.saving_per_request(tally.plain_shape),
        )
        self._exploration_budget.earn((cost + drafting) * machine.drift)
        if len(self._delay_ledger.budgets) > len(self._requests) or self._nonspeculative:
            self._track_nonspeculative({one.state.id for one in step_record.requests})

    def enable_overlap(self) -> None:
        self._cost_model.enable_overlap()

    def record_overlap_step(self, step_record: StepRecord) -> None:
        self._cost_model.record_overlap_step(
            self._cost_model.summarize(step_record.requests, self._sampler_classes),
            step_record.seconds_by_stage,
        )

    def stats(self) -> DraftingStats:
        return DraftingStats(
            draft_length_counts={drafter: dict(lengths) for drafter, lengths in self._length_counts.items()},
            no_draft_counts=dict(self._no_draft_counts),
            predicted_seconds=self._cost_model.predicted_seconds,
            realised_seconds=self._cost_model.realised_seconds,
            exploring_seconds=self._exploration_budget.spent,
        )

    # The next step

    def _make_base_step(self, load: PrefillLoad) -> BaseStep:
        """The next step, from those that asked this round and those that never ask."""
        if self._base_step is None:
            machine = self._cost_model
            accounts = [request.delay_budget for request in self._requests_this_step]
            context = load.num_context_tokens + sum(
                request.context_len for request in self._requests_this_step
            )
            if self._nonspeculative:
                accounts += self._nonspeculative.values()
                context += sum(account.context_len for account in self._nonspeculative.values())
            extra = (
                sum(
                    machine.sampling_costs.extra_cost(request.sampler_class)
                    for request in self._requests_this_step
                )
                if self._sampler_classes
                else 0.0
            )
            shape = StepShape(len(accounts) + load.num_rows, len(accounts), context, 0, extra)
            self._base_step = BaseStep(
                shape,
                machine.step_costs.cost_of(shape),
                self._plain_cost(shape, load.num_rows > 0),
                accounts,
                load.num_rows > 0,
            )
        return self._base_step

    def _overlap_ratio(self, has_prefill: bool) -> float:
        """What the next step takes without drafts, as a share of what it takes if they are asked for."""
        return 1.0 if has_prefill else self._cost_model.overlap_ratio(self._sampler_classes.values())

    def _plain_cost(self, shape: StepShape, has_prefill: bool) -> float:
        """What plain decoding would take for a step, which would still serve the ghosts."""
        ghosts = self._delay_ledger.departed
        costs = self._cost_model.step_costs
        return self._overlap_ratio(has_prefill) * costs.cost_of(
            shape.with_requests(len(ghosts), self._delay_ledger.departed_context) if ghosts else shape
        )

    def _costs_by_draft_rows(self, base_step: BaseStep, max_rows: int) -> Sequence[float]:
        """Of the step with 0, 1, ... drafted rows; without any it could be computed ahead."""
        costs, ahead = (
            self._cost_model.step_costs.with_extra_rows(base_step.shape, max_rows),
            self._overlap_ratio(base_step.has_prefill),
        )
        return costs if ahead == 1.0 else [ahead * costs[0], *costs[1:]]

    def _skippable_steps(self) -> int:
        """For how many rounds from the next on nobody would draft. Who has not asked yet could at any time."""
        watchdog = self._cost_model.watchdog
        if len(self._requests_this_step) < len(self._requests) or not self._requests_this_step:
            return 0
        if watchdog.pause_steps:
            return max(watchdog.pause_steps - NUM_BASELINE_STEPS, 0)
        if self._step_index + 1 < self._last_plan_step + NO_BACKOFF_STEPS:
            return 0
        return max(
            min(request.skip_until for request in self._requests_this_step) - (self._step_index + 1), 0
        )

    def _track_nonspeculative(self, served_ids: set[str]) -> None:
        """Requests that may not be drafted for are known from the steps they are in, and forgotten with them."""
        for request_id in [
            id_ for id_ in self._delay_ledger.budgets if id_ not in self._requests and id_ not in served_ids
        ]:
            self._delay_ledger.close(request_id)
        self._nonspeculative = {
            id_: a for id_, a in self._delay_ledger.budgets.items() if id_ not in self._requests
        }

    # Which drafts are verified

    def _wants_baseline(self, load: PrefillLoad) -> bool:
        """The watchdog wants a plain step; one that computes prompts beside would tell it nothing."""
        return self._cost_model.watchdog.wants_baseline and not load.num_rows

    def _find_candidates(self, proposals: Sequence[Proposal], wants_baseline: bool) -> list[Candidate]:
        """The best draft of each offer that has one with a chance."""
        found: list[Candidate] = []
        for index, offer in enumerate(proposals):
            request = self._tracked(offer)
            if not offer.drafts:
                self._reject(request, NO_CANDIDATE, MAX_BACKOFF_NO_CANDIDATE)
                continue
            if wants_baseline:
                self._count_no_draft(request, BASELINE_STEP)
                continue
            candidate = self._best_candidate(index, request, offer.drafts)
            if candidate.gains:
                found.append(candidate)
            else:
                self._reject(request, NOT_WORTH_IT, MAX_BACKOFF_NOT_WORTH_IT)
        return found

    def _best_candidate(self, index: int, request: TrackedRequest, drafts: Sequence[Draft]) -> Candidate:
        best, chances = drafts[0], self._prefix_probs(request, drafts[0])
        for draft in drafts[1:]:
            others = self._prefix_probs(request, draft)
            if sum(others) > sum(chances):
                best, chances = draft, others
        return Candidate(index, request, best, chances, self._net_gains(request, chances))

    def _prefix_probs(self, request: TrackedRequest, draft: Draft) -> list[float]:
        return self._acceptance[draft.drafter].prefix_probs(
            draft, request.acceptance[draft.drafter], MIN_PREFIX_PROB
        )

    def _net_gains(self, request: TrackedRequest, prefix_probs: Sequence[float]) -> Sequence[float]:
        """Chances less the tokens that could be had in the time that each row takes beyond any row."""
        machine = self._cost_model
        price = self._token_rate * (
            machine.step_costs.context_cost(request.context_len)
            + machine.sampling_costs.extra_cost(request.sampler_class)
        )
        return [chance - price for chance in prefix_probs if chance > price] if price else prefix_probs

    def _select_drafts(self, candidates: Sequence[Candidate], base_step: BaseStep) -> tuple[Selection, str]:
        """How many tokens of each candidate are verified, and why not those of the others."""
        costs = self._costs_by_draft_rows(base_step, sum(len(candidate.gains) for candidate in candidates))
        choice = select_rows(candidates, base_step, costs, self._draft_cost, self._backoff.proposal_overhead)
        if choice.limited_by_budget and not choice.rate:
            return choice, DELAY_BUDGET
        if not choice.rate:
            return self._probe(candidates, base_step, costs), NOT_WORTH_IT
        self._token_rate = choice.rate
        if self._cost_model.watchdog.is_baseline_stale and self._exploration_budget.take(
            self._baseline_step_cost(base_step)
        ):
            return Selection([0] * len(candidates)), BASELINE_STEP
        return choice, NOT_WORTH_IT

    def _probe(
        self, candidates: Sequence[Candidate], base_step: BaseStep, costs: Sequence[float]
    ) -> Selection:
        """Rows that nearly pay are tried now and then: their costs are corrected only where they are used."""
        nothing = Selection([0] * len(candidates))
        if self._step_index < self._last_probe_step + STEPS_BETWEEN_PROBES:
            return nothing
        choice = nearest_paying(candidates, base_step, costs)
        lost = (
            costs[sum(choice.lengths)]
            - choice.rate * costs[sum(choice.lengths)] * base_step.cost / base_step.shape.num_sampled
        )
        if not choice.rate or not self._exploration_budget.take(max(lost, 0.0) * self._cost_model.drift):
            return nothing
        self._last_probe_step = self._step_index
        return choice

    def _baseline_step_cost(self, base_step: BaseStep) -> float:
        """Seconds lost by a plain step that only shows what plain steps take."""
        return (
            max(base_step.plain_cost - base_step.shape.num_sampled / self._token_rate, 0.0)
            * self._cost_model.drift
        )

    def _accept(self, candidate: Candidate, draft_len: int) -> Draft:
        draft = candidate.draft
        candidate.request.misses = 0
        self._length_counts[draft.drafter][draft_len] += 1
        if draft_len == len(draft.token_ids):
            return draft
        return Draft(draft.token_ids[:draft_len], draft.drafter, draft.confidence[:draft_len])

    def _reject(self, request: TrackedRequest, reason: str, max_backoff: int) -> None:
        """No draft this time; after many of these a request is left alone, for at most so many rounds."""
        self._backoff.record_miss(request, self._step_index, max_backoff)
        self._count_no_draft(request, reason)

    def _count_no_draft(self, request: TrackedRequest, reason: str) -> None:
        self._no_draft_counts[reason] += 1
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("request %s: no draft: %s", request.state.id, reason)

    def _tracked(self, proposal: Proposal) -> TrackedRequest:
        return self._requests[proposal.request.state.id]

    # Drafters that run a model

    def _best_plan(
        self, proposals: Sequence[Proposal], drafter: str, pending_rows: Sequence[int], base_step: BaseStep
    ) -> DraftModelPlan | None:
        """The best use of the drafter, beside what would be verified without it."""
        given = self._baseline_probs(proposals, base_step)
        members = [
            self._make_model_request(index, offer, drafter, backlog, given.get(index, ()))
            for index, (offer, backlog) in enumerate(zip(proposals, pending_rows, strict=True))
        ]
        rows = sum(map(len, given.values()))
        tokens = base_step.shape.num_sampled + sum(map(sum, given.values()))
        costs = self._costs_by_draft_rows(base_step, rows + MAX_DRAFT_LEN * len(members))
        paying = rank_plans(members, tokens, rows, costs, partial(self._cost_model.draft_cost, drafter))
        return self._gates[drafter].select(
            paying, base_step, self._acceptance[drafter].num_trials >= MIN_SCORED
        )

    def _baseline_probs(
        self, proposals: Sequence[Proposal], base_step: BaseStep
    ) -> dict[int, Sequence[float]]:
        """Chances of the guesses that would be verified as things stand, by offer."""
        offered = [(index, offer) for index, offer in enumerate(proposals) if offer.drafts]
        found = [self._best_candidate(index, self._tracked(offer), offer.drafts) for index, offer in offered]
        if not found:
            return {}
        costs = self._costs_by_draft_rows(base_step, sum(len(one.gains) for one in found))
        lengths = select_rows(found, base_step, costs, 0.0).lengths
        return {one.index: one.prefix_probs[:length] for one, length in zip(found, lengths, strict=True)}

    def _make_model_request(
        self,
        index: int,
        proposal: Proposal,
        drafter: str,
        num_pending_rows: int,
        baseline_probs: Sequence[float],
    ) -> DraftModelRequest:
        request, ask = self._tracked(proposal), proposal.request
        chances = self._acceptance[drafter].expected_prefix_probs(
            request.acceptance[drafter], min(ask.max_tokens, MAX_DRAFT_LEN)
        )
        written = ask.num_tokens - ask.state.num_prompt
        left = min(
            max(self._mean_output_tokens - written, self._mean_output_tokens / 4),
            ask.state.max_len - ask.num_tokens,
        )
        horizon = max(left / (1 + sum(chances[:4])), 1.0)
        return DraftModelRequest(
            index, request, chances, sum(baseline_probs), len(baseline_probs), num_pending_rows, horizon
        )

    def _min_prob(self, plan: DraftModelPlan, drafter: str, base_step: BaseStep) -> float:
        """The chance below which a further guess is not worth its pass and its row, as the drafter itself would state it."""
        members = len(plan.requests)
        seconds = self._cost_model.draft_cost(drafter, members, members, 1) / members
        row = max(plan.verify_cost - base_step.cost, 0.0) / (members * plan.draft_len)
        return self._acceptance[drafter].to_confidence(plan.rate * (seconds + row))

    def _explore(
        self,
        proposals: Sequence[Proposal],
        drafter: str,
        pending_rows: Sequence[int],
        draft_plans: list[tuple[int, float]],
    ) -> None:
        """Try one token of a drafter that is not believed to pay, if that was saved up for."""
        least = max(min(pending_rows), FEW_PENDING_ROWS)
        tried = [index for index, backlog in enumerate(pending_rows) if backlog <= least]
        passes = self._cost_model.draft_cost(
            drafter, sum(pending_rows[index] for index in tried), len(tried), 1
        )
        seconds = passes * self._cost_model.drift
        if self._exploration_budget.take(seconds):
            self._draft_cost += passes
            for index in tried:
                draft_plans[index] = 1, 0.0
                self._tracked(proposals[index]).probe_cost = seconds / len(tried)
