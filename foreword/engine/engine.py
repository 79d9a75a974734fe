"""The engine: requests go in, a step is four verbs, events come out."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from foreword.core.deadlines import overdue
from foreword.core.draft import Draft, Outcome
from foreword.core.events import Event, Failed, StepReport, StepStats
from foreword.core.grammar import RequestGrammar
from foreword.core.request import POOLINGS, Request, RequestState
from foreword.core.vocabulary import Vocabulary
from foreword.drafting.drafting import Drafting
from foreword.drafting.policy import Load, Served, StepFacts
from foreword.engine.ahead import Ahead
from foreword.engine.assemble import Assembler
from foreword.engine.compiling import Compiled, Compiling
from foreword.engine.containment import Containment
from foreword.engine.encoding import Encoder, Unseen
from foreword.engine.pictures import check_pictures, to_come
from foreword.engine.plan import Plan, Work
from foreword.engine.pooling import Pooled
from foreword.engine.runner import Runner
from foreword.engine.scheduler import Scheduler
from foreword.engine.stages import Stages
from foreword.errors import ContextLengthExceeded, ForewordError, InvalidRequest, RequestFailed
from foreword.grammar.grammars import Grammars
from foreword.resolve import EngineInfo

__all__ = ["Engine"]

logger = logging.getLogger(__name__)

ENCODING_SHARE = 2  # of the rows of a step: the other part is for those who only wait for their next token
LOOK_S = 0.2  # between two looks at the time limits of requests, and at the device's memory: to ask for it takes a while


class Engine:
    """Owns every live request. Single-threaded: whoever holds it calls one method at a time.

    guide        the encoder of a draft model that sees, or None
    ahead        steps that are computed ahead of the host, or None
    num_arrived  requests submitted so far; each has the number that this was before it came
    at_work      called with the numbers of those that the next piece of a step is about: if it kills the process, it was one
                 of them
    """

    def __init__(
        self,
        info: EngineInfo,
        scheduler: Scheduler,
        assembler: Assembler,
        runner: Runner,
        encoder: Encoder,
        drafting: Drafting,
        grammars: Grammars,
        stages: Stages,
        device_memory: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        guide: Encoder | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        self.info = info
        self.scheduler = scheduler
        self.assembler = assembler
        self.runner = runner
        self.encoder = encoder
        self.guide = guide
        self.ahead = ahead
        self.drafting = drafting
        self.grammars = grammars
        self.stages = stages
        self._device_memory = device_memory
        self._device_bytes = device_memory()
        self._clock = clock
        self._num_steps = 0
        self._looked_s = clock()
        self._faults: Counter[str] = Counter()
        self._generating = Containment(self._outcomes, self._announce, _ended_by, None, stages, self._faults)
        self._pooling = Containment(self._pooled, self._announce, _not_pooled, "last", stages, self._faults)
        self.num_arrived = 0
        self.at_work: Callable[[list[int]], None] = _nobody_asks
        self._compiling = Compiling()
        self._refused: list[Event] = []

    @property
    def idle(self) -> bool:
        """Nothing to do and nothing to say."""
        return self.scheduler.idle and not self._refused and not len(self._compiling)

    def know(self, vocabulary: Vocabulary) -> None:
        """What tokens spell; grammars wait for it."""
        self.grammars.know(vocabulary)

    def submit(self, request: Request) -> None:
        """Take a request; one that cannot be served is answered by a Failed event of the next step."""
        arrival = self.num_arrived
        self.num_arrived += 1
        try:
            self._check(request)
            if request.params.structured is None:
                self._start(request, arrival)
            else:
                self._compiling.add(Compiled(request, arrival, self.grammars.begin(request)))
        except ForewordError as error:
            self._refused.append(Failed(request.id, error))
        except Exception:
            self._refused.append(self._not_started(request.id))

    def _start(self, request: Request, arrival: int, grammar: RequestGrammar | None = None) -> None:
        state = RequestState(request, arrival, self.info.resolved.max_model_len, grammar)
        self.scheduler.add(state)
        if not (state.pools or self.drafting.off):
            self.drafting.start(state)

    def _not_started(self, request_id: str) -> Failed:
        """A request could not even begin, by the error that is being handled."""
        logger.exception("request %s could not be started", request_id)
        self._faults["start"] += 1
        self.remove(request_id)
        return Failed(request_id, RequestFailed("an error of ours kept this request from being started"))

    def remove(self, request_id: str, num_tokens: int | None = None) -> None:
        """Free all that a request holds, at once; it may have ended by itself.

        num_tokens  output tokens that were delivered of an answer that the caller cut; None: it was given up
        """
        if self._compiling.cancel(request_id):
            return
        state = self.scheduler.remove(request_id)
        if state is not None:
            self._settle()
            self.drafting.finish(request_id, state.tokens[state.num_prompt :][: num_tokens or 0])

    def step(self) -> StepReport:
        """Advance every request that was planned by at least one row."""
        self.at_work([*self._compiling.at_work(), *(state.arrival for state in self.scheduler.running)])
        if len(self._compiling):
            for one in self._compiling.take(patient=self.scheduler.idle and not self._refused):
                self._start_with_grammar(one)
        now_s = self._clock()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._device_bytes = self._device_memory()
            self._end_late(now_s)
        events = self._refused
        self._refused = []
        if not self.scheduler.idle:
            events += self._step()
            self._settle()
        self._num_steps += 1
        return StepReport(tuple(events), self._stats())

    def _start_with_grammar(self, one: Compiled) -> None:
        request_id, error = one.request.id, one.grammar.exception()
        if error is not None:
            self._refused.append(Failed(request_id, _refusal(request_id, error)))
            return
        try:
            self._start(one.request, one.arrival, one.grammar.result())
        except Exception:
            self._refused.append(self._not_started(request_id))

    def _end_late(self, now_s: float) -> None:
        """End those that should have begun, or be done, by now."""
        states = list(self.scheduler.states.values())
        late = [(state.request, overdue(state.request, now_s, state.scheduled_s is not None)) for state in states]
        late += [(request, overdue(request, now_s, has_run=False)) for request in self._compiling]
        for request, error in late:
            if error is not None:
                self.remove(request.id)
                self._refused.append(Failed(request.id, error))

    def _step(self) -> list[Event]:
        step = None if self.ahead is None else self.ahead.step()
        return self._plainly() if step is None else self._commit(*step)

    def _plainly(self) -> list[Event]:
        """The twin of a step that was computed ahead: one thing after the other."""
        events = self._encode()
        if not self.drafting.off:
            with self.stages("draft"):
                self.scheduler.draft(self._drafts())
        with self.stages("schedule"):
            plan = self.scheduler.plan(self._encoding_rows)
        came = any(state.request.pictures for state in self.scheduler.running)  # whoever begins with a picture has no rows yet
        assert plan.work or plan.pooled or self.encoder.rows or events or came, "live requests, but none of them can run"
        events += self._generate(plan) if plan.work else []
        return events + self._pool(plan) if plan.pooled else events

    @property
    def _encoding_rows(self) -> int:
        """What the pictures cost in this step."""
        return self.encoder.rows + (0 if self.guide is None else self.guide.rows)

    def _encode(self) -> list[Event]:
        """Pieces of the pictures that running requests come to; ends those whose picture cannot be encoded."""
        rows = self.info.resolved.max_num_batched_tokens // ENCODING_SHARE
        unseen = self.encoder.advance(self.scheduler.running, rows, self._announce_states)
        if self.guide is not None:
            self._encode_for_drafts(self.guide, rows - self.encoder.rows)
        return [] if unseen is None else self._taken([self._end_unseen(unseen, state) for state in unseen.states])

    def _encode_for_drafts(self, guide: Encoder, rows: int) -> None:
        """Pieces of what the draft model comes to; nobody ends for what it cannot see."""
        unseen = guide.advance(self.scheduler.running, rows, self._announce_states)
        if unseen is not None:
            for state in unseen.states:
                self.drafting.give_up(state.id)

    def _settle(self) -> None:
        """Let go of pictures that nobody needs any more."""
        self.encoder.settle(self.scheduler.running)
        if self.guide is not None:
            self.guide.settle(self.scheduler.running)

    def _end_unseen(self, unseen: Unseen, state: RequestState) -> Event:
        self._faults[unseen.stage] += 1
        self.remove(state.id)
        return Failed(state.id, unseen.error)

    def _generate(self, plan: Plan) -> list[Event]:
        """The pass over the rows of those that want tokens."""
        return self._commit(plan, self._generating.run(plan.work))

    def _commit(self, plan: Plan, outcomes: Sequence[Outcome]) -> list[Event]:
        with self.stages("commit"):
            events = self._taken(self.scheduler.commit(plan, outcomes))
        if not self.drafting.off:
            with self.stages("draft"):
                self._tell_drafting(plan, outcomes, events)
        return events

    def _outcomes(self, works: Sequence[Work]) -> Sequence[Outcome]:
        with self.stages("assemble"):
            batch = self.assembler.build(Plan(tuple(works)))
        return self.runner.run(batch)

    def _pool(self, plan: Plan) -> list[Event]:
        """The pass over the prompts that become vectors; it is no business of the drafters, who measure the other one."""
        pooled = self._pooling.run(plan.pooled)
        with self.stages("embed"):
            for work, one in zip(plan.pooled, pooled, strict=True):
                work.state.lanes = one.lanes
            return self._taken(self.scheduler.commit_pooled(plan, [one.error or one.vector for one in pooled]))

    def _pooled(self, works: Sequence[Work]) -> Sequence[Pooled]:
        with self.stages("embed"):
            return self.runner.pooler(works, self.assembler.pooled(Plan((), pooled=tuple(works))))

    def _announce(self, works: Sequence[Work]) -> None:
        self._announce_states([work.state for work in works])

    def _announce_states(self, states: Sequence[RequestState]) -> None:
        self.at_work([*self._compiling.at_work(), *(state.arrival for state in states)])

    def _taken(self, events: list[Event]) -> list[Event]:
        """The events of a step. After an error all bookkeeping is looked at: only if it is right the engine goes on."""
        if any(isinstance(event, Failed) and isinstance(event.error, RequestFailed) for event in events):
            self.scheduler.check()
        return events

    def _drafts(self) -> dict[str, Draft]:
        """Drafts for those that decode. They are made as late as can be: what a step yields is not kept waiting for them."""
        reach = self.scheduler.reach
        decoding = [s for s in self.scheduler.running if s.decodes and reach(s, s.num_computed) == len(s.tokens)]
        drafts = self.drafting.propose(decoding, _load(self.scheduler))
        return {state.id: draft for state, draft in zip(decoding, drafts, strict=True) if draft is not None}

    def _tell_drafting(self, plan: Plan, outcomes: Sequence[Outcome], events: Sequence[Event]) -> None:
        """What the step did, and which requests are over."""
        if self.ahead is not None and self.ahead.telling:
            self.drafting.ran_ahead(self._facts(plan, outcomes))
        elif not self.drafting.resting and not self._generating.disturbed and not self._saw(plan):
            self.drafting.measured(self._facts(plan, outcomes))
        failed = {event.request_id for event in events if isinstance(event, Failed)}
        for work, outcome in zip(plan.work, outcomes, strict=True):
            if work.state.id in failed:
                self.drafting.finish(work.state.id)
            elif outcome.ended:
                self.drafting.finish(work.state.id, _learnable(work.state))

    def _facts(self, plan: Plan, outcomes: Sequence[Outcome]) -> StepFacts:
        served = tuple(_served(work, outcome) for work, outcome in zip(plan.work, outcomes, strict=True))
        return StepFacts(served, self.stages.so_far())

    def _saw(self, plan: Plan) -> bool:
        """Whether pictures took part in the step, which tells nothing of others then."""
        waits = self.guide is not None and self.guide.waits(self.scheduler.running)
        return waits or self._encoding_rows > 0 or any(to_come(work.state, work.start) for work in plan.work)

    def close(self) -> None:
        """Compile no more: the end of the process would wait for it."""
        self.grammars.close()

    def check(self) -> None:
        """Assert the integrity of all bookkeeping; for tests, and cheap enough for idle moments."""
        self.scheduler.check()
        self.encoder.check(self.scheduler.running)
        if self.guide is not None:
            self.guide.check(self.scheduler.running)
        self.drafting.check()

    def _check(self, request: Request) -> None:
        limit = self.info.resolved.max_model_len
        if request.id in self.scheduler.states or request.id in self._compiling:
            raise InvalidRequest(f"a request with the id {request.id!r} is running", "id")
        if not request.prompt_ids:
            raise InvalidRequest("the prompt has no tokens", "prompt")
        if request.pooling not in (None, *POOLINGS):
            raise InvalidRequest(f"pooling must be one of {', '.join(POOLINGS)}, got {request.pooling!r:.80}", "pooling")
        length = len(request.prompt_ids) + len(request.delivered_ids)
        if length - (request.pooling is not None) >= limit:
            raise ContextLengthExceeded(
                f"prompt and output have {length} tokens; the context of {limit} leaves no room", "prompt"
            )
        if len(request.delivered_ids) >= (request.params.max_tokens or limit):
            raise InvalidRequest(f"all of max_tokens {request.params.max_tokens} are delivered already", "max_tokens")
        known = range(self.info.vocab_size)
        for token_id in (*request.prompt_ids, *request.delivered_ids):
            if token_id not in known:
                raise InvalidRequest(f"token id {token_id} is outside the vocabulary, which ends at {len(known) - 1}", "prompt")
        check_pictures(request, self.info.image_token_id, self.assembler.directions)
        self.info.resolved.check_method(request.params.speculation.method)

    def _stats(self) -> StepStats:
        scheduler = self.scheduler
        now = self._clock()
        return StepStats(
            step=self._num_steps,
            requests_running=len(scheduler.running),
            requests_waiting=len(scheduler.waiting) + len(self._compiling),
            longest_running_tokens=max((s.num_output for s in scheduler.running), default=0),
            oldest_running_seconds=max((now - s.request.arrival_s for s in scheduler.running), default=0.0),
            kv_cache_usage_ratio=scheduler.pool.num_used / scheduler.pool.num_blocks,
            prefix_cache_queries_total=scheduler.prefix_queries,
            prefix_cache_hits_total=scheduler.prefix_hits,
            preemptions_total=scheduler.num_preemptions,
            device_memory_bytes=self._device_bytes,
            stage_seconds=self.stages.take(),
            drafter_errors=dict(self.drafting.errors),
            drafting=self.drafting.stats(),
            faults=self._counted_faults(),
            images_encoded_total=self.encoder.num_encoded,
            image_cache_hits_total=self.encoder.num_hits,
        )

    def _counted_faults(self) -> dict[str, int]:
        lost = self.scheduler.num_faults
        return {**self._faults, "commit": lost} if lost else dict(self._faults)


def _nobody_asks(numbers: list[int]) -> None:
    pass


def _ended_by(error: RequestFailed) -> Outcome:
    return Outcome(error=error)


def _not_pooled(error: RequestFailed) -> Pooled:
    return Pooled(error=error)


def _refusal(request_id: str, error: BaseException) -> ForewordError:
    """Why a grammar is not to be had: the caller's fault, or ours."""
    if isinstance(error, ForewordError):
        return error
    logger.error("the grammar of request %s failed", request_id, exc_info=error)
    return RequestFailed("the grammar could not be compiled")


def _load(scheduler: Scheduler) -> Load:
    """The prompts that the next step goes on with, as far as it has rows for them."""
    rows = reads = 0
    for state in scheduler.running:
        if state.num_missing > 1 and not state.pools:
            missing = scheduler.reach(state, state.num_computed) - state.num_computed
            size = min(missing, scheduler.max_num_batched_tokens - rows)
            rows += size
            reads += size * state.num_computed
    return Load(rows, reads)


def _served(work: Work, outcome: Outcome) -> Served:
    context = work.start + work.num_tokens + work.num_draft
    return Served(work.state, work.num_tokens, work.num_draft, work.samples, len(outcome.token_ids), context)


def _learnable(state: RequestState) -> Sequence[int]:
    """The output, if all of it was delivered: where there are stop strings, only the caller knows."""
    return () if state.params.stop else state.tokens[state.num_prompt :]
