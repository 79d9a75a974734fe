"""All drafters of an engine behind one door: who is asked, what is verified, and what if one fails."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence, Set
from typing import TypeVar

from foreword.core.outputs import Draft, DraftingStats
from foreword.core.request import RequestState
from foreword.speculation.base import DeviceDrafter, Drafter, DraftRequest, ModelBasedDrafter
from foreword.speculation.control.cost_model import MeasuredCosts
from foreword.speculation.policy import Policy, PrefillLoad, Proposal, StepRecord

__all__ = ["Proposer"]

Result = TypeVar("Result")
NO_PREFILL = PrefillLoad()

logger = logging.getLogger(__name__)


class Proposer:
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
        model_drafters: Sequence[ModelBasedDrafter] = (),
        never_sampled_ids: Set[int] = frozenset(),
    ) -> None:
        self.drafters = tuple(drafters)
        self.model_drafters = tuple(model_drafters)
        self.vocab_size = vocab_size
        self.never_sampled_ids = never_sampled_ids
        self.policy = policy
        self.timings: MeasuredCosts | None = None
        self.errors: Counter[str] = Counter()
        self._request_drafters: dict[str, tuple[Drafter, ...]] = {}
        self._unscored_drafts: dict[str, tuple[int, list[Draft]]] = {}
        self.is_skipping = False
        self.device_drafter = next(
            (
                one
                for one in model_drafters
                if isinstance(one, DeviceDrafter) and one.decode_loop_forward is not None
            ),
            None,
        )
        self._steps_to_skip = 0
        self._num_skipped_steps = self._num_skipped_requests = (
            0  # steps of a rest so far, and how often in them a request was not asked
        )
        self._stats: DraftingStats | None = None

    @property
    def is_disabled(self) -> bool:
        """No drafter runs: a step has nothing to do here."""
        return not self.drafters and not self.model_drafters

    def start(self, state: RequestState) -> None:
        """A request begins; a drafter that cannot start it is not asked about it again."""
        self._steps_to_skip = 0
        self._request_drafters[state.id] = tuple(
            drafter
            for drafter in self._allowed_drafters(state)
            if self._catch(drafter.name, lambda d=drafter: d.start(state) or True)  # type: ignore[misc]
        )
        if self._request_drafters[state.id]:  # the policy meets the others in the steps that serve them
            self._catch("policy", lambda: self.policy.start(state))

    def finish(self, request_id: str, output: Sequence[int] = ()) -> None:
        """A request is over; `output` is what was delivered of an answer that ended by itself."""
        drafters = self._request_drafters.pop(request_id, ())
        self._unscored_drafts.pop(request_id, None)
        for drafter in drafters:
            self._catch(drafter.name, lambda d=drafter: d.finish(request_id, output))  # type: ignore[misc]
        if drafters:
            self._catch("policy", lambda: self.policy.finish(request_id))

    def disable_draft_model(self, request_id: str) -> None:
        """No model can be asked about a request any more: its pictures cannot be shown to it."""
        drafters = self._request_drafters[request_id]
        self._request_drafters[request_id] = tuple(
            drafter for drafter in drafters if drafter not in self.model_drafters
        )
        for model in (drafter for drafter in drafters if drafter in self.model_drafters):
            self.errors[model.name] += 1
            self._catch(model.name, lambda m=model: m.finish(request_id))  # type: ignore[misc]

    def propose(
        self, states: Sequence[RequestState], load: PrefillLoad = NO_PREFILL
    ) -> tuple[Draft | None, ...]:
        """What the next step shall verify of each request that has one token left to compute; None for nothing."""
        nothing: tuple[Draft | None, ...] = (None,) * len(states)
        self.is_skipping = bool(states) and (
            self._steps_to_skip > 0 or not any(self._request_drafters[state.id] for state in states)
        )
        if not states:
            return nothing  # a step of prompts alone is in the books, also in a rest
        if self.is_skipping:
            self._skip_step(states)
            return nothing
        self._stats = None
        if self._num_skipped_steps:
            self._catch(
                "policy",
                lambda: self.policy.record_skipped(self._num_skipped_steps, self._num_skipped_requests),
            )
            self._num_skipped_steps = self._num_skipped_requests = 0
        drafts = self._catch("policy", lambda: self._propose(states, load)) or nothing
        self._steps_to_skip = self._catch("policy", self.policy.num_steps_to_skip) or 0
        return drafts

    def _skip_step(self, states: Sequence[RequestState]) -> None:
        """A step in which nobody is asked: of a rest, or because none of its requests may be drafted for."""
        if self._steps_to_skip:
            self._steps_to_skip -= 1
            self._num_skipped_steps += 1
            self._num_skipped_requests += sum(bool(self._request_drafters[state.id]) for state in states)

    def fixed_draft_len(self, states: Sequence[RequestState], num_steps: int = 1) -> int | None:
        """What so many steps from the next one on verify of each of these, whatever comes out of them: 0, nothing, for nobody
        is asked; or so many guesses of the lender. None: that is decided step by step."""
        if self._steps_to_skip >= num_steps or not any(self._request_drafters[state.id] for state in states):
            return 0
        if self._steps_to_skip or any(
            self._request_drafters[state.id] != (self.device_drafter,) for state in states
        ):
            return None
        return (
            self._catch(
                "policy", lambda: self.policy.fixed_draft_len([DraftRequest(state) for state in states])
            )
            or None
        )

    def acquire_device(self, states: Sequence[RequestState], num_tokens: int) -> bool:
        """See Lender.lend(); an error is counted, and the answer is no."""
        lender = self._device_drafter
        return self._catch(lender.name, lambda: lender.acquire_device(states, num_tokens)) or False

    def reserve_device(self, states: Sequence[RequestState], num_tokens: int) -> bool:
        """See Lender.extend(), and lend()."""
        lender = self._device_drafter
        return self._catch(lender.name, lambda: lender.reserve_device(states, num_tokens)) or False

    def device_blocks(self, state: RequestState) -> Sequence[int]:
        """The block table of a request in the lender's cache."""
        return self._device_drafter.device_blocks(state)

    def release_device(self, state: RequestState, num_computed: int) -> None:
        """See Lender.take_back()."""
        lender = self._device_drafter
        self._catch(lender.name, lambda: lender.release_device(state, num_computed))

    def record_verified(self, drafts: Sequence[tuple[RequestState, Draft, Sequence[int]]]) -> None:
        """Drafts that rounds made and verified, each with what the text went on with."""
        self.is_skipping, self._stats = True, None
        offers = [Proposal(DraftRequest(state, len(draft.token_ids)), [draft]) for state, draft, _ in drafts]
        self._catch("policy", lambda: self.policy.select(offers, NO_PREFILL))
        for state, draft, run in drafts:
            self._catch("policy", lambda s=state, d=draft, r=run: self.policy.record_acceptance(s, d, r))  # type: ignore[misc]

    @property
    def _device_drafter(self) -> DeviceDrafter:
        assert self.device_drafter is not None
        return self.device_drafter

    def record_step(self, step_record: StepRecord) -> None:
        """A step is over."""
        self._catch("policy", lambda: self.policy.record_step(step_record))

    def enable_overlap(self) -> None:
        """See Policy.expect_ahead()."""
        self._catch("policy", self.policy.enable_overlap)

    def record_overlap_step(self, step_record: StepRecord) -> None:
        """A step of a rest was computed ahead."""
        self._catch("policy", lambda: self.policy.record_overlap_step(step_record))

    def stats(self) -> DraftingStats:
        """What was decided so far; the same object while nobody is asked."""
        if self._stats is None:
            self._stats = self._catch("policy", self.policy.stats) or DraftingStats()
        return self._stats

    def check(self) -> None:
        """Assert that drafters keep state of live requests alone."""
        assert all(request_id in self._request_drafters for request_id in self._unscored_drafts)
        for drafter in (*self.drafters, *self.model_drafters):
            drafter.check(self._request_drafters)

    def _propose(self, states: Sequence[RequestState], load: PrefillLoad) -> tuple[Draft | None, ...]:
        offers = self._make_proposals(states)
        for drafter in self.drafters:
            self._collect_drafts(
                drafter,
                [
                    offer
                    for offer in offers.values()
                    if drafter in self._request_drafters[offer.request.state.id]
                ],
            )
        for model in self.model_drafters:
            self._collect_drafts(model, self._select_for_model(model, offers, load))
        listed = list(offers.values())
        chosen: list[Draft | None] = [None] * len(states)
        for index, offer, draft in zip(offers, listed, self.policy.select(listed, load), strict=True):
            chosen[index] = draft
            if offer.drafts:
                self._unscored_drafts[offer.request.state.id] = offer.request.num_tokens, offer.drafts
        return tuple(chosen)

    def _make_proposals(self, states: Sequence[RequestState]) -> dict[int, Proposal]:
        """Those that may draft now, by index, each with the longest draft of use; what was offered before is scored."""
        offers: dict[int, Proposal] = {}
        for index, state in enumerate(states):
            if not self._request_drafters[state.id]:
                continue
            begin, drafts = self._unscored_drafts.pop(state.id, (0, ()))
            for draft in drafts:
                self.policy.record_acceptance(state, draft, state.tokens[begin:])
            length = min(
                self.policy.max_draft_len(DraftRequest(state)), state.max_len - len(state.tokens) - 1
            )
            if length > 0:
                offers[index] = Proposal(DraftRequest(state, length))
        return offers

    def _select_for_model(
        self, model: ModelBasedDrafter, proposals: dict[int, Proposal], load: PrefillLoad
    ) -> list[Proposal]:
        """The offers that `model` shall add to, asked for as much as the policy says."""
        mine = [
            offer for offer in proposals.values() if model in self._request_drafters[offer.request.state.id]
        ]
        counted = (
            self._catch(model.name, lambda: [model.num_pending_rows(offer.request) for offer in mine]) or []
        )
        able = [offer for offer, backlog in zip(mine, counted, strict=False) if backlog]
        backlogs = [backlog for backlog in counted if backlog]
        if not able:
            return []
        wanted: list[Proposal] = []
        for offer, (length, worth) in zip(
            able, self.policy.plan_draft_model(able, load, model.name, backlogs), strict=True
        ):
            if length > 0:
                ask = offer.request
                offer.request = DraftRequest(ask.state, min(length, ask.max_tokens), worth)
                wanted.append(offer)
        return wanted

    def _collect_drafts(self, drafter: Drafter, proposals: Sequence[Proposal]) -> None:
        """Add to the offers what one drafter says."""
        if not proposals:
            return
        asks = [offer.request for offer in proposals]
        found = self._catch(drafter.name, lambda: self._call_drafter(drafter, asks))
        for offer, draft in zip(proposals, found or (), strict=False):
            if draft is not None:
                offer.drafts.append(draft)

    def _call_drafter(self, drafter: Drafter, requests: list[DraftRequest]) -> list[Draft | None]:
        """What one drafter says, up to the first id that cannot be right. Raises whatever is wrong with it."""
        drafts = drafter.propose(requests)
        return [
            self._truncate_to_legal(ask, drafter, draft) for ask, draft in zip(requests, drafts, strict=True)
        ]

    def _truncate_to_legal(
        self, request: DraftRequest, drafter: Drafter, draft: Draft | None
    ) -> Draft | None:
        """The draft up to its first id that is never sampled or that the grammar refuses, and not longer than asked for."""
        if draft is None:
            return None
        length = min(len(draft.token_ids), request.max_tokens)
        for index, token_id in enumerate(draft.token_ids[:length]):
            if (
                type(token_id) is not int
                or not 0 <= token_id < self.vocab_size
                or token_id in self.never_sampled_ids
            ):
                length = index
                break
        if request.state.grammar is not None:
            length = request.state.grammar.num_legal(draft.token_ids[:length])
        if length == len(draft.token_ids) and length and draft.drafter == drafter.name:
            return draft
        return Draft(draft.token_ids[:length], drafter.name, draft.confidence[:length]) if length else None

    def _allowed_drafters(self, state: RequestState) -> tuple[Drafter, ...]:
        """The drafters that the request lets guess for it."""
        method, drafters = state.params.speculation.method, (*self.drafters, *self.model_drafters)
        if method == "auto":
            return drafters
        return tuple(drafter for drafter in drafters if drafter.name == method)

    def _catch(self, name: str, call: Callable[[], Result]) -> Result | None:
        try:
            return call()
        except Exception:
            self.errors[name] += 1
            count = self.errors[name]
            if count & (count - 1) == 0:  # 1, 2, 4, ...: what fails in every step would flood the log
                logger.exception(
                    "drafter %s failed, %d times so far; its drafts of these steps are dropped", name, count
                )
            return None
