"""Adaptive draft length: measured costs, learned acceptance, and no request slower than without drafts.

Each step maximises expected tokens per cost over all requests (selection.py), within each request's delay
budget (fairness.py). Each step corrects costs and acceptance; a watchdog checks the total effect.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from foreword.core.outputs import Draft, DraftingStats
from foreword.core.request import RequestState
from foreword.speculation.control.acceptance import MODEL_PRIOR_TRIALS, MODEL_PRIORS, AcceptanceModel
from foreword.speculation.control.backoff import Backoff
from foreword.speculation.control.cost_model import Calibration, CostModel, PassCost, StepShape, StepSummary
from foreword.speculation.control.fairness import (
    DEFAULT_MAX_SLOWDOWN,
    BaseStep,
    DelayBudget,
    DelayLedger,
    TrackedRequest,
)
from foreword.speculation.control.selection import (
    FEW_PENDING_ROWS,
    MAX_DRAFT_LEN,
    Candidate,
    DraftModelPlan,
    DraftModelRequest,
    Selection,
    affordable_plan,
    nearest_paying,
    rank_plans,
    select_rows,
    split_by_gain,
)
from foreword.speculation.control.watchdog import DrafterAccount, ExplorationBudget
from foreword.speculation.policy import Policy, PrefillLoad, Proposal, RequestStep, StepRecord

MAX_TOTAL_DRAFT_TOKENS = 512  # proposed for all requests together
MIN_DRAFT_LEN_BOUND = 4  # proposed for each request at least
MIN_PREFIX_PROB = 0.01  # less likely draft tokens are never verified
MIN_PRICE_SHARE = 0.5  # nor those below this share of the tokens that plain decoding makes in a row's time
PRICED_ROWS = (8, 32, 128)  # numbers of further rows among which the cheapest row is looked for
MAX_BACKOFF_NO_CANDIDATE = 64  # steps, while nothing is proposed
MAX_BACKOFF_NOT_WORTH_IT = 128  # steps, while drafts do not pay
MAX_BACKOFF_DELAY_BUDGET = 8  # steps, while drafts would delay others too much: so does proposing
NO_BACKOFF_STEPS = 8  # after a draft model ran: it may draft for all requests in the same passes
NUM_BASELINE_STEPS = 2  # last steps of a pause, measured for the watchdog
FIRST_EXPLORE_STEP = 256  # until then the exploration budget serves to check the calibration
FIRST_STEPS_BETWEEN_PROBES, STEPS_BETWEEN_PROBES = 8, 32  # doubles
DEFAULT_OUTPUT_TOKENS = 128.0  # mean output length before any request has ended
# reasons for no draft, label values of a metric
NO_CANDIDATE, NOT_WORTH_IT, DELAY_BUDGET = "nothing to guess from", "does not pay", "ledger"
BASELINE_STEP, BACKOFF = "watchdog", "asleep"

logger = logging.getLogger(__name__)


class DraftLengthController(Policy):
    """The policy of adaptive draft lengths. It reads no clock, so its calls determine its decisions."""

    def __init__(
        self,
        calibration: Calibration,
        max_tokens: int,
        pass_costs: Mapping[str, PassCost] | None = None,
        plugins: Collection[str] = (),
        max_slowdown: float = DEFAULT_MAX_SLOWDOWN,
    ) -> None:
        """plugins       drafters whose time must be earned by their drafts
        max_slowdown  share of its time that a request may lose to drafts of others
        """
        self._max_tokens = max_tokens
        self._cost_model = CostModel(calibration, pass_costs or {})
        self._acceptance: defaultdict[str, AcceptanceModel] = defaultdict(AcceptanceModel)
        for drafter in pass_costs or {}:
            self._acceptance[drafter] = AcceptanceModel(MODEL_PRIORS, MODEL_PRIOR_TRIALS)
        self._model_drafters = frozenset(pass_costs or ())
        step_cost = self._cost_model.step_costs.cost_of(StepShape(1, 1))
        self._accounts = {drafter: DrafterAccount(step_cost) for drafter in plugins}
        self._plugin_cost = 0.0  # of this step
        self._plugin_drafts: dict[str, str] = {}  # plug-ins whose drafts this step verifies, by request id
        self._delay_ledger = DelayLedger(max_slowdown)
        self._exploration_budget = ExplorationBudget(step_cost)
        self._requests: dict[str, TrackedRequest] = {}
        self._sampler_classes: dict[str, int] = {}  # of requests that are not greedy
        self._nonspeculative: dict[str, DelayBudget] = {}
        self._mean_output_tokens = DEFAULT_OUTPUT_TOKENS
        self._step_index = 0
        self._last_plan_step = -NO_BACKOFF_STEPS
        self._next_probe_step = 0
        self._steps_between_probes = FIRST_STEPS_BETWEEN_PROBES
        self._requests_this_step: list[TrackedRequest] = []
        self._base_step: BaseStep | None = None
        self._token_rate = 0.0
        self._paid_per_token = 0.0  # proposals, in this step
        self._min_prefix_prob = MIN_PREFIX_PROB  # in the next step
        self._draft_cost = 0.0
        self._steps_to_skip = 0
        self._failures: Counter[str] = Counter()
        self._no_plan_until: Counter[str] = Counter()
        self._no_plan_requests: Counter[str] = Counter()  # that ran when no plan paid
        self._last_was_empty = False
        self._backoff = Backoff()
        self._last_plain_cost = 0.0
        self._length_counts: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self._no_draft_counts: Counter[str] = Counter()

    # Requests

    def start(self, state: RequestState) -> int:
        budget = self._delay_ledger.open(state.id, state.params.max_tokens)
        request = self._requests[state.id] = TrackedRequest(state, self._max_tokens, budget)
        self._backoff.start(request, self._step_index)
        if request.sampler_class:
            self._sampler_classes[state.id] = request.sampler_class
        return max(request.skip_until - self._step_index, 0)

    def finish(self, request_id: str) -> None:
        request = self._requests.pop(request_id)
        self._mean_output_tokens += (request.state.num_output - self._mean_output_tokens) / 16
        self._sampler_classes.pop(request_id, None)
        self._delay_ledger.close(request_id)

    # A step

    def record_acceptance(self, state: RequestState, draft: Draft, output_ids: Sequence[int]) -> None:
        request = self._requests[state.id]
        hits = self._acceptance[draft.drafter].update(draft, output_ids, request.acceptance[draft.drafter])
        if request.probe_cost and draft.drafter in self._model_drafters:
            if hits:
                self._exploration_budget.refund(request.probe_cost)
            request.probe_cost = 0.0

    def max_draft_len(self, state: RequestState) -> int:
        request = self._requests[state.id]
        request.context_len = len(state.tokens)
        if not self._requests_this_step:
            self._draft_cost = self._plugin_cost = 0.0  # the last step was not recorded
        self._requests_this_step.append(request)
        if self._cost_model.watchdog.pause_steps:
            self._count_no_draft(request, BASELINE_STEP)
            return 0
        if request.skip_until > self._step_index >= self._last_plan_step + NO_BACKOFF_STEPS:
            self._count_no_draft(request, BACKOFF)
            return 0
        share = max(MAX_TOTAL_DRAFT_TOKENS // len(self._requests), MIN_DRAFT_LEN_BOUND)
        return min(request.max_draft_len, share)

    def may_propose(self, drafter: str, load: PrefillLoad) -> bool:
        if drafter in self._model_drafters:
            return not self._backs_off_planning(drafter) and not self._wants_baseline(load)
        account = self._accounts.get(drafter)
        return account is None or (account.can_afford_call and not self._wants_baseline(load))

    def record_proposing(self, drafter: str, seconds: float) -> None:
        if drafter in self._accounts:
            cost = seconds / self._cost_model.drift
            self._accounts[drafter].charge(cost)
            self._plugin_cost += cost

    def plan_draft_model(
        self, proposals: Sequence[Proposal], load: PrefillLoad, drafter: str, pending_rows: Sequence[int]
    ) -> list[tuple[int, float]]:
        draft_plans = [(0, 0.0)] * len(proposals)
        if not proposals:
            return draft_plans
        base_step = self._make_base_step(load)
        plan = self._best_plan(proposals, drafter, pending_rows, base_step)
        if plan is None:
            self._failures[drafter] += 1
            backoff = self._backoff.length(self._failures[drafter], MAX_BACKOFF_NO_CANDIDATE)
            self._no_plan_until[drafter] = self._step_index + backoff
            self._no_plan_requests[drafter] = len(self._requests)
            self._explore(proposals, drafter, pending_rows, draft_plans)
            return draft_plans
        self._failures[drafter] = 0
        min_prob = self._min_prob(plan, drafter, base_step)
        for request in plan.requests:
            draft_plans[request.index] = plan.draft_len, min_prob
        self._last_plan_step = self._step_index
        self._draft_cost += plan.draft_cost + plan.catch_up_cost
        return draft_plans

    def _backs_off_planning(self, drafter: str) -> bool:
        """No plan paid the last time, and about as many requests run as then."""
        is_same_load = 2 * len(self._requests) > self._no_plan_requests[drafter]
        return self._step_index < self._no_plan_until[drafter] and is_same_load

    def select(self, proposals: Sequence[Proposal], load: PrefillLoad) -> list[Draft | None]:
        drafts: list[Draft | None] = [None] * len(proposals)
        base_step = self._make_base_step(load)
        candidates = self._find_candidates(proposals, self._wants_baseline(load))
        selection, reason = Selection(()), NOT_WORTH_IT
        self._plugin_drafts.clear()
        if candidates:
            selection, reason = self._select_drafts(candidates, base_step)
            self._paid_per_token = self._proposals_paid(candidates, selection, base_step, len(proposals))
        max_backoff = MAX_BACKOFF_NOT_WORTH_IT if reason is NOT_WORTH_IT else MAX_BACKOFF_DELAY_BUDGET
        for candidate, length in zip(candidates, selection.lengths, strict=True):
            if length:
                drafts[candidate.index] = self._accept(candidate, length)
            else:
                self._reject(candidate.request, reason, max_backoff)
        self._last_was_empty = bool(proposals) and not self._draft_cost
        self._steps_to_skip = 0 if any(selection.lengths) else self._skippable_steps()
        self._base_step = None
        self._step_index += 1
        self._requests_this_step.clear()
        return drafts

    def num_steps_to_skip(self) -> int:
        num_steps, self._steps_to_skip = self._steps_to_skip, 0
        return num_steps

    def record_skipped(self, num_steps: int, num_requests: int) -> None:
        self._step_index += num_steps
        reason = BASELINE_STEP if self._cost_model.watchdog.pause_steps else BACKOFF
        self._no_draft_counts[reason] += num_requests
        self._cost_model.watchdog.record_skipped(num_steps)
        for account in self._accounts.values():
            account.earn(0.0, num_steps * self._last_plain_cost, self._last_plain_cost)

    def record_step(self, step_record: StepRecord) -> None:
        model = self._cost_model
        summary = model.summarize(step_record.requests, self._sampler_classes)
        self._last_plain_cost = self._plain_cost(summary.plain_shape, not summary.is_decode_only)
        seconds, plugin_cost = step_record.seconds_by_stage, self._plugin_cost
        proposing = plugin_cost + self._backoff.proposal_cost
        cost, drafting = model.record_step(summary, seconds, self._draft_cost, proposing)
        if self._last_was_empty:
            overlap_loss = 1.0 - self._overlap_ratio(not summary.is_decode_only)
            proposing = max(drafting - plugin_cost, 0.0)
            self._backoff.record_cost(proposing, proposing / cost + overlap_loss)
            self._last_was_empty = False  # a prompt's step may follow, without a select()
        decode_cost = self._decode_cost(summary)
        if self._accounts:
            self._settle_accounts(step_record.requests, summary, cost, cost + drafting, decode_cost)
        self._draft_cost = self._plugin_cost = 0.0
        self._delay_ledger.record_step(
            step_record.requests, self._last_plain_cost, decode_cost, cost + drafting
        )
        self._exploration_budget.earn((cost + drafting) * model.drift)
        if len(self._delay_ledger.budgets) > len(self._requests) or self._nonspeculative:
            self._track_nonspeculative({request.state.id for request in step_record.requests})

    def _decode_cost(self, summary: StepSummary) -> float:
        """Plain cost of the steps that accepted tokens save: they have no prefill."""
        count = summary.num_sampling_requests
        if summary.is_decode_only or not count:
            return self._last_plain_cost
        return self._cost_model.step_costs.cost_of(StepShape(count, count, num_requests=count))

    def _settle_accounts(
        self,
        requests: Sequence[RequestStep],
        summary: StepSummary,
        cost: float,
        elapsed: float,
        decode_cost: float,
    ) -> None:
        """Credit plug-ins with what their drafts saved in a step that cost `cost` without drafting."""
        plain_cost, saved = self._last_plain_cost, dict.fromkeys(self._accounts, 0.0)
        num_sampling = summary.num_sampling_requests
        for request in requests:
            drafter = self._plugin_drafts.get(request.state.id)
            if drafter is not None and request.num_draft_tokens:
                saved[drafter] += (request.num_emitted - 1) * decode_cost / num_sampling
                saved[drafter] -= (cost - plain_cost) * request.num_draft_tokens / summary.num_draft_rows
        for drafter, account in self._accounts.items():
            account.earn(saved[drafter], elapsed, decode_cost)

    def enable_overlap(self) -> None:
        self._cost_model.enable_overlap()

    def record_overlap_step(self, step_record: StepRecord) -> None:
        summary = self._cost_model.summarize(step_record.requests, self._sampler_classes)
        self._cost_model.record_overlap_step(summary, step_record.seconds_by_stage)

    def stats(self) -> DraftingStats:
        return DraftingStats(
            draft_length_counts={drafter: dict(lengths) for drafter, lengths in self._length_counts.items()},
            no_draft_counts=dict(self._no_draft_counts),
            predicted_seconds=self._cost_model.predicted_seconds,
            realised_seconds=self._cost_model.realised_seconds,
            plain_seconds=self._cost_model.plain_seconds,
            exploring_seconds=self._exploration_budget.spent,
        )

    # The next step

    def _make_base_step(self, load: PrefillLoad) -> BaseStep:
        """The next step without drafts: requests that could draft, and those without speculation."""
        if self._base_step is None:
            requests, has_prefill = self._requests_this_step, load.num_rows > 0
            budgets = [request.delay_budget for request in requests]
            context = sum(request.context_len for request in requests)
            if self._nonspeculative:
                budgets += self._nonspeculative.values()
                context += sum(budget.context_len for budget in self._nonspeculative.values())
            extra = 0.0
            if self._sampler_classes:
                extra = sum(map(self._extra_sampling_cost, requests))
            count = len(budgets)
            shape = decode_shape = StepShape(count, count, context, 0, extra, count)
            prefill_cost, step_costs = 0.0, self._cost_model.step_costs
            if has_prefill:
                context += load.num_context_tokens
                shape = StepShape(count + load.num_rows, count, context, 0, extra, count)
                prefill_cost = max(step_costs.cost_of(shape) - step_costs.cost_of(decode_shape), 0.0)
            cost, plain_cost = step_costs.cost_of(decode_shape), self._plain_cost(decode_shape, has_prefill)
            self._base_step = BaseStep(
                shape, cost, plain_cost, budgets, prefill_cost, self._delay_ledger.max_slowdown
            )
            row_cost = self._cost_model.step_costs.min_row_cost(shape.num_rows, PRICED_ROWS)
            self._min_prefix_prob = max(MIN_PREFIX_PROB, MIN_PRICE_SHARE * count * row_cost / plain_cost)
        return self._base_step

    def _extra_sampling_cost(self, request: TrackedRequest) -> float:
        return self._cost_model.sampling_costs.extra_cost(request.sampler_class)

    def _overlap_ratio(self, has_prefill: bool) -> float:
        """Cost ratio of the next step without proposing, which can overlap with the host."""
        return 1.0 if has_prefill else self._cost_model.measured_overlap_ratio

    def _plain_cost(self, shape: StepShape, has_prefill: bool) -> float:
        """Cost of a step in plain decoding."""
        return self._overlap_ratio(has_prefill) * self._cost_model.step_costs.cost_of(shape)

    def _costs_by_draft_rows(self, base_step: BaseStep, max_rows: int) -> Sequence[float]:
        """Costs of the decoding with 0, 1, ... draft rows; with 0 the step could overlap with the host."""
        costs = self._cost_model.step_costs.with_extra_rows(base_step.shape, max_rows)
        if base_step.has_prefill:
            return [max(cost - base_step.prefill_cost, base_step.cost) for cost in costs]
        ratio = self._overlap_ratio(False)
        return costs if ratio == 1.0 else [ratio * costs[0], *costs[1:]]

    def _skippable_steps(self) -> int:
        """Steps from the next one on in which no request would draft."""
        watchdog = self._cost_model.watchdog
        if watchdog.pause_steps:
            return max(watchdog.pause_steps - NUM_BASELINE_STEPS, 0)
        if self._step_index + 1 < self._last_plan_step + NO_BACKOFF_STEPS:
            return 0
        skip_until = min((request.skip_until for request in self._requests.values()), default=0)
        return max(skip_until - (self._step_index + 1), 0)

    def _track_nonspeculative(self, served_ids: set[str]) -> None:
        """Update requests without speculation, which are known only from recorded steps."""
        ledger = self._delay_ledger
        for id_ in [id_ for id_ in ledger.budgets if id_ not in self._requests and id_ not in served_ids]:
            ledger.close(id_)
        self._nonspeculative = {id_: b for id_, b in ledger.budgets.items() if id_ not in self._requests}

    # Which drafts are verified

    def _wants_baseline(self, load: PrefillLoad) -> bool:
        """The watchdog needs a plain step; one with prefill cannot serve as its baseline."""
        return self._cost_model.watchdog.wants_baseline and not load.num_rows

    def _find_candidates(self, proposals: Sequence[Proposal], wants_baseline: bool) -> list[Candidate]:
        """The best draft of each proposal that has a useful one."""
        candidates: list[Candidate] = []
        for index, proposal in enumerate(proposals):
            request = self._tracked(proposal)
            if not proposal.drafts:
                self._reject(request, NO_CANDIDATE, MAX_BACKOFF_NO_CANDIDATE)
                continue
            if wants_baseline:
                self._count_no_draft(request, BASELINE_STEP)
                continue
            candidate = self._best_candidate(index, request, proposal.drafts)
            if candidate.gains:
                candidates.append(candidate)
            else:
                self._reject(request, NOT_WORTH_IT, MAX_BACKOFF_NOT_WORTH_IT)
        return candidates

    def _best_candidate(self, index: int, request: TrackedRequest, drafts: Sequence[Draft]) -> Candidate:
        best, best_probs = drafts[0], self._prefix_probs(request, drafts[0])
        for draft in drafts[1:]:
            probs = self._prefix_probs(request, draft)
            if sum(probs) > sum(best_probs):
                best, best_probs = draft, probs
        # tokens that plain decoding would yield in the time of the request's own cost per row
        row_cost = self._cost_model.step_costs.context_cost(request.context_len)
        price = self._token_rate * (row_cost + self._extra_sampling_cost(request))
        gains = [prob - price for prob in best_probs if prob > price] if price else best_probs
        return Candidate(index, request, best, best_probs, gains)

    def _prefix_probs(self, request: TrackedRequest, draft: Draft) -> list[float]:
        acceptance = request.acceptance[draft.drafter]
        return self._acceptance[draft.drafter].prefix_probs(draft, acceptance, self._min_prefix_prob)

    def _select_drafts(self, candidates: Sequence[Candidate], base_step: BaseStep) -> tuple[Selection, str]:
        """Draft lengths of all candidates, and the reason of the rejected ones."""
        costs = self._costs_by_draft_rows(base_step, sum(len(candidate.gains) for candidate in candidates))
        selection = select_rows(candidates, base_step, costs, self._draft_cost, self._backoff.proposal_cost)
        if selection.limited_by_budget and not selection.rate:
            return selection, DELAY_BUDGET
        if selection.rate:
            self._token_rate = selection.rate
        if base_step.has_prefill:  # its time corrects no cost: there is nothing to learn
            return selection, NOT_WORTH_IT
        if not selection.rate:
            return self._probe(candidates, base_step, costs), NOT_WORTH_IT
        selection = self._probe_more(candidates, base_step, costs, selection)
        if self._cost_model.watchdog.is_baseline_stale:
            lost = max(base_step.plain_cost - base_step.shape.num_sampled / self._token_rate, 0.0)
            if self._exploration_budget.take(lost * self._cost_model.drift):
                return Selection([0] * len(candidates)), BASELINE_STEP
        return selection, NOT_WORTH_IT

    def _proposals_paid(
        self, candidates: Sequence[Candidate], selection: Selection, base_step: BaseStep, num_proposals: int
    ) -> float:
        """How many proposals each expected token of the step pays for, by the time it saves."""
        num_rows, cost = sum(selection.lengths), self._backoff.proposal_cost
        if not num_rows or not cost:
            return math.inf
        expected = sum(c.expected_tokens[n] for c, n in zip(candidates, selection.lengths, strict=True))
        step_cost = self._costs_by_draft_rows(base_step, num_rows)[num_rows] + self._draft_cost
        saved = expected * base_step.plain_cost / base_step.shape.num_sampled
        saved -= step_cost - base_step.plain_cost
        return saved / expected * num_proposals / cost

    def _probe(
        self, candidates: Sequence[Candidate], base_step: BaseStep, costs: Sequence[float]
    ) -> Selection:
        """Occasionally verify rows that nearly pay: only measured row counts get their costs corrected."""
        no_drafts = Selection([0] * len(candidates))
        if self._step_index < self._next_probe_step:
            return no_drafts
        selection = nearest_paying(candidates, base_step, costs)
        cost = costs[sum(selection.lengths)]
        lost = cost - selection.rate * cost * costs[0] / base_step.shape.num_sampled
        if not selection.rate or not self._exploration_budget.take(max(lost, 0.0) * self._cost_model.drift):
            return no_drafts
        self._record_probe()
        return selection

    def _probe_more(
        self,
        candidates: Sequence[Candidate],
        base_step: BaseStep,
        costs: Sequence[float],
        selection: Selection,
    ) -> Selection:
        """Occasionally verify twice the rows that seem to pay best."""
        count = 2 * sum(selection.lengths)
        if self._step_index < self._next_probe_step or count >= len(costs):
            return selection
        lengths = split_by_gain([candidate.gains for candidate in candidates], count)
        expected = sum(c.expected_tokens[n] for c, n in zip(candidates, lengths, strict=True))
        lost = costs[count] + self._draft_cost - (base_step.shape.num_sampled + expected) / selection.rate
        if not self._exploration_budget.take(max(lost, 0.0) * self._cost_model.drift):
            return selection
        self._record_probe()
        return Selection(lengths, selection.rate)

    def _record_probe(self) -> None:
        self._next_probe_step = self._step_index + self._steps_between_probes
        self._steps_between_probes = min(2 * self._steps_between_probes, STEPS_BETWEEN_PROBES)

    def _accept(self, candidate: Candidate, draft_len: int) -> Draft:
        draft = candidate.draft
        num_paid = candidate.expected_tokens[draft_len] * self._paid_per_token
        self._backoff.record_hit(candidate.request, num_paid)
        self._length_counts[draft.drafter][draft_len] += 1
        if draft.drafter in self._accounts:
            self._plugin_drafts[candidate.request.state.id] = draft.drafter
        if draft_len == len(draft.token_ids):
            return draft
        return Draft(draft.token_ids[:draft_len], draft.drafter, draft.confidence[:draft_len])

    def _reject(self, request: TrackedRequest, reason: str, max_backoff: int) -> None:
        """No draft in this step; after several the request backs off."""
        self._backoff.record_miss(request, self._step_index, max_backoff)
        self._count_no_draft(request, reason)

    def _count_no_draft(self, request: TrackedRequest, reason: str) -> None:
        self._no_draft_counts[reason] += 1
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("request %s: no draft: %s", request.state.id, reason)

    def _tracked(self, proposal: Proposal) -> TrackedRequest:
        return self._requests[proposal.request.state.id]

    # Draft models

    def _best_plan(
        self, proposals: Sequence[Proposal], drafter: str, pending_rows: Sequence[int], base_step: BaseStep
    ) -> DraftModelPlan | None:
        """The best plan for the drafter, in addition to the drafts of others."""
        probs = self._baseline_probs(proposals, base_step)
        requests = [
            self._make_model_request(index, proposal, drafter, rows, probs.get(index, ()))
            for index, (proposal, rows) in enumerate(zip(proposals, pending_rows, strict=True))
        ]
        base_rows = sum(map(len, probs.values()))
        base_tokens = base_step.shape.num_sampled + sum(map(sum, probs.values()))
        costs = self._costs_by_draft_rows(base_step, base_rows + MAX_DRAFT_LEN * len(requests))
        draft_cost = partial(self._cost_model.draft_cost, drafter)
        proposing = self._backoff.proposal_cost
        plans = rank_plans(requests, base_tokens, base_rows, costs, draft_cost, proposing)
        return affordable_plan(plans, base_step)

    def _baseline_probs(
        self, proposals: Sequence[Proposal], base_step: BaseStep
    ) -> dict[int, Sequence[float]]:
        """Acceptance probabilities of the drafts that would be verified so far, by proposal."""
        candidates = [
            self._best_candidate(index, self._tracked(proposal), proposal.drafts)
            for index, proposal in enumerate(proposals)
            if proposal.drafts
        ]
        if not candidates:
            return {}
        costs = self._costs_by_draft_rows(base_step, sum(len(candidate.gains) for candidate in candidates))
        lengths = select_rows(candidates, base_step, costs, 0.0).lengths
        return {c.index: c.prefix_probs[:length] for c, length in zip(candidates, lengths, strict=True)}

    def _make_model_request(
        self,
        index: int,
        proposal: Proposal,
        drafter: str,
        num_pending_rows: int,
        baseline_probs: Sequence[float],
    ) -> DraftModelRequest:
        request, state = self._tracked(proposal), proposal.request.state
        draft_len = min(proposal.request.max_draft_tokens, MAX_DRAFT_LEN)
        probs = self._acceptance[drafter].expected_prefix_probs(request.acceptance[drafter], draft_len)
        mean = self._mean_output_tokens
        tokens_left = min(max(mean - state.num_output, mean / 4), state.max_len - len(state.tokens))
        steps_left = max(tokens_left / (1 + sum(probs[:4])), 1.0)
        base_tokens, base_rows = sum(baseline_probs), len(baseline_probs)
        return DraftModelRequest(index, request, probs, base_tokens, base_rows, num_pending_rows, steps_left)

    def _min_prob(self, plan: DraftModelPlan, drafter: str, base_step: BaseStep) -> float:
        """The drafter's confidence below which a further token does not pay for its pass and its row."""
        count = len(plan.requests)
        pass_cost = self._cost_model.draft_cost(drafter, count, count, 1) / count
        row_cost = max(plan.verify_cost - base_step.cost, 0.0) / (count * plan.draft_len)
        return self._acceptance[drafter].to_confidence(plan.rate * (pass_cost + row_cost))

    def _explore(
        self,
        proposals: Sequence[Proposal],
        drafter: str,
        pending_rows: Sequence[int],
        draft_plans: list[tuple[int, float]],
    ) -> None:
        """Draft one token with a drafter that does not seem to pay, if the exploration budget suffices."""
        if self._step_index < FIRST_EXPLORE_STEP:
            return
        max_rows = max(min(pending_rows), FEW_PENDING_ROWS)
        probed = [index for index, rows in enumerate(pending_rows) if rows <= max_rows]
        total_rows = sum(pending_rows[index] for index in probed)
        cost = self._cost_model.draft_cost(drafter, total_rows, len(probed), 1)
        seconds = cost * self._cost_model.drift
        if self._exploration_budget.take(seconds):
            self._draft_cost += cost
            for index in probed:
                draft_plans[index] = 1, 0.0
                self._tracked(proposals[index]).probe_cost = seconds / len(probed)
