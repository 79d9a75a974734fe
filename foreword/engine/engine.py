"""The engine: requests go in, a step is four verbs, events come out."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from foreword.config.resolve import EngineInfo
from foreword.core.outputs import Draft, ErrorEvent, Event, StepOutput, StepReport, StepStats
from foreword.core.request import POOLING_TYPES, Request, RequestState, check_deadline
from foreword.core.structured import RequestGrammar, Vocabulary
from foreword.engine.batch_builder import BatchBuilder
from foreword.engine.encoder_runner import EncodeFailure, VisionEncoderRunner, check_images, pending_images
from foreword.engine.fault_isolation import FaultIsolation
from foreword.engine.model_runner import ModelRunner
from foreword.engine.overlap import OverlapLoop
from foreword.engine.pooler import PoolOutput
from foreword.engine.queue import PendingGrammar, PendingGrammars
from foreword.engine.schedule import ScheduledRequest, ScheduleOutput
from foreword.engine.scheduler import Scheduler
from foreword.engine.timers import StepTimer
from foreword.errors import ContextLengthExceeded, ForewordError, InvalidRequest, RequestFailed
from foreword.grammar.manager import GrammarManager
from foreword.speculation.policy import PrefillLoad, RequestStep, StepRecord
from foreword.speculation.proposer import Proposer

__all__ = ["Engine"]

logger = logging.getLogger(__name__)

ENCODER_BUDGET_DIVISOR = (
    2  # of the rows of a step: the other part is for those who only wait for their next token
)
HOUSEKEEPING_S = 0.2  # between two looks at the time limits of requests, and at the device's memory: to ask for it takes a while


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
        batch_builder: BatchBuilder,
        model_runner: ModelRunner,
        encoder: VisionEncoderRunner,
        proposer: Proposer,
        grammars: GrammarManager,
        timer: StepTimer,
        device_memory: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        draft_encoder: VisionEncoderRunner | None = None,
        overlap: OverlapLoop | None = None,
    ) -> None:
        self.info = info
        self.scheduler = scheduler
        self.batch_builder = batch_builder
        self.model_runner = model_runner
        self.encoder = encoder
        self.draft_encoder = draft_encoder
        self.overlap = overlap
        self.proposer = proposer
        self.grammars = grammars
        self.timer = timer
        self._device_memory = device_memory
        self._device_bytes = device_memory()
        self._clock = clock
        self._num_steps = 0
        self._last_housekeeping_s = clock()
        self._faults: Counter[str] = Counter()
        self._model_isolation = FaultIsolation(
            self._run_model, self._report_batch, _failed_output, None, timer, self._faults
        )
        self._pooling_isolation = FaultIsolation(
            self._run_pooler, self._report_batch, _failed_pooling, "last", timer, self._faults
        )
        self.num_submitted = 0
        self.on_batch: Callable[[list[int]], None] = _noop
        self._pending_grammars = PendingGrammars()
        self._pending_events: list[Event] = []

    @property
    def idle(self) -> bool:
        """Nothing to do and nothing to say."""
        return self.scheduler.idle and not self._pending_events and not len(self._pending_grammars)

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """What tokens spell; grammars wait for it."""
        self.grammars.set_vocabulary(vocabulary)

    def submit(self, request: Request) -> None:
        """Take a request; one that cannot be served is answered by a Failed event of the next step."""
        arrival = self.num_submitted
        self.num_submitted += 1
        try:
            self._validate(request)
            if request.params.structured is None:
                self._start(request, arrival)
            else:
                self._pending_grammars.add(PendingGrammar(request, arrival, self.grammars.compile(request)))
        except ForewordError as error:
            self._pending_events.append(ErrorEvent(request.id, error))
        except Exception:
            self._pending_events.append(self._start_failed(request.id))

    def _start(self, request: Request, arrival: int, grammar: RequestGrammar | None = None) -> None:
        state = RequestState(request, arrival, self.info.resolved.max_model_len, grammar)
        self.scheduler.add(state)
        if not (state.is_pooling or self.proposer.is_disabled):
            self.proposer.start(state)

    def _start_failed(self, request_id: str) -> ErrorEvent:
        """A request could not even begin, by the error that is being handled."""
        logger.exception("request %s could not be started", request_id)
        self._faults["start"] += 1
        self.remove(request_id)
        return ErrorEvent(request_id, RequestFailed("an error of ours kept this request from being started"))

    def remove(self, request_id: str, num_tokens: int | None = None) -> None:
        """Free all that a request holds, at once; it may have ended by itself.

        num_tokens  output tokens that were delivered of an answer that the caller cut; None: it was given up
        """
        if self._pending_grammars.cancel(request_id):
            return
        state = self.scheduler.remove(request_id)
        if state is not None:
            self._release_images()
            self.proposer.finish(request_id, state.tokens[state.num_prompt :][: num_tokens or 0])

    def step(self) -> StepReport:
        """Advance every request that was planned by at least one row."""
        self.on_batch(
            [*self._pending_grammars.running_arrivals(), *(state.arrival for state in self.scheduler.running)]
        )
        if len(self._pending_grammars):
            for one in self._pending_grammars.pop_ready(
                block=self.scheduler.idle and not self._pending_events
            ):
                self._start_with_grammar(one)
        now_s = self._clock()
        if now_s - self._last_housekeeping_s >= HOUSEKEEPING_S:
            self._last_housekeeping_s = now_s
            self._device_bytes = self._device_memory()
            self._expire_requests(now_s)
        events = self._pending_events
        self._pending_events = []
        if not self.scheduler.idle:
            events += self._step()
            self._release_images()
        self._num_steps += 1
        return StepReport(tuple(events), self._stats())

    def _start_with_grammar(self, pending: PendingGrammar) -> None:
        request_id, error = pending.request.id, pending.grammar.exception()
        if error is not None:
            self._pending_events.append(ErrorEvent(request_id, _grammar_error(request_id, error)))
            return
        try:
            self._start(pending.request, pending.arrival, pending.grammar.result())
        except Exception:
            self._pending_events.append(self._start_failed(request_id))

    def _expire_requests(self, now_s: float) -> None:
        """End those that should have begun, or be done, by now."""
        states = list(self.scheduler.states.values())
        late = [
            (state.request, check_deadline(state.request, now_s, state.scheduled_s is not None))
            for state in states
        ]
        late += [
            (request, check_deadline(request, now_s, has_run=False)) for request in self._pending_grammars
        ]
        for request, error in late:
            if error is not None:
                self.remove(request.id)
                self._pending_events.append(ErrorEvent(request.id, error))

    def _step(self) -> list[Event]:
        step = None if self.overlap is None else self.overlap.step()
        return self._step_sync() if step is None else self._update(*step)

    def _step_sync(self) -> list[Event]:
        """The twin of a step that was computed ahead: one thing after the other."""
        events = self._encode()
        if not self.proposer.is_disabled:
            with self.timer("draft"):
                self.scheduler.set_drafts(self._propose_drafts())
        with self.timer("schedule"):
            plan = self.scheduler.schedule(self._encoder_rows)
        came = any(
            state.request.images for state in self.scheduler.running
        )  # whoever begins with a picture has no rows yet
        assert plan.requests or plan.pooling_requests or self.encoder.cost_rows or events or came, (
            "live requests, but none of them can run"
        )
        events += self._generate(plan) if plan.requests else []
        return events + self._pool(plan) if plan.pooling_requests else events

    @property
    def _encoder_rows(self) -> int:
        """What the pictures cost in this step."""
        return self.encoder.cost_rows + (0 if self.draft_encoder is None else self.draft_encoder.cost_rows)

    def _encode(self) -> list[Event]:
        """Pieces of the pictures that running requests come to; ends those whose picture cannot be encoded."""
        rows = self.info.resolved.max_num_batched_tokens // ENCODER_BUDGET_DIVISOR
        unseen = self.encoder.step(self.scheduler.running, rows, self._report_states)
        if self.draft_encoder is not None:
            self._encode_for_drafts(self.draft_encoder, rows - self.encoder.cost_rows)
        return (
            []
            if unseen is None
            else self._check_after_failure(
                [self._fail_image_request(unseen, state) for state in unseen.states]
            )
        )

    def _encode_for_drafts(self, draft_encoder: VisionEncoderRunner, rows: int) -> None:
        """Pieces of what the draft model comes to; nobody ends for what it cannot see."""
        unseen = draft_encoder.step(self.scheduler.running, rows, self._report_states)
        if unseen is not None:
            for state in unseen.states:
                self.proposer.disable_draft_model(state.id)

    def _release_images(self) -> None:
        """Let go of pictures that nobody needs any more."""
        self.encoder.evict(self.scheduler.running)
        if self.draft_encoder is not None:
            self.draft_encoder.evict(self.scheduler.running)

    def _fail_image_request(self, failure: EncodeFailure, state: RequestState) -> Event:
        self._faults[failure.stage] += 1
        self.remove(state.id)
        return ErrorEvent(state.id, failure.error)

    def _generate(self, scheduled: ScheduleOutput) -> list[Event]:
        """The pass over the rows of those that want tokens."""
        return self._update(scheduled, self._model_isolation.run(scheduled.requests))

    def _update(self, scheduled: ScheduleOutput, outputs: Sequence[StepOutput]) -> list[Event]:
        with self.timer("commit"):
            events = self._check_after_failure(self.scheduler.update(scheduled, outputs))
        if not self.proposer.is_disabled:
            with self.timer("draft"):
                self._update_speculation(scheduled, outputs, events)
        return events

    def _run_model(self, requests: Sequence[ScheduledRequest]) -> Sequence[StepOutput]:
        with self.timer("assemble"):
            batch = self.batch_builder.build(ScheduleOutput(tuple(requests)))
        return self.model_runner.run(batch)

    def _pool(self, scheduled: ScheduleOutput) -> list[Event]:
        """The pass over the prompts that become vectors; it is no business of the drafters, who measure the other one."""
        pooled = self._pooling_isolation.run(scheduled.pooling_requests)
        with self.timer("embed"):
            for work, one in zip(scheduled.pooling_requests, pooled, strict=True):
                work.state.pool_partials = one.partials
            return self._check_after_failure(
                self.scheduler.update_pooling(scheduled, [one.error or one.vector for one in pooled])
            )

    def _run_pooler(self, requests: Sequence[ScheduledRequest]) -> Sequence[PoolOutput]:
        with self.timer("embed"):
            return self.model_runner.pooler(
                requests,
                self.batch_builder.build_pooling(ScheduleOutput((), pooling_requests=tuple(requests))),
            )

    def _report_batch(self, requests: Sequence[ScheduledRequest]) -> None:
        self._report_states([work.state for work in requests])

    def _report_states(self, states: Sequence[RequestState]) -> None:
        self.on_batch([*self._pending_grammars.running_arrivals(), *(state.arrival for state in states)])

    def _check_after_failure(self, events: list[Event]) -> list[Event]:
        """The events of a step. After an error all bookkeeping is looked at: only if it is right the engine goes on."""
        if any(isinstance(event, ErrorEvent) and isinstance(event.error, RequestFailed) for event in events):
            self.scheduler.check()
        return events

    def _propose_drafts(self) -> dict[str, Draft]:
        """Drafts for those that decode. They are made as late as can be: what a step yields is not kept waiting for them."""
        reach = self.scheduler.computable_until
        decoding = [
            s for s in self.scheduler.running if s.is_decoding and reach(s, s.num_computed) == len(s.tokens)
        ]
        drafts = self.proposer.propose(decoding, _prefill_load(self.scheduler))
        return {state.id: draft for state, draft in zip(decoding, drafts, strict=True) if draft is not None}

    def _update_speculation(
        self, scheduled: ScheduleOutput, outputs: Sequence[StepOutput], events: Sequence[Event]
    ) -> None:
        """What the step did, and which requests are over."""
        if self.overlap is not None and self.overlap.should_sample_cost:
            self.proposer.record_overlap_step(self._step_timings(scheduled, outputs))
        elif (
            not self.proposer.is_skipping
            and not self._model_isolation.was_retried
            and not self._has_image_work(scheduled)
        ):
            self.proposer.record_step(self._step_timings(scheduled, outputs))
        failed = {event.request_id for event in events if isinstance(event, ErrorEvent)}
        for work, outcome in zip(scheduled.requests, outputs, strict=True):
            if work.state.id in failed:
                self.proposer.finish(work.state.id)
            elif outcome.is_finished:
                self.proposer.finish(work.state.id, _finished_output(work.state))

    def _step_timings(self, scheduled: ScheduleOutput, outputs: Sequence[StepOutput]) -> StepRecord:
        served = tuple(
            _request_step(work, outcome) for work, outcome in zip(scheduled.requests, outputs, strict=True)
        )
        return StepRecord(served, self.timer.snapshot())

    def _has_image_work(self, scheduled: ScheduleOutput) -> bool:
        """Whether pictures took part in the step, which tells nothing of others then."""
        waits = self.draft_encoder is not None and self.draft_encoder.is_pending(self.scheduler.running)
        return (
            waits
            or self._encoder_rows > 0
            or any(pending_images(work.state, work.start) for work in scheduled.requests)
        )

    def close(self) -> None:
        """Compile no more: the end of the process would wait for it."""
        self.grammars.close()

    def check(self) -> None:
        """Assert the integrity of all bookkeeping; for tests, and cheap enough for idle moments."""
        self.scheduler.check()
        self.encoder.check(self.scheduler.running)
        if self.draft_encoder is not None:
            self.draft_encoder.check(self.scheduler.running)
        self.proposer.check()

    def _validate(self, request: Request) -> None:
        limit = self.info.resolved.max_model_len
        if request.id in self.scheduler.states or request.id in self._pending_grammars:
            raise InvalidRequest(f"a request with the id {request.id!r} is running", "id")
        if not request.prompt_ids:
            raise InvalidRequest("the prompt has no tokens", "prompt")
        if request.pooling not in (None, *POOLING_TYPES):
            raise InvalidRequest(
                f"pooling must be one of {', '.join(POOLING_TYPES)}, got {request.pooling!r:.80}", "pooling"
            )
        length = len(request.prompt_ids) + len(request.resume_output_ids)
        if length - (request.pooling is not None) >= limit:
            raise ContextLengthExceeded(
                f"prompt and output have {length} tokens; the context of {limit} leaves no room", "prompt"
            )
        if len(request.resume_output_ids) >= (request.params.max_tokens or limit):
            raise InvalidRequest(
                f"all of max_tokens {request.params.max_tokens} are delivered already", "max_tokens"
            )
        known = range(self.info.vocab_size)
        for token_id in (*request.prompt_ids, *request.resume_output_ids):
            if token_id not in known:
                raise InvalidRequest(
                    f"token id {token_id} is outside the vocabulary, which ends at {len(known) - 1}", "prompt"
                )
        check_images(request, self.info.image_token_id, self.batch_builder.mrope)
        self.info.resolved.check_method(request.params.speculation.method)

    def _stats(self) -> StepStats:
        scheduler = self.scheduler
        now = self._clock()
        return StepStats(
            step=self._num_steps,
            requests_running=len(scheduler.running),
            requests_waiting=len(scheduler.waiting) + len(self._pending_grammars),
            longest_running_tokens=max((s.num_output for s in scheduler.running), default=0),
            oldest_running_seconds=max((now - s.request.arrival_s for s in scheduler.running), default=0.0),
            kv_cache_usage_ratio=scheduler.pool.num_used / scheduler.pool.num_blocks,
            prefix_cache_queries_total=scheduler.prefix_queries,
            prefix_cache_hits_total=scheduler.prefix_hits,
            preemptions_total=scheduler.num_preemptions,
            device_memory_bytes=self._device_bytes,
            stage_seconds=self.timer.reset(),
            drafter_errors=dict(self.proposer.errors),
            drafting=self.proposer.stats(),
            faults=self._count_faults(),
            images_encoded_total=self.encoder.num_encoded,
            image_cache_hits_total=self.encoder.num_hits,
        )

    def _count_faults(self) -> dict[str, int]:
        lost = self.scheduler.num_faults
        return {**self._faults, "commit": lost} if lost else dict(self._faults)


def _noop(arrivals: list[int]) -> None:
    pass


def _failed_output(error: RequestFailed) -> StepOutput:
    return StepOutput(error=error)


def _failed_pooling(error: RequestFailed) -> PoolOutput:
    return PoolOutput(error=error)


def _grammar_error(request_id: str, error: BaseException) -> ForewordError:
    """Why a grammar is not to be had: the caller's fault, or ours."""
    if isinstance(error, ForewordError):
        return error
    logger.error("the grammar of request %s failed", request_id, exc_info=error)
    return RequestFailed("the grammar could not be compiled")


def _prefill_load(scheduler: Scheduler) -> PrefillLoad:
    """The prompts that the next step goes on with, as far as it has rows for them."""
    rows = reads = 0
    for state in scheduler.running:
        if state.num_uncomputed > 1 and not state.is_pooling:
            missing = scheduler.computable_until(state, state.num_computed) - state.num_computed
            size = min(missing, scheduler.max_num_batched_tokens - rows)
            rows += size
            reads += size * state.num_computed
    return PrefillLoad(rows, reads)


def _request_step(request: ScheduledRequest, output: StepOutput) -> RequestStep:
    context = request.start + request.num_tokens + request.num_draft_tokens
    return RequestStep(
        request.state,
        request.num_tokens,
        request.num_draft_tokens,
        request.is_sampled,
        len(output.token_ids),
        context,
    )


def _finished_output(state: RequestState) -> Sequence[int]:
    """The output, if all of it was delivered: where there are stop strings, only the caller knows."""
    return () if state.params.stop else state.tokens[state.num_prompt :]
