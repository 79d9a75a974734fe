"""Runs all drafters of an engine, lets the policy choose what is verified, and isolates their errors."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence, Set
from typing import TypeVar

from foreword.core.outputs import Draft, DraftingStats
from foreword.core.request import RequestState
from foreword.core.structured_output import Vocabulary
from foreword.errors import Terminated
from foreword.speculation.draft_length.cost_model import MeasuredCosts
from foreword.speculation.draft_length.policy import NUM_COLD_STEPS, Policy, PrefillLoad, Proposal, StepRecord
from foreword.speculation.engine_drafter import (
    DeviceDrafter,
    DraftRequest,
    EngineDrafter,
    ModelBasedDrafter,
    NoFiniteLogits,
)
from foreword.speculation.plugin import summarize_error

Result = TypeVar("Result")
NO_PREFILL = PrefillLoad()
SURE_TOKENS, SURE_PROB = 8, 0.5  # a draft beside which fallbacks are not asked

logger = logging.getLogger(__name__)


class Proposer:
    """Collects drafts for decoding requests, and the policy's choice among them.

    Model-based drafters run after the others, and only where the policy plans it.
    """

    def __init__(
        self,
        drafters: Sequence[EngineDrafter],
        vocab_size: int,
        policy: Policy,
        model_drafters: Sequence[ModelBasedDrafter] = (),
        never_sampled_ids: Set[int] = frozenset(),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.drafters = tuple(drafters)
        self.model_drafters = tuple(model_drafters)
        self.vocab_size = vocab_size
        self.never_sampled_ids = never_sampled_ids  # a draft ends before one
        self.policy = policy
        self.timings: MeasuredCosts | None = None  # measured costs that the policy uses
        self.errors: Counter[str] = Counter()  # exceptions caught, by drafter, and of "policy"
        self.is_skipping = False  # no drafter ran for this step, or it was a device step: no cost sample
        devices = (
            d for d in model_drafters if isinstance(d, DeviceDrafter) and d.decode_loop_forward is not None
        )
        self.device_drafter = next(devices, None)
        self.on_timed_call: Callable[[str | None], None] = lambda name: None  # a call begins; None: it ends
        self._clock = clock
        self._seconds: defaultdict[str, float] = defaultdict(float)  # by drafter, not recorded yet
        self._request_drafters: dict[str, tuple[EngineDrafter, ...]] = {}
        self._has_drafted: set[str] = set()  # names of drafters
        self._broken_requests: dict[str, Sequence[str]] = {}  # without finite logits in this step, by drafter
        self._removed_drafters: set[str] = set()  # names of models that are broken for all requests
        self._unscored_drafts: dict[str, tuple[int, list[Draft]]] = {}
        self._steps_to_skip = 0
        self._is_last_skip = False  # proposing follows this step
        self._num_skipped_steps = 0
        self._num_skipped_requests = 0  # summed over the skipped steps
        self._stats: DraftingStats | None = None

    @property
    def should_sample_cost(self) -> bool:
        """Whether the step is a sample of plain decoding: the last of several without proposals."""
        return self._is_last_skip and self._num_skipped_steps > NUM_COLD_STEPS

    @property
    def is_disabled(self) -> bool:
        """There is no drafter."""
        return not self.drafters and not self.model_drafters

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """The tokens, for drafters that write text."""
        for drafter in self.drafters:
            self._catch(drafter.name, lambda d=drafter: d.set_vocabulary(vocabulary))  # type: ignore[misc]

    def prepare(self) -> None:
        """Work of drafters that the first draft would wait for; the engine is idle."""
        for drafter in self.drafters:
            self._catch(drafter.name, drafter.prepare)

    def start(self, state: RequestState) -> None:
        """A request begins. A drafter whose start() fails is not used for it."""
        speculation = state.params.speculation
        drafters: tuple[EngineDrafter, ...] = (*self.drafters, *self.model_drafters)
        if speculation.max_draft_tokens == 0:
            drafters = ()  # as with method "off": steps need not wait for proposals
        self._request_drafters[state.id] = tuple(
            drafter
            for drafter in drafters
            if speculation.method in ("auto", drafter.name)
            and drafter.name not in self._removed_drafters
            and self._call(drafter, lambda d=drafter: d.start(state) is not False)  # type: ignore[misc]
        )
        if self._request_drafters[state.id]:  # the policy sees other requests in record_step()
            self._report_skipped_steps()
            num_steps = self._catch("policy", lambda: self.policy.start(state)) or 0
            self._steps_to_skip = min(self._steps_to_skip, num_steps)

    def finish(self, request_id: str, output: Sequence[int] = ()) -> None:
        """A request ends; `output` are the delivered tokens of a completed one."""
        drafters = self._request_drafters.pop(request_id, ())
        self._unscored_drafts.pop(request_id, None)
        for drafter in drafters:
            self._call(drafter, lambda d=drafter: d.finish(request_id, output))  # type: ignore[misc]
        if drafters:
            self._catch("policy", lambda: self.policy.finish(request_id))

    def disable_draft_model(self, request_id: str) -> None:
        """Stop model-based drafting for a request: its images cannot be encoded."""
        models = [d.name for d in self._request_drafters[request_id] if d in self.model_drafters]
        self.errors.update(models)
        self._stop_drafters(request_id, models)

    def propose(
        self, states: Sequence[RequestState], load: PrefillLoad = NO_PREFILL
    ) -> tuple[Draft | None, ...]:
        """The draft that the next step verifies, or None, for each decoding request."""
        no_drafts: tuple[Draft | None, ...] = (None,) * len(states)
        can_draft = any(self._request_drafters[state.id] for state in states)
        self.is_skipping = bool(states) and (self._steps_to_skip > 0 or not can_draft)
        self._is_last_skip = self.is_skipping and self._steps_to_skip == 1
        if not states:
            return no_drafts  # a prefill step is recorded even while steps are skipped
        if self.is_skipping:
            if self._steps_to_skip:
                self._steps_to_skip -= 1
                self._num_skipped_steps += 1
                self._num_skipped_requests += sum(bool(self._request_drafters[s.id]) for s in states)
            return no_drafts
        self._stats = None
        self._report_skipped_steps()
        drafts = self._catch("policy", lambda: self._propose(states, load)) or no_drafts
        self._stop_broken()  # the policy has selected: it may forget requests now
        self._steps_to_skip = self._catch("policy", self.policy.num_steps_to_skip) or 0
        return drafts

    def fixed_draft_len(self, states: Sequence[RequestState], num_steps: int = 1) -> int | None:
        """Draft length fixed for the next `num_steps` steps: 0 (no drafting) or k from the device drafter.

        None: decided per step.
        """
        drafters = [self._request_drafters[state.id] for state in states]
        if self._steps_to_skip >= num_steps or not any(drafters):
            return 0
        if self._steps_to_skip or any(each != (self.device_drafter,) for each in drafters):
            return None
        return self._catch("policy", lambda: self.policy.fixed_draft_len(states)) or None

    def call_device_drafter(self, call: Callable[[DeviceDrafter], Result]) -> Result | None:
        """Result of a call of the device drafter; None after an error, which is counted."""
        drafter = self.device_drafter
        assert drafter is not None
        return self._catch(drafter.name, lambda: call(drafter))

    def record_verified(self, drafts: Sequence[tuple[RequestState, Draft, Sequence[int]]]) -> None:
        """Drafts that the device loop made and verified, each with the output since it began."""
        self.is_skipping, self._stats = True, None
        proposals = [Proposal(DraftRequest(s, len(draft.token_ids)), [draft]) for s, draft, _ in drafts]
        self._catch("policy", lambda: self.policy.select(proposals, NO_PREFILL))
        for state, draft, output in drafts:
            self._catch("policy", lambda s=state, d=draft, o=output: self.policy.record_acceptance(s, d, o))  # type: ignore[misc]

    def record_step(self, step_record: StepRecord) -> None:
        """A step is over."""
        self._catch("policy", lambda: self.policy.record_step(step_record))

    def enable_overlap(self) -> None:
        """See Policy.enable_overlap()."""
        self._catch("policy", self.policy.enable_overlap)

    def record_plain_step(self, step_record: StepRecord) -> None:
        """See Policy.record_plain_step()."""
        self._catch("policy", lambda: self.policy.record_plain_step(step_record))

    def stats(self) -> DraftingStats:
        """Totals since the engine started; the same object until the next decision."""
        if self._stats is None:
            self._stats = self._catch("policy", self.policy.stats) or DraftingStats()
        return self._stats

    def check(self) -> None:
        """Assert that drafters keep state of live requests only."""
        assert all(request_id in self._request_drafters for request_id in self._unscored_drafts)
        for drafter in (*self.drafters, *self.model_drafters):
            drafter.check(self._request_drafters)

    def _report_skipped_steps(self) -> None:
        if self._num_skipped_steps:
            skipped = self._num_skipped_steps, self._num_skipped_requests
            self._catch("policy", lambda: self.policy.record_skipped(*skipped))
            self._num_skipped_steps = self._num_skipped_requests = 0

    def _propose(self, states: Sequence[RequestState], load: PrefillLoad) -> tuple[Draft | None, ...]:
        by_index = self._make_proposals(states)
        proposals = list(by_index.values())
        for drafter in self.drafters:
            if self.policy.may_propose(drafter.name, load):
                asked = self._proposals_for(drafter, proposals)
                if drafter.is_fallback:
                    asked = [proposal for proposal in asked if not any(map(_is_sure, proposal.drafts))]
                self._collect_drafts(drafter, asked)
                if drafter.name in self._seconds:
                    self.policy.record_proposing(drafter.name, self._seconds.pop(drafter.name))
        for model in self.model_drafters:
            if self.policy.may_propose(model.name, load):
                self._collect_drafts(model, self._select_for_model(model, proposals, load))
        selected: list[Draft | None] = [None] * len(states)
        for index, draft in zip(by_index, self.policy.select(proposals, load), strict=True):
            selected[index] = draft
        for proposal in proposals:
            if proposal.drafts:
                self._unscored_drafts[proposal.request.state.id] = (
                    proposal.request.num_tokens,
                    proposal.drafts,
                )
        return tuple(selected)

    def _stop_broken(self) -> None:
        """Stop models without finite logits: for these requests, for all if the model has never drafted."""
        for name, request_ids in self._broken_requests.items():
            if name in self._has_drafted:
                self._count_error(name, "its logits are not finite")
            else:
                self.errors[name] += 1
                self._removed_drafters.add(name)
                request_ids = [*self._request_drafters]
                logger.error(
                    "drafter %s failed and is removed: its logits are not finite, as with damaged weights",
                    name,
                )
            for request_id in request_ids:
                self._stop_drafters(request_id, [name])
        self._broken_requests.clear()

    def _stop_drafters(self, request_id: str, names: Collection[str]) -> None:
        """Some drafters are not used for a request any more."""
        drafters = self._request_drafters[request_id]
        self._request_drafters[request_id] = tuple(d for d in drafters if d.name not in names)
        for drafter in (drafter for drafter in drafters if drafter.name in names):
            self._catch(drafter.name, lambda d=drafter: d.finish(request_id))  # type: ignore[misc]
        if drafters and not self._request_drafters[request_id]:
            self._catch("policy", lambda: self.policy.finish(request_id))  # finish() will not

    def _make_proposals(self, states: Sequence[RequestState]) -> dict[int, Proposal]:
        """Empty proposals of the requests that may draft now, by index. Scores their last drafts first."""
        proposals: dict[int, Proposal] = {}
        policy = self.policy
        for index, state in enumerate(states):
            if not self._request_drafters[state.id]:
                continue
            unscored = self._unscored_drafts.pop(state.id, None)
            if unscored is not None:
                start, drafts = unscored
                output = state.tokens[start:]
                for draft in drafts:
                    policy.record_acceptance(state, draft, output)
            length = min(policy.max_draft_len(state), state.max_len - len(state.tokens) - 1)
            if length > 0:
                proposals[index] = Proposal(DraftRequest(state, length))
        return proposals

    def _proposals_for(self, drafter: EngineDrafter, proposals: Sequence[Proposal]) -> list[Proposal]:
        return [p for p in proposals if drafter in self._request_drafters[p.request.state.id]]

    def _select_for_model(
        self, model: ModelBasedDrafter, proposals: Sequence[Proposal], load: PrefillLoad
    ) -> list[Proposal]:
        """The proposals for which the policy runs `model`, with its bounds in their requests."""
        allowed = self._proposals_for(model, proposals)
        pending = self._catch(model.name, lambda: [model.num_pending_rows(p.request) for p in allowed]) or []
        ready = [proposal for proposal, rows in zip(allowed, pending, strict=False) if rows]
        if not ready:
            return []
        plans = self.policy.plan_draft_model(ready, load, model.name, [rows for rows in pending if rows])
        selected: list[Proposal] = []
        for proposal, (length, min_prob) in zip(ready, plans, strict=True):
            if length > 0:
                request = proposal.request
                proposal.request = DraftRequest(
                    request.state, min(length, request.max_draft_tokens), min_prob
                )
                selected.append(proposal)
        return selected

    def _collect_drafts(self, drafter: EngineDrafter, proposals: Sequence[Proposal]) -> None:
        """Add the drafts of one drafter to the proposals."""
        if not proposals:
            return

        def call() -> list[Draft | None]:
            requests = [proposal.request for proposal in proposals]
            try:
                drafts = drafter.propose(requests)
            except NoFiniteLogits as error:
                self._broken_requests[drafter.name] = error.request_ids
                return []
            return [self._truncate_to_legal(r, drafter, d) for r, d in zip(requests, drafts, strict=True)]

        for proposal, draft in zip(proposals, self._call(drafter, call) or (), strict=False):
            if draft is not None and draft.token_ids:
                proposal.drafts.append(draft)
                self._has_drafted.add(drafter.name)
            elif draft is not None and drafter in self.model_drafters:  # its forward passes still cost
                self.policy.record_acceptance(proposal.request.state, draft, ())

    def _truncate_to_legal(
        self, request: DraftRequest, drafter: EngineDrafter, draft: Draft | None
    ) -> Draft | None:
        """The draft up to its first id that is never sampled or refused by the grammar; it may be empty."""
        if draft is None:
            return None
        length = min(len(draft.token_ids), request.max_draft_tokens)
        if not self._are_sampled_ids(draft.token_ids):
            for index, token_id in enumerate(draft.token_ids[:length]):
                if not self._are_sampled_ids((token_id,)):
                    length = index
                    break
        if request.state.grammar is not None:
            length = request.state.grammar.num_legal(draft.token_ids[:length])
        if length == len(draft.token_ids) and length and draft.drafter == drafter.name:
            return draft
        return Draft(draft.token_ids[:length], drafter.name, draft.confidence[:length])

    def _are_sampled_ids(self, token_ids: Sequence[int]) -> bool:
        """Whether all are ids that may be sampled; by built-ins, since a step has hundreds."""
        return (
            {*map(type, token_ids)} == {int}
            and min(token_ids) >= 0
            and max(token_ids) < self.vocab_size
            and self.never_sampled_ids.isdisjoint(token_ids)
        )

    def _call(self, drafter: EngineDrafter, call: Callable[[], Result]) -> Result | None:
        """A call of a drafter; None after an error."""
        if not drafter.is_timed:
            return self._catch(drafter.name, call)
        self.on_timed_call(drafter.name)
        started = self._clock()
        result = self._catch(drafter.name, call)
        self._seconds[drafter.name] += self._clock() - started
        self.on_timed_call(None)
        return result

    def _catch(self, name: str, call: Callable[[], Result]) -> Result | None:
        try:
            return call()
        except Terminated:
            raise
        except (Exception, SystemExit) as error:  # a drafter cannot end the process
            self._count_error(name, summarize_error(error), logger.isEnabledFor(logging.DEBUG))
            return None

    def _count_error(self, name: str, reason: str, exc_info: bool = False) -> None:
        self.errors[name] += 1
        count = self.errors[name]
        if count & (count - 1) == 0:  # 1, 2, 4, ...: an error in every step must not flood the log
            logger.error(
                "drafter %s failed, %d times so far; its drafts are dropped: %s",
                name,
                count,
                reason,
                exc_info=exc_info,
            )


def _is_sure(draft: Draft) -> bool:
    """Whether a draft is long, and likely right: another lookup would cost more than it could add."""
    confidence = draft.confidence[:SURE_TOKENS]
    return len(confidence) == SURE_TOKENS and math.prod(confidence) >= SURE_PROB
