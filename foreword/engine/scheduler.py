"""The scheduler: rows and KV blocks of each request in the next step.

There are no prefill and decode phases. Each running request has tokens whose KV is missing (many in a long
prompt, one while it decodes) and maybe a draft; a step computes some of them within a row budget. Requests
are served by rank: priority, fair-queue tag, arrival. When blocks run out, the worst rank is preempted.
Drafts never take a block that another request could use.
"""

from __future__ import annotations

import logging
import time
from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from foreword.core.outputs import (
    Draft,
    DraftResult,
    EmbeddingEvent,
    ErrorEvent,
    Event,
    StepOutput,
    TokenEvent,
)
from foreword.core.request import RequestState
from foreword.engine.waiting_queue import (
    AdmissionFilter,
    ComputableUntil,
    FairQueue,
    WaitingQueue,
    sort_key_of,
)
from foreword.errors import ForewordError, RequestFailed
from foreword.kv_cache.block_manager import BlockManager
from foreword.kv_cache.block_pool import BlockPool
from foreword.kv_cache.prefix_cache import PrefixCache
from foreword.kv_cache.state_cache import StateCache

logger = logging.getLogger(__name__)

# Rows of pooling requests while others generate: 1/32 of the step keeps both busy about half of the time
POOLING_BUDGET_DIVISOR, MIN_POOLING_ROWS = 32, 8


class ScheduledRequest(NamedTuple):
    """Rows of one request: `num_tokens` known tokens from index `start`, then `num_draft_tokens`."""

    state: RequestState
    start: int
    num_tokens: int
    is_sampled: bool  # the rows include the last known token, so the step yields new tokens
    num_draft_tokens: int = 0

    @property
    def is_last_chunk(self) -> bool:
        """The rows include the last known token."""
        return self.start + self.num_tokens == len(self.state.tokens)


@dataclass(frozen=True, slots=True)
class ScheduleOutput:
    requests: tuple[ScheduledRequest, ...]
    preempted_ids: tuple[str, ...] = ()
    pooling_requests: tuple[ScheduledRequest, ...] = ()  # embeddings, computed by a pass of their own


class Scheduler:
    """Owns the live requests and their KV blocks."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_caching: bool = True,
        computable_until: ComputableUntil = lambda state, start: len(state.tokens),
        clock: Callable[[], float] = time.monotonic,
        states: StateCache | None = None,  # None: the model has no layers with state
    ) -> None:
        assert max_num_batched_tokens >= max_num_seqs, "every running request needs a row per step"
        self.pool = pool
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.block_manager = BlockManager(pool, block_size)
        self.state_cache = states
        if states is not None:
            pool.on_lost.append(states.on_block_lost)
        self.prefix_cache = PrefixCache(pool, block_size, prefix_caching, states)
        self.computable_until = computable_until
        self.fair_queue = FairQueue()
        self.states: dict[str, RequestState] = {}
        self.waiting = WaitingQueue()  # by rank, without blocks
        self.running: list[RequestState] = []  # by rank, with blocks for the computed tokens and one more
        self.num_preemptions = 0
        self.prefix_queries = 0  # prompt tokens looked up in the prefix cache
        self.prefix_hits = 0
        self.num_faults = 0  # requests whose step output could not be applied
        self._clock = clock
        self._step_rows = max_num_batched_tokens
        self._admission = AdmissionFilter(
            self.waiting,
            self.running,
            self.prefix_cache,
            computable_until,
            max_num_seqs,
            max_num_batched_tokens,
        )

    @property
    def idle(self) -> bool:
        return not self.states

    def add(self, state: RequestState) -> None:
        """Queue a request. Its maximum length must fit into the cache."""
        num_blocks = self.block_manager.num_blocks(state.max_len)
        assert num_blocks <= self.pool.num_blocks, "max_model_len exceeds the KV cache"
        self.states[state.id] = state
        self.fair_queue.add(state)
        self.waiting.add(state)

    def remove(self, request_id: str) -> RequestState | None:
        """Remove a request and free its blocks; None if it has ended."""
        return self._remove(request_id)

    @property
    def has_decision(self) -> bool:
        """Whether the next schedule() would start a waiting request or preempt for one."""
        if not len(self.waiting) or not self.running:
            return len(self.waiting) > 0
        self._admission.refresh()
        first = self._admission.next_candidate()
        return first is not None and (
            self._can_start(True) or first.request.priority < self.running[-1].request.priority
        )

    def num_computable(self, state: RequestState) -> int:
        """Uncomputed tokens before the first one that needs an unencoded image."""
        return self.computable_until(state, state.num_computed) - state.num_computed

    def set_drafts(self, drafts: Mapping[str, Draft]) -> None:
        """Set the drafts, by request id, that the next schedule() may verify."""
        for request_id, draft in drafts.items():
            self.states[request_id].set_draft(draft.token_ids, draft.drafter, draft.confidence)

    def schedule(self, used_rows: int = 0) -> ScheduleOutput:
        """Choose the rows of the next step: running requests first, then waiting ones, then drafts.

        used_rows  rows of the budget used for image encoding; each running request has a row regardless
        """
        self._step_rows = max(self.max_num_batched_tokens - used_rows, self.max_num_seqs)
        if self.fair_queue.update_tags(self.waiting):
            self.waiting.resort()
        self._admission.refresh()
        preempted_ids = self._preempt_for_priority()
        scheduled: list[ScheduledRequest] = []
        budget, pooling_budget = self._step_rows, self._pooling_budget()
        # A long prompt leaves half of the step to requests that can start
        shares = 2 if self._can_start(pooling_budget == budget) else 1
        for state in list(self.running):
            if preempted_ids and state.id in preempted_ids:
                continue
            num_tokens = self.computable_until(state, state.num_computed) - state.num_computed
            if num_tokens > 1 or state.is_pooling:  # the budget has a row for each decoding request
                num_after = len(self.running) - len(scheduled) - 1
                max_rows = pooling_budget if state.is_pooling else budget
                num_tokens = min(num_tokens, -(-(budget - num_after) // shares), max_rows)
                num_tokens = self._limit_rows(state, num_tokens)
            if num_tokens and self._allocate_blocks(state, state.num_computed + num_tokens, preempted_ids):
                scheduled.append(_schedule_request(state, num_tokens))
                budget -= num_tokens
                pooling_budget -= num_tokens if state.is_pooling else 0
        num_draft = sum([len(request.state.draft) for request in scheduled])
        scheduled += self._admit(budget - min(num_draft, budget // 2), pooling_budget)
        if num_draft:
            scheduled = list(self._add_drafts(scheduled))
        if self.state_cache is not None:
            for state, start, num_tokens, _, num_draft in scheduled:
                self.state_cache.allocate(state, start + num_tokens + num_draft)
        pooling = tuple([request for request in scheduled if request.state.is_pooling])
        if pooling:
            scheduled = [request for request in scheduled if not request.state.is_pooling]
        return ScheduleOutput(tuple(scheduled), tuple(preempted_ids), pooling)

    def update(self, scheduled: ScheduleOutput, outputs: Sequence[StepOutput]) -> list[Event]:
        """Append tokens, index full blocks, end requests. Rejecting a draft only lowers num_computed."""
        events: list[Event] = []
        for request, output in zip(scheduled.requests, outputs, strict=True):
            if isinstance(output.error, RequestFailed):
                events.append(self._finish_with_error(request.state, output.error))
            else:
                events += self._update_request(request, output)
        return events

    def update_pooling(
        self, scheduled: ScheduleOutput, vectors: Sequence[bytes | ForewordError | None]
    ) -> list[Event]:
        """vectors  per pooling request: its vector, its error, or None while tokens are missing"""
        events: list[Event] = []
        for request, vector in zip(scheduled.pooling_requests, vectors, strict=True):
            state = request.state
            if isinstance(vector, ForewordError):
                events.append(self._finish_with_error(state, vector))
                continue
            self._set_computed(state, request.start + request.num_tokens)
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
        if self.state_cache is not None:
            self.state_cache.check(self.running)
        if self.idle:
            assert self.pool.num_used == 0 and self.prefix_cache.idle and not len(self.fair_queue)

    # Schedule

    def _preempt_for_priority(self) -> list[str]:
        """Preempt requests of a worse priority while one of a better priority cannot start."""
        preempted_ids: list[str] = []
        while self.running and (first := self._admission.next_candidate()) is not None:
            worst = self.running[-1]
            if first.request.priority >= worst.request.priority:
                break
            if len(self.running) < self.max_num_seqs and self._fits(first):
                break
            self._preempt(worst, preempted_ids)
        return preempted_ids

    def _can_start(self, include_pooling: bool) -> bool:
        """Whether a waiting request could start now."""
        if len(self.running) >= self.max_num_seqs:
            return False
        first = self._admission.next_candidate(include_pooling)
        return first is not None and self._fits(first)

    def starting(self) -> Sequence[RequestState]:
        """Waiting requests that the next schedule() may start, without a change of any."""
        slots, ready = self.max_num_seqs - len(self.running), self.waiting.ready
        if not ready or self.block_manager.num_blocks(len(ready[0].tokens)) > self.pool.num_free:
            return ()
        return [state for state in ready[:slots] if not state.is_pooling]

    def _allocate_blocks(self, state: RequestState, num_tokens: int, preempted_ids: list[str]) -> bool:
        """Allocate blocks, preempting the worst rank as needed; False if that is the request itself."""
        num_blocks = self.block_manager.blocks_needed(state, num_tokens)
        if num_blocks <= 0:
            return True
        while num_blocks > self.pool.num_free:
            victim = self.running[-1]
            self._preempt(victim, preempted_ids)
            if victim is state:
                return False
        self.block_manager.allocate(state, num_tokens)
        return True

    def _pooling_budget(self) -> int:
        """Rows of the step for pooling requests: few while other requests generate."""
        rows = self._step_rows
        if all(state.is_pooling for state in self.running):
            return rows
        return min(max(rows // POOLING_BUDGET_DIVISOR, MIN_POOLING_ROWS), rows)

    def _preempt(self, state: RequestState, preempted_ids: list[str]) -> None:
        """Free the blocks and queue the request again; its tokens stay and are recomputed exactly."""
        self._release(state)
        state.set_draft((), "")
        state.num_computed = 0
        self.waiting.add(state)
        self.num_preemptions += 1
        preempted_ids.append(state.id)

    def _admit(self, budget: int, pooling_budget: int) -> list[ScheduledRequest]:
        """Start waiting requests by rank while rows, blocks and slots last."""
        scheduled: list[ScheduledRequest] = []
        # Pooling requests get half of the slots, the others are for generation
        pooling_slots = max(self.max_num_seqs // 2, 1) - sum(state.is_pooling for state in self.running)

        def is_skipped(state: RequestState) -> bool:
            return state.is_pooling and (pooling_budget <= 0 or pooling_slots <= 0)

        for state in self._admission.candidates(is_skipped):
            if budget <= 0 or len(self.running) >= self.max_num_seqs or not self._fits(state):
                break
            self.waiting.remove(state)
            self._start(state)
            max_rows = pooling_budget if state.is_pooling else budget
            num_tokens = self._limit_rows(state, min(self.num_computable(state), budget, max_rows))
            self.block_manager.allocate(state, state.num_computed + num_tokens)
            if num_tokens:
                scheduled.append(_schedule_request(state, num_tokens))
            budget -= num_tokens
            if state.is_pooling:
                pooling_budget -= num_tokens
                pooling_slots -= 1
        return scheduled

    def _limit_rows(self, state: RequestState, num_tokens: int) -> int:
        return num_tokens if self.state_cache is None else self.state_cache.limit_rows(state, num_tokens)

    def _fits(self, state: RequestState) -> bool:
        """Whether there are blocks for its tokens, and one more for each running request to grow into."""
        self.prefix_cache.hash_blocks(state)
        shared = [digest for digest in self.prefix_cache.match(state) if not self.pool.is_free(digest)]
        needed = self.block_manager.num_blocks(len(state.tokens)) - len(shared)
        return needed + len(self.running) <= self.pool.num_free or not self.running

    def _start(self, state: RequestState) -> None:
        """Move a request to `running` with its cached prefix; the last token is always computed."""
        num_cached_blocks = self.prefix_cache.attach(state)
        if self.state_cache is not None:
            self.state_cache.attach(state, num_cached_blocks)
        state.num_computed = num_cached_blocks * self.block_size
        if state.scheduled_s is None:  # hits after a preemption are not counted
            state.scheduled_s = self._clock()
            self.fair_queue.on_start(state)
            state.num_cached = min(state.num_computed, state.num_prompt)
            if self.prefix_cache.is_enabled_for(state) and not state.request.is_resumed:
                self.prefix_queries += state.num_prompt
                self.prefix_hits += state.num_cached
        insort(self.running, state, key=sort_key_of)
        self._admission.invalidate(state)

    def _add_drafts(self, requests: list[ScheduledRequest]) -> Iterable[ScheduledRequest]:
        """Add draft rows within the remaining budget and blocks."""
        budget = self._step_rows - sum(request.num_tokens for request in requests)
        for request in requests:
            state, num_tokens = request.state, len(request.state.tokens)
            num_draft = min(len(state.draft), budget) if request.is_sampled else 0
            if num_draft and self.state_cache is not None:
                num_draft = self.state_cache.limit_draft(state, num_draft)
            if num_draft:
                missing = self.block_manager.blocks_needed(state, num_tokens + num_draft)
                if missing > 0 and (self.waiting or missing > self.pool.num_free):
                    num_draft = max(len(state.blocks) * self.block_size - num_tokens, 0)
                self.block_manager.allocate(state, num_tokens + num_draft)
            budget -= num_draft
            yield request._replace(num_draft_tokens=num_draft) if num_draft else request

    # Update

    def _update_request(self, request: ScheduledRequest, output: StepOutput) -> list[Event]:
        """Apply the output of one request; an error in this ends that request only."""
        state = request.state
        try:
            events = self._apply_output(request, output)
        except Exception:
            logger.exception("request %s failed: its step output could not be applied", state.id)
            self.num_faults += 1
            return [self._fail_commit(state)]
        if state.draft:
            state.set_draft((), "")
        if output.is_finished:
            self._remove(state.id)
        return events

    def _fail_commit(self, state: RequestState) -> ErrorEvent:
        return self._finish_with_error(
            state, RequestFailed("an internal error: the step output of this request could not be applied")
        )

    def _finish_with_error(self, state: RequestState, error: ForewordError) -> ErrorEvent:
        """End a request as if the step had not happened."""
        self.prefix_cache.invalidate(state)
        if self.state_cache is not None:
            self.state_cache.invalidate(state)
        state.set_draft((), "")
        self._remove(state.id)
        return ErrorEvent(state.id, error)

    def _apply_output(self, request: ScheduledRequest, output: StepOutput) -> list[Event]:
        state = request.state
        index = len(state.tokens) - state.num_prompt
        state.append(output.token_ids)
        num_accepted = min(output.num_accepted, len(output.token_ids))
        self._set_computed(state, request.start + request.num_tokens + num_accepted)
        if request.num_draft_tokens:
            self.block_manager.trim(state)
        if output.prompt_logprobs:
            state.prompt_logprobs += output.prompt_logprobs
        events: list[Event] = []
        if output.token_ids or output.finish_reason:
            events.append(_token_event(request, output, index))
        if output.error is not None:
            events.append(ErrorEvent(state.id, output.error))
        return events

    def _set_computed(self, state: RequestState, num_computed: int) -> None:
        before, state.num_computed = state.num_computed, num_computed
        self.prefix_cache.publish(state, before)
        if self.state_cache is not None:
            self.state_cache.commit(state, self.prefix_cache.enabled)

    def _remove(self, request_id: str) -> RequestState | None:
        """remove() for internal calls, which a trace does not record."""
        state = self.states.pop(request_id, None)
        if state is None:
            return None
        if state in self.running:
            self._release(state)
        else:
            self.waiting.remove(state)
        self.fair_queue.on_finish(state)
        return state

    def _release(self, state: RequestState) -> None:
        self.running.remove(state)
        self._admission.invalidate(state)
        self.prefix_cache.forget(state)
        self.block_manager.release(state)
        if self.state_cache is not None:
            self.state_cache.release(state)


def _schedule_request(state: RequestState, num_tokens: int) -> ScheduledRequest:
    start = state.num_computed
    is_sampled = start + num_tokens == len(state.tokens) and not state.is_pooling
    return ScheduledRequest(state, start, num_tokens, is_sampled)


def _token_event(request: ScheduledRequest, output: StepOutput, index: int) -> TokenEvent:
    """index  of the first new token in the output"""
    state, num_draft, num_accepted = request.state, request.num_draft_tokens, output.num_accepted
    with_prompt = state.params.prompt_logprobs is not None and index == len(state.request.resume_output_ids)
    return TokenEvent(
        state.id,
        index,
        output.token_ids,
        output.logprobs,
        (None, *state.prompt_logprobs) if with_prompt else (),
        DraftResult(state.drafter, num_draft, num_accepted, state.confidence[:num_accepted])
        if num_draft
        else None,
        output.finish_reason,
        output.stop_id,
        state.num_cached,
        state.scheduled_s or 0.0,
        output.logits_hashes,
        output.repetition,
    )
