"""Who runs in the next step, with how many rows, on which blocks.

There are no phases. Every running request has tokens whose KV is missing (a long prompt has many, a
decoding request one) and perhaps a draft; a step computes some of the missing rows of some requests
within a budget. Requests are served by rank: priority, then the turn of their account, then arrival. When
blocks run out the worst rank gives way, and drafts never take a block that anybody else could use.
"""

from __future__ import annotations

import logging
import time
from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from foreword.core.outputs import Draft, EmbeddingEvent, ErrorEvent, Event, StepOutput
from foreword.core.request import RequestState
from foreword.engine.queue import AdmissionFilter, FairQueue, WaitingQueue, sort_key_of
from foreword.engine.schedule import ScheduledRequest, ScheduleOutput, make_token_event
from foreword.errors import ForewordError, RequestFailed
from foreword.kv_cache.block_manager import BlockManager
from foreword.kv_cache.block_pool import BlockPool
from foreword.kv_cache.prefix_cache import PrefixCache

__all__ = ["Scheduler"]

logger = logging.getLogger(__name__)

POOLING_BUDGET_DIVISOR, MIN_POOLING_ROWS = 32, 8  # of the rows of a step, while others wait for tokens


def _all_tokens(state: RequestState, start: int) -> int:
    return len(state.tokens)


class Scheduler:
    """Owns the live requests and the blocks they hold.

    reach       of a request, how many tokens can be computed before a picture is needed that is not encoded yet, once those
                before an index are
    waiting     by rank; they hold no blocks
    running     by rank; they hold blocks for what is computed and one more token
    num_faults  requests that ended because what their step yielded could not be taken
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_caching: bool = True,
        computable_until: Callable[[RequestState, int], int] = _all_tokens,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert max_num_batched_tokens >= max_num_seqs, "every running request needs a row a step"
        self.pool = pool
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.block_manager = BlockManager(pool, block_size)
        self.prefix_cache = PrefixCache(pool, block_size, prefix_caching)
        self.computable_until = computable_until
        self.fair_queue = FairQueue()
        self.states: dict[str, RequestState] = {}
        self.waiting = WaitingQueue()
        self.running: list[RequestState] = []
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.num_faults = 0
        self._step_rows = max_num_batched_tokens
        self._admission = AdmissionFilter(
            self.waiting,
            self.running,
            self.prefix_cache,
            block_size,
            lambda state, start: self.computable_until(state, start),
            max_num_seqs,
            max_num_batched_tokens,
        )
        self._clock = clock

    @property
    def idle(self) -> bool:
        return not self.states

    def add(self, state: RequestState) -> None:
        """Let a request wait for its turn. Its whole length must fit into the cache."""
        assert self.block_manager.num_blocks(state.max_len) <= self.pool.num_blocks, (
            "max_model_len exceeds the cache"
        )
        self.states[state.id] = state
        self.fair_queue.add(state)
        self.waiting.add(state)

    def remove(self, request_id: str) -> RequestState | None:
        """Forget a request and free all it holds; None if it is not there (it ended by itself)."""
        return self._remove(request_id)

    def _remove(self, request_id: str) -> RequestState | None:
        """remove() from inside: a trace records only what comes from outside."""
        state = self.states.pop(request_id, None)
        if state is None:
            return None
        if state in self.running:
            self._release(state)
        else:
            self.waiting.remove(state)
        self.fair_queue.on_finish(state)
        return state

    @property
    def has_decision(self) -> bool:
        """Whether the next plan would start one of those that wait, or let one that runs give way to it."""
        if not len(self.waiting) or not self.running:
            return len(self.waiting) > 0
        self._admission.refresh()
        first = self._admission.next_candidate()
        return first is not None and (
            self._can_start(True) or first.request.priority < self.running[-1].request.priority
        )

    def reserve_ahead(self, lengths: Sequence[tuple[RequestState, int]]) -> bool:
        """Let running requests hold blocks for so many tokens each, which are computed ahead of their commits.

        Nobody gives way for that: False, and nothing has changed, if there are too few blocks.
        """
        return self.block_manager.reserve(lengths)

    def release_reserved(self) -> None:
        """Nothing is computed ahead any more."""
        self.block_manager.release_reserved()

    def set_drafts(self, drafts: Mapping[str, Draft]) -> None:
        """What the next plan may verify, by request."""
        for request_id, draft in drafts.items():
            self.states[request_id].set_draft(draft.token_ids, draft.drafter)

    def schedule(self, used_rows: int = 0) -> ScheduleOutput:
        """Choose the rows of the next step. Running requests go first, then new ones, then drafts.

        taken  rows that went into something else. Everybody who runs has one nevertheless.
        """
        self._step_rows = max(self.max_num_batched_tokens - used_rows, self.max_num_seqs)
        if self.fair_queue.update_tags(self.waiting):
            self.waiting.resort()
        self._admission.refresh()
        preempted: list[str] = self._preempt_for_priority()
        work: list[ScheduledRequest] = []
        budget, vector_rows = self._step_rows, self._pooling_budget()
        parts = (
            2 if self._can_start(vector_rows == budget) else 1
        )  # a long prompt leaves half of the step to those that wait
        for state in list(self.running):
            if state.id in preempted:  # it gave way to one before it
                continue
            younger = len(self.running) - len(work) - 1
            num_tokens = min(
                self._num_computable(state),
                -(-(budget - younger) // parts),
                vector_rows if state.is_pooling else budget,
            )
            if num_tokens and self._allocate_blocks(state, state.num_computed + num_tokens, preempted):
                work.append(_schedule_request(state, num_tokens))
                budget -= num_tokens
                vector_rows -= num_tokens if state.is_pooling else 0
        drafting = sum(len(w.state.draft) for w in work)
        work += self._admit(budget - min(drafting, budget // 2), vector_rows)
        drafted = tuple(self._add_drafts(work))
        pooled = tuple(item for item in drafted if item.state.is_pooling)
        return ScheduleOutput(
            tuple(item for item in drafted if not item.state.is_pooling) if pooled else drafted,
            tuple(preempted),
            pooled,
        )

    def update(self, scheduled: ScheduleOutput, outputs: Sequence[StepOutput]) -> list[Event]:
        """Take the step's outcome: append, publish, release. Rejection is arithmetic on num_computed."""
        events: list[Event] = []
        for work, outcome in zip(scheduled.requests, outputs, strict=True):
            if isinstance(outcome.error, RequestFailed):
                events.append(self._finish_with_error(work.state, outcome.error))
            else:
                events += self._update_request(work, outcome)
        return events

    def update_pooling(
        self, scheduled: ScheduleOutput, vectors: Sequence[bytes | ForewordError | None]
    ) -> list[Event]:
        """Take what became of the prompts that are pooled: vectors, why there is none, or None where tokens are missing."""
        events: list[Event] = []
        for work, vector in zip(scheduled.pooling_requests, vectors, strict=True):
            state = work.state
            if isinstance(vector, ForewordError):
                events.append(self._finish_with_error(state, vector))
                continue
            self._set_computed(state, work.start + work.num_tokens)
            if vector is not None:
                events.append(EmbeddingEvent(state.id, vector, state.num_cached, state.scheduled_s or 0.0))
                self._remove(state.id)
        return events

    def check(self) -> None:
        """Assert the invariants between steps."""
        self.pool.check(state.blocks for state in self.states.values())
        assert {s.id for s in self.waiting} | {s.id for s in self.running} == set(self.states)
        assert len(self.waiting) + len(self.running) == len(self.states)
        assert len(self.running) <= self.max_num_seqs
        assert all(not s.blocks and not s.num_computed and not s.draft for s in self.waiting)
        for state in self.running:
            assert 0 <= state.num_computed < len(state.tokens) and state not in self.waiting
            assert len(state.tokens) < state.max_len or state.is_pooling
            assert not state.draft or state.is_decoding
        self.block_manager.check(self.running)
        if self.idle:
            assert self.pool.num_used == 0 and self.prefix_cache.idle and not len(self.fair_queue)

    # Planning

    def _preempt_for_priority(self) -> list[str]:
        """Preempt requests of a worse priority while one of a better priority cannot start."""
        preempted: list[str] = []
        while self.running and (first := self._admission.next_candidate()) is not None:
            worst = self.running[-1]
            if first.request.priority >= worst.request.priority:
                break
            if len(self.running) < self.max_num_seqs and self._fits(first):
                break
            self._preempt(worst, preempted)
        return preempted

    def _num_computable(self, state: RequestState) -> int:
        """Tokens that could be computed now."""
        return self.computable_until(state, state.num_computed) - state.num_computed

    def _can_start(self, include_pooling: bool) -> bool:
        """Whether one of those that wait could run now; `vectors`: also one that wants no tokens."""
        if len(self.running) >= self.max_num_seqs:
            return False
        first = self._admission.next_candidate(include_pooling)
        return first is not None and self._fits(first)

    def _allocate_blocks(self, state: RequestState, num_tokens: int, preempted_ids: list[str]) -> bool:
        """Hold blocks for `num_tokens`; the worst rank gives way, be it the request itself."""
        while (missing := self.block_manager.blocks_needed(state, num_tokens)) > self.pool.num_free:
            victim = self.running[-1]
            self._preempt(victim, preempted_ids)
            if victim is state:
                return False
        if missing > 0:
            self.block_manager.allocate(state, num_tokens)
        return True

    def _pooling_budget(self) -> int:
        """Rows of a step for prompts that become vectors: all of them, or so few while others wait for tokens that both
        sides have about half of the time. There may be thousands of such prompts."""
        rows = self._step_rows
        waited_for = any(not state.is_pooling for state in self.running)
        return min(max(rows // POOLING_BUDGET_DIVISOR, MIN_POOLING_ROWS), rows) if waited_for else rows

    def _pooling_slots(self) -> int:
        """How many prompts that become vectors may start: the other half of the places is for those who want tokens."""
        return max(self.max_num_seqs // 2, 1) - sum(state.is_pooling for state in self.running)

    def _preempt(self, state: RequestState, preempted_ids: list[str]) -> None:
        """Free its blocks and let it wait; its tokens stay, and are computed again, exactly."""
        self._release(state)
        state.set_draft((), "")
        state.num_computed = 0
        self.waiting.add(state)
        self.num_preemptions += 1
        preempted_ids.append(state.id)

    def _admit(self, budget: int, pooling_budget: int) -> list[ScheduledRequest]:
        """Start waiting requests in order of rank, while rows, blocks and places last.

        vector_rows  how many of the rows may be of prompts that become vectors
        """
        work: list[ScheduledRequest] = []
        places = self._pooling_slots()

        def skipped(state: RequestState) -> bool:
            return state.is_pooling and (pooling_budget <= 0 or places <= 0)

        for state in self._admission.candidates(skipped):
            if budget <= 0 or len(self.running) >= self.max_num_seqs or not self._fits(state):
                break
            self.waiting.remove(state)
            self._start(state)
            num_tokens = min(
                self._num_computable(state), budget, pooling_budget if state.is_pooling else budget
            )
            self.block_manager.allocate(state, state.num_computed + num_tokens)
            work += [_schedule_request(state, num_tokens)] if num_tokens else []
            budget -= num_tokens
            pooling_budget -= num_tokens if state.is_pooling else 0
            places -= state.is_pooling
        return work

    def _fits(self, state: RequestState) -> bool:
        """Whether its known tokens find blocks, with one more for each running request to grow into."""
        self.prefix_cache.hash_blocks(state)
        shared = [digest for digest in self.prefix_cache.match(state) if not self.pool.is_free(digest)]
        wanted = self.block_manager.num_blocks(len(state.tokens)) - len(shared)
        return wanted + len(self.running) <= self.pool.num_free or not self.running

    def _start(self, state: RequestState) -> None:
        """Take what the cache holds of its beginning; the last token is always computed again."""
        state.num_computed = self.prefix_cache.attach(state) * self.block_size
        if state.scheduled_s is None:
            self._record_start(state)
        insort(self.running, state, key=sort_key_of)
        self._admission.invalidate(state)

    def _add_drafts(self, requests: list[ScheduledRequest]) -> Iterable[ScheduledRequest]:
        """Add drafted rows from what is left of the budget and of the blocks."""
        budget = self._step_rows - sum(w.num_tokens for w in requests)
        for item in requests:
            state = item.state
            num_draft = min(len(state.draft), budget) if item.is_sampled else 0
            missing = (
                self.block_manager.blocks_needed(state, len(state.tokens) + num_draft) if num_draft else 0
            )
            if missing > 0 and (self.waiting or missing > self.pool.num_free):
                num_draft = max(len(state.blocks) * self.block_size - len(state.tokens), 0)
            elif missing > 0:
                self.block_manager.allocate(state, len(state.tokens) + num_draft)
            budget -= num_draft
            yield replace(item, num_draft_tokens=num_draft) if num_draft else item

    def _record_start(self, state: RequestState) -> None:
        """Figures of the first start; what is found again after a preemption saved nothing."""
        state.scheduled_s = self._clock()
        self.fair_queue.on_start(state)
        state.num_cached = min(state.num_computed, state.num_prompt)
        if self.prefix_cache.is_enabled_for(state) and not state.request.is_resumed:
            self.prefix_queries += state.num_prompt
            self.prefix_hits += state.num_cached

    # Committing

    def _update_request(self, request: ScheduledRequest, output: StepOutput) -> list[Event]:
        """What a step yielded for one request; if it cannot be taken, that is the end of this request alone."""
        state = request.state
        try:
            events = self._apply_output(request, output)
        except Exception:
            logger.exception("request %s ends: what its step yielded cannot be taken", state.id)
            self.num_faults += 1
            return [self._fail_commit(state)]
        state.set_draft((), "")
        if output.is_finished:
            self._remove(state.id)
        return events

    def _fail_commit(self, state: RequestState) -> ErrorEvent:
        return self._finish_with_error(
            state, RequestFailed("what the engine computed for this request could not be taken")
        )

    def _finish_with_error(self, state: RequestState, error: ForewordError) -> ErrorEvent:
        """The end of a request of which a step yielded nothing: as if the step had not been."""
        self.prefix_cache.invalidate(state)
        state.set_draft((), "")
        self._remove(state.id)
        return ErrorEvent(state.id, error)

    def _apply_output(self, request: ScheduledRequest, step_output: StepOutput) -> list[Event]:
        state, output = request.state, request.state.num_output
        state.append(step_output.token_ids)
        self._set_computed(
            state,
            request.start + request.num_tokens + min(step_output.num_accepted, len(step_output.token_ids)),
        )
        self.block_manager.trim(state)
        state.prompt_logprobs += step_output.prompt_logprobs
        events: list[Event] = []
        if step_output.token_ids or step_output.finish_reason:
            events.append(make_token_event(request, step_output, output))
        if step_output.error is not None:
            events.append(ErrorEvent(state.id, step_output.error))
        return events

    def _set_computed(self, state: RequestState, num_computed: int) -> None:
        """The KV of so many tokens is there."""
        before, state.num_computed = state.num_computed, num_computed
        self.prefix_cache.publish(state, before)

    # Bookkeeping

    def _release(self, state: RequestState) -> None:
        self.running.remove(state)
        self._admission.invalidate(state)
        self.prefix_cache.forget(state)
        self.block_manager.release(state)


def _schedule_request(state: RequestState, num_tokens: int) -> ScheduledRequest:
    """The next known tokens of a request."""
    return ScheduledRequest(
        state,
        state.num_computed,
        num_tokens,
        is_sampled=num_tokens == state.num_uncomputed and not state.is_pooling,
    )
