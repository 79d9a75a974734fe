"""The engine: requests go in, each step schedules, builds, runs and updates, events come out."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch

from foreword.config.lora import AdapterInfo
from foreword.core.outputs import BlockUpdate, Draft, ErrorEvent, Event, StepOutput, StepReport, StepStats
from foreword.core.request import NO_LORA, POOLING_TYPES, Request, RequestState, check_deadline
from foreword.core.structured_output import RequestGrammar, Vocabulary
from foreword.engine.batch_builder import BatchBuilder
from foreword.engine.encoder_runner import VisionEncoderRunner, check_images, pending_images
from foreword.engine.fault_isolation import FailedPasses, FaultIsolation
from foreword.engine.model_runner import ModelRunner
from foreword.engine.overlap_scheduling import OverlapLoop
from foreword.engine.pooler import PoolOutput
from foreword.engine.scheduler import ScheduledRequest, ScheduleOutput, Scheduler
from foreword.engine.waiting_queue import PendingGrammar, PendingGrammars
from foreword.errors import (
    AdapterConflict,
    ContextLengthExceeded,
    ForewordError,
    InvalidRequest,
    ModelNotFound,
    RequestFailed,
    Unsupported,
    shown,
)
from foreword.kv_cache.prefix_loader import PrefixLoader
from foreword.lora.adapter import AdapterSlots
from foreword.planning.resolve import EngineInfo
from foreword.speculation.draft_length.policy import PrefillLoad, RequestStep, StepRecord
from foreword.speculation.proposer import Proposer

logger = logging.getLogger(__name__)

ENCODER_BUDGET_DIVISOR = 2  # image encoding gets this part of a step's rows, decoding keeps the rest
HOUSEKEEPING_S = 0.2  # interval of deadline checks and of polling device memory, which takes a while


class Engine:
    """Owns every live request. Single-threaded: callers serialize their calls."""

    def __init__(
        self,
        info: EngineInfo,
        scheduler: Scheduler,
        batch_builder: BatchBuilder,
        model_runner: ModelRunner,
        proposer: Proposer,
        encoder: VisionEncoderRunner,
        draft_encoder: VisionEncoderRunner | None = None,  # encoder of a multimodal draft model
        overlap: OverlapLoop | None = None,  # runs decode steps ahead of the host
        adapters: AdapterSlots | None = None,  # None: LoRA is off
        publish_blocks: bool = False,  # report changes of the prefix cache
    ) -> None:
        self.info = info
        self.scheduler = scheduler
        self.batch_builder = batch_builder
        self.model_runner = model_runner
        self.proposer = proposer
        self.encoder = encoder
        self.draft_encoder = draft_encoder
        self.overlap = overlap
        self.adapters = adapters
        # Set by load()
        self.prefix_loader: PrefixLoader | None = None  # for tiers below device memory
        self.num_adopted_tokens = 0  # whose KV the engine before has left in memory
        self.grammars = model_runner.grammars
        self.timer = model_runner.timer
        self.num_submitted = 0  # also the arrival number of the next request
        # Called with the arrival numbers of the requests in the next pass: they are blamed if it crashes
        self.on_batch: Callable[[list[int]], None] = lambda arrivals: None
        self._encoders = (encoder,) if draft_encoder is None else (encoder, draft_encoder)
        self._clock = time.monotonic
        self._last_housekeeping_s = self._clock()
        self._device_bytes = self._device_memory()
        self._num_steps = 0
        self._faults: Counter[str] = Counter()
        shared = self._report_requests, self.timer, self._faults, FailedPasses()
        self._model_pass = FaultIsolation(self._build_and_run, StepOutput, *shared)
        self._pooling_pass = FaultIsolation(self._build_and_pool, PoolOutput, *shared)
        self._pending_grammars = PendingGrammars()
        self._pending_events: list[Event] = []
        self._num_block_updates = 0
        self._is_snapshot_due = self._publish_blocks = publish_blocks
        if publish_blocks:
            scheduler.pool.record_changes()

    @property
    def idle(self) -> bool:
        """No live requests and no pending events."""
        return self.scheduler.idle and not self._pending_events and not self._pending_grammars

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Set the bytes of each token; grammars compile once they are known, and `text` drafts."""
        self.grammars.set_vocabulary(vocabulary)
        self.proposer.set_vocabulary(vocabulary)

    def submit(self, request: Request) -> None:
        """Add a request. An invalid one gets an ErrorEvent in the next step."""
        arrival = self.num_submitted
        self.num_submitted += 1
        try:
            self._validate(request)
            if request.params.structured is None:
                self._start(request, arrival)
            else:
                grammar = self.grammars.compile(request)
                self._pending_grammars[request.id] = PendingGrammar(request, arrival, grammar)
        except ForewordError as error:
            self._pending_events.append(ErrorEvent(request.id, error))
        except Exception:
            self._pending_events.append(self._start_failed(request.id))

    def set_threads(self, num_threads: int) -> None:
        """Compute with that many threads, at most those of the start; see Ops.set_threads."""
        self.model_runner.ops.set_threads(min(num_threads, self.info.resolved.threads))

    def load_adapter(self, path: str) -> AdapterInfo:
        """Load a LoRA adapter for requests that name its digest; see AdapterSlots.load for errors."""
        if self.adapters is None:
            raise Unsupported("LoRA is off: --enable-lora or --lora-modules turns it on", "lora_name")
        return self.adapters.load(path)

    def unload_adapter(self, digest: str) -> None:
        """Free an adapter's slot. Raises AdapterConflict while a request uses it."""
        if self.adapters is None:
            return
        requests = [state.request for state in self.scheduler.states.values()]
        requests += [pending.request for pending in self._pending_grammars.values()]
        num_users = sum(request.adapter == digest for request in requests)
        if num_users:
            raise AdapterConflict(f"{num_users} requests use the adapter: it stays loaded", "lora_name")
        self.adapters.unload(digest)

    def remove(self, request_id: str, num_tokens: int | None = None) -> None:
        """End a request and free its resources; does nothing if it has ended.

        num_tokens  delivered output tokens if the caller cut the output, None if it aborted the request
        """
        if self._pending_grammars.cancel(request_id):
            return
        state = self.scheduler.remove(request_id)
        if state is not None:
            self._evict_images()
            if self.prefix_loader is not None:
                self.prefix_loader.remove(state)
            self.proposer.finish(request_id, state.tokens[state.num_prompt :][: num_tokens or 0])

    def step(self) -> StepReport:
        """Advance every scheduled request by at least one row."""
        self._report_states(self.scheduler.running)
        if self._pending_grammars:
            block = self.scheduler.idle and not self._pending_events
            for pending in self._pending_grammars.pop_ready(block):
                self._start_compiled(pending)
        now_s = self._clock()
        if now_s - self._last_housekeeping_s >= HOUSEKEEPING_S:
            self._last_housekeeping_s = now_s
            self._device_bytes = self._device_memory()
            self._expire_requests(now_s)
        events, self._pending_events = self._pending_events, []
        if not self.scheduler.idle:
            events += self._step()
            self._evict_images()
        self._num_steps += 1
        return StepReport(
            tuple(events), self._stats(), self._block_update() if self._publish_blocks else None
        )

    def request_blocks(self) -> None:
        """The next report is to have a snapshot of the prefix cache, if this engine publishes it."""
        self._is_snapshot_due = self._publish_blocks

    def _block_update(self) -> BlockUpdate | None:
        pool = self.scheduler.pool
        added, removed = pool.pop_changes()
        if self._is_snapshot_due:
            added, removed = pool.digests, ()
        elif not (added or removed):
            return None
        self._num_block_updates += 1
        is_snapshot, self._is_snapshot_due = self._is_snapshot_due, False
        return BlockUpdate(self._num_block_updates, added, removed, is_snapshot)

    def _step(self) -> list[Event]:
        """Schedule, build, run, update. A step that ran ahead of the host needs its update only."""
        if self.overlap is not None and (ahead := self.overlap.step()) is not None:
            return self._update(*ahead)
        events = self._encode()
        if not self.proposer.is_disabled:
            with self.timer("draft"):
                self.scheduler.set_drafts(self._propose_drafts())
        with self.timer("schedule"):
            if self.prefix_loader is not None:
                self.prefix_loader.step(self.scheduler.starting(), self.scheduler.states)
            scheduled = self.scheduler.schedule(self._encoder_rows)
        assert (
            scheduled.requests
            or scheduled.pooling_requests
            or self.encoder.cost_rows
            or events
            or (self.prefix_loader is not None and self.prefix_loader.is_busy)
            or any(state.request.images for state in self.scheduler.running)  # a first image: no rows yet
        ), "live requests, but none of them is scheduled"
        if scheduled.requests:
            outputs = self._model_pass.run(scheduled.requests)  # _build_and_run(), retried on errors
            if self.prefix_loader is not None:
                num_rows = sum([request.num_tokens for request in scheduled.requests])
                seconds = self.timer.seconds.get("forward", 0.0)
                if self.info.resolved.device != "cpu":  # a GPU is waited for where its results are read
                    seconds += self.timer.seconds.get("sample", 0.0)
                self.prefix_loader.record_step(num_rows, seconds)
            events += self._update(scheduled, outputs)
        if scheduled.pooling_requests:
            pooled = self._pooling_pass.run(scheduled.pooling_requests)  # _build_and_pool()
            events += self._update_pooling(scheduled, pooled)
        is_idle = not (scheduled.requests or scheduled.pooling_requests or self._encoder_rows or events)
        if is_idle and self.prefix_loader is not None and self.prefix_loader.is_busy:
            self.prefix_loader.wait()
        return events

    def _build_and_run(self, requests: Sequence[ScheduledRequest]) -> Sequence[StepOutput]:
        with self.timer("assemble"):
            batch = self.batch_builder.build(requests)
        return self.model_runner.run(batch)

    def _build_and_pool(self, requests: Sequence[ScheduledRequest]) -> Sequence[PoolOutput]:
        with self.timer("embed"):
            return self.model_runner.pooler(requests, self.batch_builder.build_pooling(requests))

    def _update(self, scheduled: ScheduleOutput, outputs: Sequence[StepOutput]) -> list[Event]:
        with self.timer("commit"):
            events = self._check_after_failure(self.scheduler.update(scheduled, outputs))
        if not self.proposer.is_disabled:
            with self.timer("draft"):
                self._update_speculation(scheduled, outputs, events)
        return events

    def _update_pooling(self, scheduled: ScheduleOutput, outputs: Sequence[PoolOutput]) -> list[Event]:
        """Speculation is not updated: its cost model knows the sampling pass only."""
        with self.timer("embed"):
            for request, output in zip(scheduled.pooling_requests, outputs, strict=True):
                request.state.pool_partials = output.partials
            vectors = [output.error or output.vector for output in outputs]
            return self._check_after_failure(self.scheduler.update_pooling(scheduled, vectors))

    def close(self) -> None:
        """Cancel grammar compilation, which the end of the process would wait for; write blocks to disk."""
        self.grammars.close()
        if self.prefix_loader is not None:
            self.prefix_loader.close()

    def check(self) -> None:
        """Assert the integrity of all bookkeeping; cheap enough for idle moments."""
        self.scheduler.check()
        for encoder in self._encoders:
            encoder.check(self.scheduler.running)
        self.proposer.check()

    # Requests

    def _validate(self, request: Request) -> None:
        limit = self.info.resolved.max_model_len
        if request.id in self.scheduler.states or request.id in self._pending_grammars:
            raise InvalidRequest(f"id {request.id!r} is in use by a running request", "id")
        if not request.prompt_ids:
            raise InvalidRequest("the prompt has no tokens", "prompt")
        if request.pooling not in (None, *POOLING_TYPES):
            names = ", ".join(POOLING_TYPES)
            raise InvalidRequest(f"pooling must be one of {names}, got {shown(request.pooling)}", "pooling")
        length = len(request.prompt_ids) + len(request.resume_output_ids)
        if length - (request.pooling is not None) >= limit:
            raise ContextLengthExceeded(
                f"prompt and output have {length} tokens; the context of {limit} leaves no room", "prompt"
            )
        max_tokens = request.params.max_tokens
        if len(request.resume_output_ids) >= (max_tokens or limit):
            raise InvalidRequest(f"all of max_tokens {max_tokens} are delivered already", "max_tokens")
        request.check_bounds(self.info.vocab_size)
        check_images(request, self.info.image_token_id, self.batch_builder.mrope)
        self.info.resolved.check_method(request.params.speculation.method)
        self._lora_slot(request)

    def _lora_slot(self, request: Request) -> int:
        """Raises ModelNotFound for an adapter that is not loaded."""
        if self.adapters is not None:
            return self.adapters.slot_of(request.adapter)
        if request.adapter:
            raise ModelNotFound("the adapter of this request is not loaded", "model")
        return NO_LORA

    def _start(self, request: Request, arrival: int, grammar: RequestGrammar | None = None) -> None:
        max_len, lora_slot = self.info.resolved.max_model_len, self._lora_slot(request)
        state = RequestState(request, arrival, max_len, grammar, lora_slot)
        self.scheduler.add(state)
        if not (state.is_pooling or self.proposer.is_disabled):
            self.proposer.start(state)

    def _start_compiled(self, pending: PendingGrammar) -> None:
        request_id, error = pending.request.id, pending.grammar.exception()
        if isinstance(error, ForewordError):
            self._pending_events.append(ErrorEvent(request_id, error))
        elif error is not None:
            logger.error("request %s: grammar compilation failed", request_id, exc_info=error)
            failed = RequestFailed("the grammar could not be compiled")
            self._pending_events.append(ErrorEvent(request_id, failed))
        else:
            try:
                self._start(pending.request, pending.arrival, pending.grammar.result())
            except Exception:
                self._pending_events.append(self._start_failed(request_id))

    def _start_failed(self, request_id: str) -> ErrorEvent:
        """Called in the except block of the error."""
        logger.exception("request %s could not be started", request_id)
        self._faults["start"] += 1
        self.remove(request_id)
        return ErrorEvent(request_id, RequestFailed("an internal error kept this request from starting"))

    def _expire_requests(self, now_s: float) -> None:
        states = self.scheduler.states.values()
        requests = [(state.request, state.scheduled_s is not None) for state in states]
        requests += [(pending.request, False) for pending in self._pending_grammars.values()]
        for request, has_run in requests:
            error = check_deadline(request, now_s, has_run)
            if error is not None:
                self.remove(request.id)
                self._pending_events.append(ErrorEvent(request.id, error))

    def _report_requests(self, requests: Iterable[ScheduledRequest]) -> None:
        self._report_states([request.state for request in requests])

    def _report_states(self, states: Iterable[RequestState]) -> None:
        self.on_batch(self._pending_grammars.running_arrivals() + [state.arrival for state in states])

    def _check_after_failure(self, events: list[Event]) -> list[Event]:
        """Return the events; after an internal error, assert first that the bookkeeping is intact."""
        errors = [event.error for event in events if isinstance(event, ErrorEvent)]
        if any(isinstance(error, RequestFailed) for error in errors):
            self.scheduler.check()
        return events

    # Images

    @property
    def _encoder_rows(self) -> int:
        """Rows of the step's budget that image encoding has used."""
        return sum(encoder.cost_rows for encoder in self._encoders)

    def _encode(self) -> list[Event]:
        """Encode images of running requests within the budget; fail requests if that fails."""
        running = self.scheduler.running
        max_rows = self.info.resolved.max_num_batched_tokens // ENCODER_BUDGET_DIVISOR
        failure = self.encoder.step(running, max_rows, self._report_states)
        if self.draft_encoder is not None:
            max_rows -= self.encoder.cost_rows
            draft_failure = self.draft_encoder.step(running, max_rows, self._report_states)
            for state in () if draft_failure is None else draft_failure.states:
                self.proposer.disable_draft_model(state.id)
        if failure is None:
            return []
        events: list[Event] = []
        for state in failure.states:
            self._faults[failure.stage] += 1
            self.remove(state.id)
            events.append(ErrorEvent(state.id, failure.error))
        return self._check_after_failure(events)

    def _evict_images(self) -> None:
        for encoder in self._encoders:
            encoder.evict(self.scheduler.running)

    # Speculation

    def _propose_drafts(self) -> dict[str, Draft]:
        """Drafts of decoding requests, proposed right before scheduling: no event waits for them."""
        until = self.scheduler.computable_until
        decoding = [
            s for s in self.scheduler.running if s.is_decoding and until(s, s.num_computed) == len(s.tokens)
        ]
        drafts = self.proposer.propose(decoding, _prefill_load(self.scheduler))
        return {state.id: draft for state, draft in zip(decoding, drafts, strict=True) if draft is not None}

    def _update_speculation(
        self, scheduled: ScheduleOutput, outputs: Sequence[StepOutput], events: Sequence[Event]
    ) -> None:
        """Record the step's costs, and finish the drafts of ended requests."""
        sampler = self.proposer if self.overlap is None else self.overlap
        is_plain_sample = sampler.should_sample_cost
        if (is_plain_sample or not self.proposer.is_skipping) and not (
            self._model_pass.was_retried or self._has_image_work(scheduled)
        ):
            record = self.proposer.record_plain_step if is_plain_sample else self.proposer.record_step
            record(self._step_record(scheduled, outputs))
        failed = {event.request_id for event in events if isinstance(event, ErrorEvent)}
        for request, output in zip(scheduled.requests, outputs, strict=True):
            state = request.state
            if state.id in failed:
                self.proposer.finish(state.id)
            elif output.is_finished:
                # With stop strings only the caller knows the delivered output, and calls remove()
                self.proposer.finish(state.id, () if state.params.stop else state.tokens[state.num_prompt :])

    def _step_record(self, scheduled: ScheduleOutput, outputs: Sequence[StepOutput]) -> StepRecord:
        requests = tuple(
            RequestStep(
                request.state,
                request.num_tokens,
                request.num_draft_tokens,
                request.is_sampled,
                num_emitted=len(output.token_ids),
                context_len=request.start + request.num_tokens + request.num_draft_tokens,
            )
            for request, output in zip(scheduled.requests, outputs, strict=True)
        )
        return StepRecord(requests, self.timer.snapshot())

    def _has_image_work(self, scheduled: ScheduleOutput) -> bool:
        """Whether images took part in the step, so that its time is no sample for text steps."""
        return (
            (self.draft_encoder is not None and self.draft_encoder.is_pending(self.scheduler.running))
            or self._encoder_rows > 0
            or any(pending_images(request.state, request.start) for request in scheduled.requests)
        )

    # Statistics

    def _device_memory(self) -> int:
        """Bytes allocated on the GPU; on a CPU the bytes of weights, KV cache and states."""
        resolved = self.info.resolved
        if resolved.device == "cuda":
            return torch.cuda.memory_allocated()
        states = 0 if resolved.states is None else resolved.states.fixed_bytes
        return resolved.weight_bytes + resolved.kv_bytes + states

    def _stats(self) -> StepStats:
        scheduler, now_s, faults = self.scheduler, self._clock(), dict(self._faults)
        running = scheduler.running
        if scheduler.num_faults:
            faults["commit"] = scheduler.num_faults
        return StepStats(
            step=self._num_steps,
            requests_running=len(running),
            requests_waiting=len(scheduler.waiting) + len(self._pending_grammars),
            longest_running_tokens=max([len(s.tokens) - s.num_prompt for s in running], default=0),
            oldest_running_seconds=now_s - min([s.request.arrival_s for s in running], default=now_s),
            kv_cache_usage_ratio=scheduler.pool.num_used / scheduler.pool.num_blocks,
            prefix_cache_queries_total=scheduler.prefix_queries,
            prefix_cache_hits_total=scheduler.prefix_hits,
            preemptions_total=scheduler.num_preemptions,
            device_memory_bytes=self._device_bytes,
            stage_seconds=self.timer.reset(),
            drafter_errors=dict(self.proposer.errors),
            drafting=self.proposer.stats(),
            faults=faults,
            images_encoded_total=self.encoder.num_encoded,
            image_cache_hits_total=self.encoder.num_hits,
            adopted_tokens=self.num_adopted_tokens,
            kv_tiers={} if self.prefix_loader is None else self.prefix_loader.stats(),
        )


def _prefill_load(scheduler: Scheduler) -> PrefillLoad:
    """Prefill rows of the next step within its budget, and the context tokens they read.

    Prompts that wait are included: drafts of others would delay their first tokens.
    """
    rows = reads = 0
    running = [state for state in scheduler.running if state.num_uncomputed > 1 and not state.is_pooling]
    for state in (*running, *scheduler.starting()):
        if rows >= scheduler.max_num_batched_tokens:
            break
        start = state.num_computed or scheduler.prefix_cache.num_cached(state)
        size = min(scheduler.computable_until(state, start) - start, scheduler.max_num_batched_tokens - rows)
        rows += size
        reads += size * start
    return PrefillLoad(rows, reads)
