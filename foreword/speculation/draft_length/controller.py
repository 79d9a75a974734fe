"""Adaptive draft length: measured costs, learned acceptance, and no request slower than without drafts.

Each step maximises expected tokens per cost over all requests (verify_planner.py, draft_planner.py), within
each request's delay budget (delay_budget.py). Each step corrects costs and acceptance; a watchdog checks the
total effect.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

from foreword.core.outputs import Draft, DraftingStats
from foreword.core.request import RequestState
from foreword.speculation.draft_length.acceptance import MODEL_PRIOR_TRIALS, MODEL_PRIORS, AcceptanceModel
from foreword.speculation.draft_length.backoff import (
    MAX_BACKOFF_DELAY_BUDGET,
    MAX_BACKOFF_NO_CANDIDATE,
    MAX_BACKOFF_NOT_WORTH_IT,
    Backoff,
)
from foreword.speculation.draft_length.cost_model import (
    Calibration,
    CostModel,
    PassCost,
    StepShape,
    StepSummary,
)
from foreword.speculation.draft_length.delay_budget import DEFAULT_MAX_SLOWDOWN, DelayLedger
from foreword.speculation.draft_length.draft_planner import DraftModelPlanner
from foreword.speculation.draft_length.exploration import EXPLORATION_SHARE, Exploration
from foreword.speculation.draft_length.next_step import NextStep, TrackedRequest
from foreword.speculation.draft_length.policy import (
    NUM_COLD_STEPS,
    Policy,
    PrefillLoad,
    Proposal,
    RequestStep,
    StepRecord,
)
from foreword.speculation.draft_length.row_selection import Candidate, Selection
from foreword.speculation.draft_length.verify_planner import (
    BACKOFF,
    BASELINE_STEP,
    DELAY_BUDGET,
    NO_CANDIDATE,
    NOT_WORTH_IT,
    VerifyPlanner,
)

MAX_TOTAL_DRAFT_TOKENS = 512  # proposed for all requests together
MIN_DRAFT_LEN_BOUND = 4  # proposed for each request at least
NUM_BASELINE_STEPS = 2  # last steps of a pause, measured for the watchdog

logger = logging.getLogger(__name__)

TRIAL_STEPS = 5.0  # plain steps that a plug-in may take before its drafts have saved any
MAX_SAVED_CALLS = 16.0  # calls that savings can pay for in advance: enough for a few bad drafts in a row
CALL_COST_ALPHA = 1 / 8


class DrafterAccount:
    """Time that a drafter may take, in model seconds: it may spend what it earns.

    It earns the time that its drafts save beyond those of others, and EXPLORATION_SHARE of all time. So a
    drafter that does not pay takes that share at most, after a trial of TRIAL_STEPS.
    """

    __slots__ = ("_call_cost", "_trial_cost", "balance")

    def __init__(self, plain_cost: float) -> None:
        self.balance = self._trial_cost = TRIAL_STEPS * plain_cost
        self._call_cost = 0.0  # mean of recent calls

    @property
    def can_afford_call(self) -> bool:
        """Whether it has saved up for a call, or as much as a trial takes."""
        return self.balance >= min(self._call_cost, self._trial_cost)

    def charge(self, cost: float) -> None:
        """The drafter was called."""
        self.balance -= cost
        self._call_cost += (cost - self._call_cost) * (CALL_COST_ALPHA if self._call_cost else 1.0)

    def earn(self, saved: float, elapsed: float, plain_cost: float) -> None:
        """Its drafts saved `saved`, which may be negative, while `elapsed` passed."""
        self._trial_cost = TRIAL_STEPS * plain_cost
        if self.balance < self._trial_cost:
            self.balance = min(self.balance + EXPLORATION_SHARE * elapsed, self._trial_cost)
        self.balance = min(self.balance + saved, max(self._trial_cost, MAX_SAVED_CALLS * self._call_cost))


class DrafterAccounts:
    """The accounts of drafters that must earn their time, and what they take and propose in this step."""

    def __init__(self, drafters: Collection[str], step_cost: float) -> None:
        """step_cost  model seconds of a plain step"""
        self.by_drafter = {drafter: DrafterAccount(step_cost) for drafter in drafters}
        self.cost = 0.0  # cost of proposing in this step
        # Whose draft this step verifies, and the share of it that no other has, by request id
        self.verified: dict[str, tuple[str, float]] = {}

    def charge(self, drafter: str, cost: float) -> None:
        """A drafter was called."""
        self.by_drafter[drafter].charge(cost)
        self.cost += cost

    def record_skipped(self, num_steps: int, plain_cost: float) -> None:
        """Steps of `plain_cost` without proposals are over."""
        for account in self.by_drafter.values():
            account.earn(0.0, num_steps * plain_cost, plain_cost)

    def record_step(
        self,
        requests: Sequence[RequestStep],
        summary: StepSummary,
        cost: float,
        elapsed: float,
        plain_cost: float,
        decode_cost: float,
    ) -> None:
        """Credit drafters with what their drafts saved in a step.

        cost, elapsed            of the step without drafting, and with it
        plain_cost, decode_cost  of the step without drafts, and without prefill
        """
        saved = dict.fromkeys(self.by_drafter, 0.0)
        num_sampling = summary.num_sampling_requests
        for request in requests:
            drafter, surplus = self.verified.get(request.state.id, ("", 0.0))
            if drafter and request.num_draft_tokens:
                gain = (request.num_emitted - 1) * decode_cost / num_sampling
                gain -= (cost - plain_cost) * request.num_draft_tokens / summary.num_draft_rows
                saved[drafter] += surplus * gain
        for drafter, account in self.by_drafter.items():
            account.earn(saved[drafter], elapsed, decode_cost)


class DraftLengthController(Policy):
    """The policy of adaptive draft lengths. It reads no clock, so its calls determine its decisions."""

    def __init__(
        self,
        calibration: Calibration,
        max_tokens: int,
        pass_costs: Mapping[str, PassCost] | None = None,
        earning: Collection[str] = (),
        max_slowdown: float = DEFAULT_MAX_SLOWDOWN,
    ) -> None:
        """earning  drafters whose time must be earned by their drafts
        max_slowdown  share of its time that a request may lose to drafts of others
        """
        self._max_tokens = max_tokens
        acceptance: defaultdict[str, AcceptanceModel] = defaultdict(AcceptanceModel)
        for drafter in pass_costs or {}:
            acceptance[drafter] = AcceptanceModel(MODEL_PRIORS, MODEL_PRIOR_TRIALS)
        self._acceptance = acceptance
        self._model_drafters = frozenset(pass_costs or ())
        model = self.cost_model = CostModel(calibration, pass_costs or {})
        self.ledger = DelayLedger(max_slowdown)
        self.next_step = NextStep(model, self.ledger)
        self.backoff = Backoff()
        self.exploration = Exploration(model, self.next_step)
        self.accounts = DrafterAccounts(earning, model.step_costs.cost_of(StepShape(1, 1)))
        planned = model, acceptance, self.next_step
        self.verify_planner = VerifyPlanner(*planned, self.exploration, self.backoff)
        self.draft_planner = DraftModelPlanner(*planned, self.verify_planner, self.exploration, self.backoff)
        self.requests: dict[str, TrackedRequest] = {}
        self._steps_to_skip = 0
        self._last_was_empty = False  # the last step proposed, without a draft model
        self._is_baseline = False  # the last step verifies no drafts, to measure plain decoding
        self._last_plain_cost = 0.0
        self._length_counts: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self._no_draft_counts: Counter[str] = Counter()

    # Requests

    def start(self, state: RequestState) -> int:
        budget = self.ledger.open(state.id, state.params.max_tokens)
        request = self.requests[state.id] = TrackedRequest(state, self._max_tokens, budget)
        for drafter in self._model_drafters:
            request.acceptance[drafter] = self._acceptance[drafter].start_request()
        self.backoff.start(request, self.next_step.index)
        if request.sampler_class:
            self.next_step.sampler_classes[state.id] = request.sampler_class
        return max(request.skip_until - self.next_step.index, 0)

    def finish(self, request_id: str) -> None:
        request = self.requests.pop(request_id)
        self.backoff.finish(request)
        self.exploration.settle_probe(request, 0)
        for drafter in self._model_drafters:
            self._acceptance[drafter].finish_request(request.acceptance[drafter])
        self.draft_planner.record_output(request.state.num_output)
        self.next_step.sampler_classes.pop(request_id, None)
        self.ledger.close(request_id)

    # Proposals

    def record_acceptance(self, state: RequestState, draft: Draft, output_ids: Sequence[int]) -> None:
        request = self.requests[state.id]
        hits = self._acceptance[draft.drafter].update(draft, output_ids, request.acceptance[draft.drafter])
        if draft.drafter in self._model_drafters:
            self.exploration.settle_probe(request, hits if len(output_ids) > 1 else 0)

    def max_draft_len(self, state: RequestState) -> int:
        request, step = self.requests[state.id], self.next_step
        request.context_len = len(state.tokens)
        if not step.requests:
            step.draft_cost = self.accounts.cost = 0.0  # the last step was not recorded
        step.requests.append(request)
        if self.cost_model.watchdog.pause_steps:
            self._count_no_draft(request, BASELINE_STEP)
            return 0
        if request.skip_until > step.index and not self.draft_planner.suspends_backoff(step.index):
            self._count_no_draft(request, BACKOFF)
            return 0
        share = max(MAX_TOTAL_DRAFT_TOKENS // len(self.requests), MIN_DRAFT_LEN_BOUND)
        return min(request.max_draft_len, share)

    def may_propose(self, drafter: str, load: PrefillLoad) -> bool:
        if drafter in self._model_drafters:
            is_asked = not self.draft_planner.backs_off(drafter, len(self.requests))
            return is_asked and not self._wants_baseline(load)
        if self._delays_others(load):
            return False
        account = self.accounts.by_drafter.get(drafter)
        return account is None or (account.can_afford_call and not self._wants_baseline(load))

    def record_proposing(self, drafter: str, seconds: float) -> None:
        if drafter in self.accounts.by_drafter:
            self.accounts.charge(drafter, seconds / self.cost_model.drift)

    def plan_draft_model(
        self, proposals: Sequence[Proposal], load: PrefillLoad, drafter: str, pending_rows: Sequence[int]
    ) -> list[tuple[int, float]]:
        requests = [self._tracked(proposal) for proposal in proposals]
        num_live = len(self.requests)
        return self.draft_planner.plan(drafter, proposals, requests, pending_rows, load, num_live)

    # The drafts to verify

    def select(self, proposals: Sequence[Proposal], load: PrefillLoad) -> list[Draft | None]:
        drafts: list[Draft | None] = [None] * len(proposals)
        base_step = self.next_step.base(load)
        candidates = self._find_candidates(proposals, load)
        selection, reason, num_paid = Selection(()), NOT_WORTH_IT, 0.0
        self.accounts.verified.clear()
        if candidates:
            selection, reason = self.verify_planner.select(candidates, base_step)
            num_paid = self.verify_planner.num_proposals_paid(
                candidates, selection, base_step, len(proposals)
            )
        max_backoff = MAX_BACKOFF_NOT_WORTH_IT if reason is NOT_WORTH_IT else MAX_BACKOFF_DELAY_BUDGET
        for candidate, length in zip(candidates, selection.lengths, strict=True):
            if length:
                drafts[candidate.index] = self._accept(candidate, length, num_paid)
            else:
                self._reject(candidate.request, reason, max_backoff)
        has_proposed = bool(proposals) and not self._delays_others(load)
        self._last_was_empty = has_proposed and not self.next_step.draft_cost
        self._steps_to_skip = 0 if any(selection.lengths) else self._skippable_steps()
        self._is_baseline = reason is BASELINE_STEP
        if self._is_baseline and self.exploration.samples_plain:
            self._steps_to_skip = max(self._steps_to_skip, NUM_COLD_STEPS + 1)  # the last is a plain sample
        self.next_step.advance()
        return drafts

    def _delays_others(self, load: PrefillLoad) -> bool:
        """Proposing alone would delay a request without speculation beyond its budget.

        What is less than the step's own share of slowdown is proposed: verified drafts use up every budget.
        """
        if not self.ledger.nonspeculative:
            return False
        base_step = self.next_step.base(load)
        share = base_step.max_slowdown * base_step.plain_cost
        return self.backoff.proposal_cost > max(base_step.max_delay(self.next_step.requests), share)

    def _wants_baseline(self, load: PrefillLoad) -> bool:
        """The watchdog needs a plain step; one with prefill cannot serve as its baseline."""
        return self.cost_model.watchdog.wants_baseline and not load.num_rows

    def _find_candidates(self, proposals: Sequence[Proposal], load: PrefillLoad) -> list[Candidate]:
        """The best draft of each proposal that has a useful one."""
        wants_baseline = self._wants_baseline(load)
        candidates: list[Candidate] = []
        no_draft = NO_CANDIDATE, MAX_BACKOFF_NO_CANDIDATE
        if self._delays_others(load):
            no_draft = DELAY_BUDGET, MAX_BACKOFF_DELAY_BUDGET
        for index, proposal in enumerate(proposals):
            request = self._tracked(proposal)
            if not proposal.drafts:
                self._reject(request, *no_draft)
                continue
            if wants_baseline:
                self._count_no_draft(request, BASELINE_STEP)
                continue
            candidate = self.verify_planner.best_candidate(index, request, proposal.drafts)
            if candidate.gains:
                candidates.append(candidate)
            else:
                self._reject(request, NOT_WORTH_IT, MAX_BACKOFF_NOT_WORTH_IT)
        return candidates

    def _accept(self, candidate: Candidate, draft_len: int, num_paid_per_token: float) -> Draft:
        draft = candidate.draft
        num_paid = candidate.expected_tokens[draft_len] * num_paid_per_token
        self.backoff.record_hit(candidate.request, num_paid)
        self._length_counts[draft.drafter][draft_len] += 1
        if draft.drafter in self.accounts.by_drafter:
            self.accounts.verified[candidate.request.state.id] = draft.drafter, candidate.surplus
        if draft_len == len(draft.token_ids):
            return draft
        return Draft(draft.token_ids[:draft_len], draft.drafter, draft.confidence[:draft_len])

    def _reject(self, request: TrackedRequest, reason: str, max_backoff: int) -> None:
        """No draft in this step; after several the request backs off."""
        self.backoff.record_miss(request, self.next_step.index, max_backoff)
        self._count_no_draft(request, reason)

    def _count_no_draft(self, request: TrackedRequest, reason: str) -> None:
        self._no_draft_counts[reason] += 1
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("request %s: no draft: %s", request.state.id, reason)

    def _tracked(self, proposal: Proposal) -> TrackedRequest:
        return self.requests[proposal.request.state.id]

    # Skipped steps

    def _skippable_steps(self) -> int:
        """Steps from the next one on in which no request would draft."""
        watchdog, next_index = self.cost_model.watchdog, self.next_step.index + 1
        if watchdog.pause_steps:
            return max(watchdog.pause_steps - NUM_BASELINE_STEPS, 0)
        if self.draft_planner.suspends_backoff(next_index):
            return 0
        skip_until = min((request.skip_until for request in self.requests.values()), default=0)
        return max(skip_until - next_index, 0)

    def num_steps_to_skip(self) -> int:
        num_steps, self._steps_to_skip = self._steps_to_skip, 0
        return num_steps

    def record_skipped(self, num_steps: int, num_requests: int) -> None:
        self.next_step.index += num_steps
        reason = BASELINE_STEP if self.cost_model.watchdog.pause_steps else BACKOFF
        self._no_draft_counts[reason] += num_requests
        self.cost_model.watchdog.record_skipped(num_steps)
        self.accounts.record_skipped(num_steps, self._last_plain_cost)

    # Completed steps

    def record_step(self, step_record: StepRecord) -> None:
        model, accounts, requests = self.cost_model, self.accounts, step_record.requests
        summary = model.summarize(requests, self.next_step.sampler_classes)
        has_prefill = not summary.is_decode_only
        plain_cost = self._last_plain_cost = model.plain_cost(summary.plain_shape, has_prefill)
        proposing = accounts.cost + self.backoff.proposal_cost
        draft_cost = self.next_step.draft_cost
        is_planned = draft_cost > 0.0 and self.draft_planner.has_planned(self.next_step.index - 1)
        is_planned = is_planned and not self._is_baseline
        self._is_baseline = False
        cost, drafting = model.record_step(
            summary, step_record.seconds_by_stage, draft_cost, proposing, is_planned
        )
        if self._last_was_empty:
            slowdown = 1.0 - model.plain_ratio(has_prefill)  # overlap lost, or cold caches
            proposing = max(drafting - accounts.cost, 0.0)
            self.backoff.record_cost(proposing, proposing / cost + slowdown)
            self._last_was_empty = False  # a prompt's step may follow, without a select()
        count = summary.num_sampling_requests
        # accepted tokens save decode steps, which have no prefill
        decode_cost = model.decode_cost(count) if has_prefill and count else plain_cost
        elapsed = cost + drafting
        if accounts.by_drafter:
            accounts.record_step(requests, summary, cost, elapsed, plain_cost, decode_cost)
        self.next_step.draft_cost = accounts.cost = 0.0
        self.ledger.record_step(requests, plain_cost, decode_cost, elapsed)
        self.exploration.budget.earn(elapsed * model.drift)

    def enable_overlap(self) -> None:
        self.cost_model.enable_overlap()

    def record_plain_step(self, step_record: StepRecord) -> None:
        summary = self.cost_model.summarize(step_record.requests, self.next_step.sampler_classes)
        if summary.is_decode_only:
            self.cost_model.record_plain_step(summary, step_record.seconds_by_stage)

    def stats(self) -> DraftingStats:
        return DraftingStats(
            draft_length_counts={drafter: dict(lengths) for drafter, lengths in self._length_counts.items()},
            no_draft_counts=dict(self._no_draft_counts),
            predicted_seconds=self.cost_model.predicted_seconds,
            realised_seconds=self.cost_model.realised_seconds,
            plain_seconds=self.cost_model.plain_seconds,
            exploring_seconds=self.exploration.budget.spent,
        )
