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

from foreword.cache.blocks import BlockPool
from foreword.core.draft import Draft, Outcome
from foreword.core.events import Embedded, Event, Failed
from foreword.core.request import RequestState
from foreword.engine.entrance import Entrance
from foreword.engine.holdings import Holdings
from foreword.engine.plan import Plan, Work, tokens_event
from foreword.engine.prefixes import Prefixes
from foreword.engine.shares import Shares
from foreword.engine.waiting import Waiting, rank_of
from foreword.errors import ForewordError, RequestFailed

__all__ = ["Scheduler"]

logger = logging.getLogger(__name__)

POOLED_SHARE, LEAST_POOLED = 32, 8  # of the rows of a step, while others wait for tokens


def _everything(state: RequestState, start: int) -> int:
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
        reach: Callable[[RequestState, int], int] = _everything,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert max_num_batched_tokens >= max_num_seqs, "every running request needs a row a step"
        self.pool = pool
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.holdings = Holdings(pool, block_size)
        self.prefixes = Prefixes(pool, block_size, prefix_caching)
        self.reach = reach
        self.shares = Shares()
        self.states: dict[str, RequestState] = {}
        self.waiting = Waiting()
        self.running: list[RequestState] = []
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.num_faults = 0
        self._rows = max_num_batched_tokens
        self._entrance = Entrance(
            self.waiting,
            self.running,
            self.prefixes,
            block_size,
            lambda state, start: self.reach(state, start),
            max_num_seqs,
            max_num_batched_tokens,
        )
        self._clock = clock

    @property
    def idle(self) -> bool:
        return not self.states

    def add(self, state: RequestState) -> None:
        """Let a request wait for its turn. Its whole length must fit into the cache."""
        assert self.holdings.blocks(state.limit) <= self.pool.num_blocks, "max_model_len exceeds the cache"
        self.states[state.id] = state
        self.shares.add(state)
        self.waiting.add(state)

    def remove(self, request_id: str) -> RequestState | None:
        """Forget a request and free all it holds; None if it is not there (it ended by itself)."""
        return self._forget(request_id)

    def _forget(self, request_id: str) -> RequestState | None:
        """remove() from inside: a trace records only what comes from outside."""
        state = self.states.pop(request_id, None)
        if state is None:
            return None
        if state in self.running:
            self._free(state)
        else:
            self.waiting.remove(state)
        self.shares.ended(state)
        return state

    @property
    def would_change(self) -> bool:
        """Whether the next plan would start one of those that wait, or let one that runs give way to it."""
        if not len(self.waiting) or not self.running:
            return len(self.waiting) > 0
        self._entrance.look()
        first = self._entrance.first()
        return first is not None and (self._can_start(True) or first.request.priority < self.running[-1].request.priority)

    def hold(self, lengths: Sequence[tuple[RequestState, int]]) -> bool:
        """Let running requests hold blocks for so many tokens each, which are computed ahead of their commits.

        Nobody gives way for that: False, and nothing has changed, if there are too few blocks.
        """
        return self.holdings.hold(lengths)

    def let_go(self) -> None:
        """Nothing is computed ahead any more."""
        self.holdings.let_go()

    def draft(self, drafts: Mapping[str, Draft]) -> None:
        """What the next plan may verify, by request."""
        for request_id, draft in drafts.items():
            self.states[request_id].set_draft(draft.token_ids, draft.drafter)

    def plan(self, taken: int = 0) -> Plan:
        """Choose the rows of the next step. Running requests go first, then new ones, then drafts.

        taken  rows that went into something else. Everybody who runs has one nevertheless.
        """
        self._rows = max(self.max_num_batched_tokens - taken, self.max_num_seqs)
        if self.shares.correct(self.waiting):
            self.waiting.sort()
        self._entrance.look()
        preempted: list[str] = self._yield_to_priority()
        work: list[Work] = []
        budget, vector_rows = self._rows, self._vector_rows()
        parts = 2 if self._can_start(vector_rows == budget) else 1  # a long prompt leaves half of the step to those that wait
        for state in list(self.running):
            if state.id in preempted:  # it gave way to one before it
                continue
            younger = len(self.running) - len(work) - 1
            num_tokens = min(self._computable(state), -(-(budget - younger) // parts), vector_rows if state.pools else budget)
            if num_tokens and self._reserve(state, state.num_computed + num_tokens, preempted):
                work.append(_work(state, num_tokens))
                budget -= num_tokens
                vector_rows -= num_tokens if state.pools else 0
        drafting = sum(len(w.state.draft) for w in work)
        work += self._admit(budget - min(drafting, budget // 2), vector_rows)
        drafted = tuple(self._with_drafts(work))
        pooled = tuple(item for item in drafted if item.state.pools)
        return Plan(tuple(item for item in drafted if not item.state.pools) if pooled else drafted, tuple(preempted), pooled)

    def commit(self, plan: Plan, outcomes: Sequence[Outcome]) -> list[Event]:
        """Take the step's outcome: append, publish, release. Rejection is arithmetic on num_computed."""
        events: list[Event] = []
        for work, outcome in zip(plan.work, outcomes, strict=True):
            if isinstance(outcome.error, RequestFailed):
                events.append(self._fail(work.state, outcome.error))
            else:
                events += self._commit(work, outcome)
        return events

    def commit_pooled(self, plan: Plan, vectors: Sequence[bytes | ForewordError | None]) -> list[Event]:
        """Take what became of the prompts that are pooled: vectors, why there is none, or None where tokens are missing."""
        events: list[Event] = []
        for work, vector in zip(plan.pooled, vectors, strict=True):
            state = work.state
            if isinstance(vector, ForewordError):
                events.append(self._fail(state, vector))
                continue
            self._compute(state, work.start + work.num_tokens)
            if vector is not None:
                events.append(Embedded(state.id, vector, state.num_cached, state.scheduled_s or 0.0))
                self._forget(state.id)
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
            assert len(state.tokens) < state.limit or state.pools
            assert not state.draft or state.decodes
        self.holdings.check(self.running)
        if self.idle:
            assert self.pool.num_used == 0 and self.prefixes.idle and not len(self.shares)

    # Planning

    def _yield_to_priority(self) -> list[str]:
        """Preempt requests of a worse priority while one of a better priority cannot start."""
        preempted: list[str] = []
        while self.running and (first := self._entrance.first()) is not None:
            worst = self.running[-1]
            if first.request.priority >= worst.request.priority:
                break
            if len(self.running) < self.max_num_seqs and self._fits(first):
                break
            self._preempt(worst, preempted)
        return preempted

    def _computable(self, state: RequestState) -> int:
        """Tokens that could be computed now."""
        return self.reach(state, state.num_computed) - state.num_computed

    def _can_start(self, vectors: bool) -> bool:
        """Whether one of those that wait could run now; `vectors`: also one that wants no tokens."""
        if len(self.running) >= self.max_num_seqs:
            return False
        first = self._entrance.first(vectors)
        return first is not None and self._fits(first)

    def _reserve(self, state: RequestState, num_tokens: int, preempted: list[str]) -> bool:
        """Hold blocks for `num_tokens`; the worst rank gives way, be it the request itself."""
        while (missing := self.holdings.missing(state, num_tokens)) > self.pool.num_free:
            victim = self.running[-1]
            self._preempt(victim, preempted)
            if victim is state:
                return False
        if missing > 0:
            self.holdings.grow(state, num_tokens)
        return True

    def _vector_rows(self) -> int:
        """Rows of a step for prompts that become vectors: all of them, or so few while others wait for tokens that both
        sides have about half of the time. There may be thousands of such prompts."""
        rows = self._rows
        waited_for = any(not state.pools for state in self.running)
        return min(max(rows // POOLED_SHARE, LEAST_POOLED), rows) if waited_for else rows

    def _vector_places(self) -> int:
        """How many prompts that become vectors may start: the other half of the places is for those who want tokens."""
        return max(self.max_num_seqs // 2, 1) - sum(state.pools for state in self.running)

    def _preempt(self, state: RequestState, preempted: list[str]) -> None:
        """Free its blocks and let it wait; its tokens stay, and are computed again, exactly."""
        self._free(state)
        state.set_draft((), "")
        state.num_computed = 0
        self.waiting.add(state)
        self.num_preemptions += 1
        preempted.append(state.id)

    def _admit(self, budget: int, vector_rows: int) -> list[Work]:
        """Start waiting requests in order of rank, while rows, blocks and places last.

        vector_rows  how many of the rows may be of prompts that become vectors
        """
        work: list[Work] = []
        places = self._vector_places()

        def skipped(state: RequestState) -> bool:
            return state.pools and (vector_rows <= 0 or places <= 0)

        for state in self._entrance.open(skipped):
            if budget <= 0 or len(self.running) >= self.max_num_seqs or not self._fits(state):
                break
            self.waiting.remove(state)
            self._start(state)
            num_tokens = min(self._computable(state), budget, vector_rows if state.pools else budget)
            self.holdings.grow(state, state.num_computed + num_tokens)
            work += [_work(state, num_tokens)] if num_tokens else []
            budget -= num_tokens
            vector_rows -= num_tokens if state.pools else 0
            places -= state.pools
        return work

    def _fits(self, state: RequestState) -> bool:
        """Whether its known tokens find blocks, with one more for each running request to grow into."""
        self.prefixes.name(state)
        shared = [digest for digest in self.prefixes.shareable(state) if not self.pool.is_free(digest)]
        wanted = self.holdings.blocks(len(state.tokens)) - len(shared)
        return wanted + len(self.running) <= self.pool.num_free or not self.running

    def _start(self, state: RequestState) -> None:
        """Take what the cache holds of its beginning; the last token is always computed again."""
        state.num_computed = self.prefixes.share(state) * self.block_size
        if state.scheduled_s is None:
            self._count_start(state)
        insort(self.running, state, key=rank_of)
        self._entrance.changed(state)

    def _with_drafts(self, work: list[Work]) -> Iterable[Work]:
        """Add drafted rows from what is left of the budget and of the blocks."""
        budget = self._rows - sum(w.num_tokens for w in work)
        for item in work:
            state = item.state
            num_draft = min(len(state.draft), budget) if item.samples else 0
            missing = self.holdings.missing(state, len(state.tokens) + num_draft) if num_draft else 0
            if missing > 0 and (self.waiting or missing > self.pool.num_free):
                num_draft = max(len(state.blocks) * self.block_size - len(state.tokens), 0)
            elif missing > 0:
                self.holdings.grow(state, len(state.tokens) + num_draft)
            budget -= num_draft
            yield replace(item, num_draft=num_draft) if num_draft else item

    def _count_start(self, state: RequestState) -> None:
        """Figures of the first start; what is found again after a preemption saved nothing."""
        state.scheduled_s = self._clock()
        self.shares.started(state)
        state.num_cached = min(state.num_computed, state.num_prompt)
        if self.prefixes.reads(state) and not state.request.resumed:
            self.prefix_queries += state.num_prompt
            self.prefix_hits += state.num_cached

    # Committing

    def _commit(self, work: Work, outcome: Outcome) -> list[Event]:
        """What a step yielded for one request; if it cannot be taken, that is the end of this request alone."""
        state = work.state
        try:
            events = self._advance(work, outcome)
        except Exception:
            logger.exception("request %s ends: what its step yielded cannot be taken", state.id)
            self.num_faults += 1
            return [self._lose(state)]
        state.set_draft((), "")
        if outcome.ended:
            self._forget(state.id)
        return events

    def _lose(self, state: RequestState) -> Failed:
        return self._fail(state, RequestFailed("what the engine computed for this request could not be taken"))

    def _fail(self, state: RequestState, error: ForewordError) -> Failed:
        """The end of a request of which a step yielded nothing: as if the step had not been."""
        self.prefixes.withdraw(state)
        state.set_draft((), "")
        self._forget(state.id)
        return Failed(state.id, error)

    def _advance(self, work: Work, outcome: Outcome) -> list[Event]:
        state, output = work.state, work.state.num_output
        state.append(outcome.token_ids)
        self._compute(state, work.start + work.num_tokens + min(outcome.accepted, len(outcome.token_ids)))
        self.holdings.trim(state)
        state.prompt_logprobs += outcome.prompt_logprobs
        events: list[Event] = []
        if outcome.token_ids or outcome.finish_reason:
            events.append(tokens_event(work, outcome, output))
        if outcome.error is not None:
            events.append(Failed(state.id, outcome.error))
        return events

    def _compute(self, state: RequestState, num_computed: int) -> None:
        """The KV of so many tokens is there."""
        before, state.num_computed = state.num_computed, num_computed
        self.prefixes.publish(state, before)

    # Bookkeeping

    def _free(self, state: RequestState) -> None:
        self.running.remove(state)
        self._entrance.changed(state)
        self.prefixes.leave(state)
        self.holdings.release(state)


def _work(state: RequestState, num_tokens: int) -> Work:
    """The next known tokens of a request."""
    return Work(state, state.num_computed, num_tokens, samples=num_tokens == state.num_missing and not state.pools)
