"""Plans of verification: the best draft of each request, and how many of its tokens the step verifies."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from foreword.core.outputs import Draft
from foreword.speculation.draft_length.acceptance import AcceptanceModel
from foreword.speculation.draft_length.backoff import Backoff
from foreword.speculation.draft_length.cost_model import CostModel
from foreword.speculation.draft_length.exploration import Exploration
from foreword.speculation.draft_length.next_step import BaseStep, NextStep, TrackedRequest
from foreword.speculation.draft_length.row_selection import Candidate, Selection, select_rows

# Reasons for no draft, label values of a metric
NO_CANDIDATE, NOT_WORTH_IT, DELAY_BUDGET = "no_candidate", "not_worth_it", "delay_budget"
BASELINE_STEP, BACKOFF = "watchdog", "backoff"


class VerifyPlanner:
    """Chooses the draft tokens that pay, over all requests together."""

    def __init__(
        self,
        cost_model: CostModel,
        acceptance: defaultdict[str, AcceptanceModel],
        next_step: NextStep,
        exploration: Exploration,
        backoff: Backoff,
    ) -> None:
        self._cost_model = cost_model
        self._acceptance = acceptance
        self._next_step = next_step
        self._exploration = exploration
        self._backoff = backoff
        self._token_rate = 0.0  # expected tokens per model second of the last step

    def best_candidate(self, index: int, request: TrackedRequest, drafts: Sequence[Draft]) -> Candidate:
        """The draft of proposal `index` with the most expected tokens; without gains it pays at no price."""
        best, best_probs = drafts[0], self._prefix_probs(request, drafts[0])
        most, second = sum(best_probs), 0.0
        for draft in drafts[1:]:
            probs = self._prefix_probs(request, draft)
            expected = sum(probs)
            if expected > most:
                best, best_probs, most, second = draft, probs, expected, most
            else:
                second = max(second, expected)
        # tokens that plain decoding would yield in the time of the request's own cost per row
        row_cost = self._cost_model.step_costs.context_cost(request.context_len)
        row_cost += self._next_step.extra_sampling_cost(request)
        price = self._token_rate * row_cost
        gains = [prob - price for prob in best_probs if prob > price] if price else best_probs
        surplus = 1.0 - second / most if second else 1.0
        return Candidate(index, request, best, best_probs, gains, row_cost, surplus)

    def select(self, candidates: Sequence[Candidate], base_step: BaseStep) -> tuple[Selection, str]:
        """Draft lengths of all candidates, and the reason of the rejected ones."""
        num_rows = sum(len(candidate.gains) for candidate in candidates)
        costs = self._next_step.costs_by_draft_rows(base_step, num_rows)
        draft_cost, proposing = self._next_step.draft_cost, self._backoff.proposal_cost
        selection = select_rows(candidates, base_step, costs, draft_cost, proposing)
        if selection.limited_by_budget and not selection.rate:
            return selection, DELAY_BUDGET
        plain_rate = base_step.shape.num_sampled / base_step.plain_cost
        self._token_rate = selection.rate or plain_rate  # a rate that is out of reach must not stay the price
        if base_step.has_prefill:  # its time corrects no cost: there is nothing to learn
            return selection, NOT_WORTH_IT
        if not selection.rate:
            return self._exploration.probe(candidates, base_step, costs), NOT_WORTH_IT
        selection = self._exploration.probe_more(candidates, base_step, costs, selection)
        if self._exploration.takes_baseline(base_step, self._token_rate):
            return Selection([0] * len(candidates)), BASELINE_STEP
        return selection, NOT_WORTH_IT

    def num_proposals_paid(
        self, candidates: Sequence[Candidate], selection: Selection, base_step: BaseStep, num_proposals: int
    ) -> float:
        """How many proposals each expected token of the step pays for, by the time it saves."""
        num_rows, cost = sum(selection.lengths), self._backoff.proposal_cost
        if not num_rows or not cost:
            return math.inf
        expected = sum(c.expected_tokens[n] for c, n in zip(candidates, selection.lengths, strict=True))
        step_cost = self._next_step.costs_by_draft_rows(base_step, num_rows)[num_rows]
        step_cost += self._next_step.draft_cost
        saved = expected * base_step.plain_cost / base_step.shape.num_sampled
        saved -= step_cost - base_step.plain_cost
        return saved / expected * num_proposals / cost

    def _prefix_probs(self, request: TrackedRequest, draft: Draft) -> list[float]:
        acceptance = request.acceptance[draft.drafter]
        min_prob = self._next_step.min_prefix_prob
        return self._acceptance[draft.drafter].prefix_probs(draft, acceptance, min_prob)
