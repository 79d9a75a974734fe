"""Overlap scheduling: decode steps run on the device ahead of the host.

The synchronous step (engine/engine.py) waits for the device before it schedules. While all running requests
decode text, there is nothing to schedule: the device knows the next token. So steps are launched one ahead of
the one that is collected (cuda_graphs/decode_loop.py), and scheduling and events cost no device time. If a
token depends on more than logits, the host launches its sampling while the forward pass before it is computed
(engine/overlap_sampling.py). As soon as there is a decision, the pipeline drains, and the synchronous loop
continues with the same tokens. The synchronous loop is the reference.

One step is in flight that does not know what the host found in the step before: a finished output, an
abort, an error. Its results for such a request are dropped. The blocks are freed at once although the step
in flight still writes to them, which is safe:
* The device works in order. The next owner of a block is launched later, and writes each slot before reading.
* A step that starts with n known tokens writes positions from n - 1 on. The host knows these n tokens when it
  commits the step before, so num_computed <= n - 1 and indexed blocks end there: no late write reaches a
  shared block.
* Blocks of steps in flight are reserved (BlockManager.reserve), and a run preempts no request: a
  live request never loses a block that is written to.
The draft model's blocks are ordered in the same way, and are never shared.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import exp
from typing import Final

from foreword.core.outputs import Draft, StepOutput
from foreword.core.request import RequestState
from foreword.cuda_graphs.decode_loop import DecodeLoop, DecodeResult, DecodeSlot, SupportsDecodeLoop
from foreword.engine.encoder_runner import pending_images
from foreword.engine.fault_isolation import reset_state
from foreword.engine.model_runner import ModelRunner, step_output
from foreword.engine.overlap_sampling import HostSampledLoop
from foreword.engine.scheduler import ScheduledRequest, ScheduleOutput, Scheduler
from foreword.engine.timers import StepTimer
from foreword.kernels.gpu import is_device_lost
from foreword.kernels.ops import DraftSamplingParams
from foreword.planning.resolve import ResolvedConfig
from foreword.sampling.logits_processors import draft_sampling_params, only_filters
from foreword.speculation.engine_drafter import DeviceDrafter
from foreword.speculation.proposer import Proposer

logger = logging.getLogger(__name__)

PIPELINE_DEPTH: Final = 2  # steps in flight
MIN_RUN_STEPS: Final = 4  # shortest run: starting one costs about what overlap saves in one step
COST_SAMPLE_EVERY: Final = 4  # steps between samples of the step cost
MAX_BACKOFF_STEPS: Final = 1024  # synchronous steps after errors

MakeDecodeLoop = Callable[[SupportsDecodeLoop | None, Sequence[RequestState] | None], DecodeLoop]
OverlapStep = tuple[ScheduleOutput, list[StepOutput]]


@dataclass(frozen=True, slots=True)
class _Sampling:
    """How a request is sampled."""

    params: DraftSamplingParams  # parameters of drafts, and of tokens that the device samples
    by_host: bool  # tokens depend on more than that, or have log-probabilities: the host samples them


@dataclass(slots=True)
class _RunRequest:
    """A request of a run."""

    state: RequestState
    slot: int
    by_host: bool  # sampled by the host
    num_blocks: int  # blocks of the target and of the draft model that the device knows
    num_draft_blocks: int
    num_draft_computed: int  # tokens in the draft model's KV cache
    in_flight: int = 0  # steps in flight


@dataclass(slots=True)
class _DecodeRun:
    """Consecutive steps of the same requests."""

    decode_loop: DecodeLoop
    requests: list[_RunRequest]
    num_draft_tokens: int  # tokens that the draft model proposes in each step
    by_host: bool  # the host samples all requests
    in_flight: deque[Sequence[_RunRequest]] = field(default_factory=deque)
    draining: bool = False  # nothing more is launched
    warm: bool = False  # a step was in flight before this one was collected
    num_launched: int = 0

    @property
    def tokens_per_step(self) -> int:
        return 1 + self.num_draft_tokens

    def max_len(self, request: _RunRequest) -> int:
        """Tokens that the request can have once all its steps are collected."""
        return len(request.state.tokens) + request.in_flight * self.tokens_per_step


class OverlapLoop:
    """Decides whether the running requests decode ahead of the host, and does so one step per call."""

    def __init__(
        self,
        scheduler: Scheduler,
        proposer: Proposer,
        timer: StepTimer,
        make_decode_loop: MakeDecodeLoop,  # arguments: a draft model, and the requests if the host samples
        vocab_size: int,  # width of the logits
        mrope: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._proposer = proposer
        self._timer = timer
        self._make_decode_loop = make_decode_loop
        self._vocab_size = vocab_size
        self._mrope = mrope
        self._run: _DecodeRun | None = None
        self._sampling: Mapping[int, _Sampling] = {}  # by arrival
        self._backoff_steps = 0
        self.num_errors = 0
        self.num_device_steps = 0
        self.num_runs = 0
        proposer.enable_overlap()

    def step(self) -> OverlapStep | None:
        """Collect one step; None: nothing is in flight and the synchronous loop takes over.

        Raises if the device is lost. After any other error the synchronous loop recomputes the step.
        """
        try:
            return self._step()
        except Exception as error:
            if is_device_lost(error):
                raise
            self._abandon()
            return None

    def _step(self) -> OverlapStep | None:
        run = self._run or self._try_start()
        if run is None:
            return None
        run.requests = [request for request in run.requests if self._is_live(request)]
        run.warm = len(run.in_flight) > 0
        while len(run.in_flight) < PIPELINE_DEPTH and self._can_continue(run) and self._launch_step(run):
            pass
        while run.in_flight:
            step = self._collect_step(run)
            if step is not None:
                return step
        self._end_run()
        return None

    @property
    def should_sample_cost(self) -> bool:
        """Whether the last step is a valid cost sample: no drafts, steps in flight on both sides."""
        run = self._run
        return (
            run is not None
            and run.warm
            and not (run.draining or run.num_draft_tokens or run.num_launched % COST_SAMPLE_EVERY)
        )

    def _is_live(self, request: _RunRequest) -> bool:
        """Compares states, since the id of an ended request can be in use again."""
        return self._scheduler.states.get(request.state.id) is request.state

    # Start

    def _can_continue(self, run: _DecodeRun) -> bool:
        states = [request.state for request in run.requests]
        by_host = any(request.by_host for request in run.requests)
        if (
            not states
            or by_host != run.by_host
            or self._scheduler.has_decision
            or self._draft_len(states) != run.num_draft_tokens
        ):
            run.draining = True
        return not run.draining

    def _draft_len(self, states: Sequence[RequestState], num_steps: int = 1) -> int | None:
        """Draft length of the next `num_steps` steps; None: decided per step by the synchronous loop."""
        if self._proposer.is_disabled:
            return 0
        num_draft = self._proposer.fixed_draft_len(states, num_steps)
        rows = len(states) * (1 + (num_draft or 0))
        if num_draft and (len(self._scheduler.waiting) or rows > self._scheduler.max_num_batched_tokens):
            return None  # a draft takes no block or row that another request could use
        return num_draft

    def _try_start(self) -> _DecodeRun | None:
        """Start a run of all running requests if the device can decode them."""
        scheduler, states = self._scheduler, self._scheduler.running
        if self._backoff_steps:
            self._backoff_steps -= 1
            return None
        if not states or not all(map(_is_text_decode, states)) or scheduler.has_decision:
            return None
        num_draft = self._draft_len(states, MIN_RUN_STEPS)
        if num_draft is None:
            return None
        ahead = PIPELINE_DEPTH * (1 + num_draft)
        if not any(len(s.tokens) + ahead <= s.max_len for s in states):
            return None
        if num_draft:
            if any(state.request.images for state in states):
                return None
            with self._timer("draft"):
                if not self._proposer.call_device_drafter(lambda d: d.acquire_device(states, ahead)):
                    return None
        lengths = [
            (s, len(s.tokens) + ahead if num_draft else min(len(s.tokens) + ahead, s.max_len)) for s in states
        ]
        if not scheduler.block_manager.reserve(lengths):
            return None
        return self._start_run(states, num_draft)

    @property
    def _device_drafter(self) -> DeviceDrafter:
        drafter = self._proposer.device_drafter
        assert drafter is not None
        return drafter

    def _start_run(self, states: Sequence[RequestState], num_draft_tokens: int) -> _DecodeRun:
        """Upload the state of all requests once."""
        known = self._sampling
        self._sampling = {
            s.arrival: known.get(s.arrival) or _sampling_of(s, self._vocab_size) for s in states
        }
        by_host = any(sampling.by_host for sampling in self._sampling.values())
        drafter = self._proposer.device_drafter if num_draft_tokens else None
        decode_loop = self._make_decode_loop(
            None if drafter is None else drafter.decode_loop_forward, tuple(states) if by_host else None
        )
        self._run = run = _DecodeRun(decode_loop, [], num_draft_tokens, by_host)
        slots: list[DecodeSlot] = []
        for slot, (state, sampling) in enumerate(zip(states, self._sampling.values(), strict=True)):
            draft_blocks = self._device_drafter.device_blocks(state) if num_draft_tokens else ()
            offset = state.mrope_positions.offset if self._mrope and state.mrope_positions is not None else 0
            last_ids, length, blocks = tuple(state.tokens[-2:]), len(state.tokens), tuple(state.blocks)
            places = tuple(draft_blocks), offset, state.lora_slot
            slots.append(DecodeSlot(last_ids, length, blocks, sampling.params, *places))
            run.requests.append(
                _RunRequest(state, slot, sampling.by_host, len(blocks), len(draft_blocks), length - 1)
            )
        decode_loop.start(slots)
        self.num_runs += 1
        return run

    # Launch and collect

    def _launch_step(self, run: _DecodeRun) -> bool:
        """Launch a step of the requests certain to need another token; False if there are none."""
        with self._timer("schedule"):
            active = [request for request in run.requests if run.max_len(request) < request.state.max_len]
            if not active or not self._reserve_blocks(run, active):
                run.draining = run.draining or bool(active)
                return False
        if not (self._proposer.is_disabled or run.num_draft_tokens):
            self._proposer.propose([request.state for request in active])  # counts a skipped step
        with self._timer("assemble"):
            for request in active:
                self._extend_blocks(run, request)
        with self._timer("sample" if run.by_host else "assemble"):
            run.decode_loop.launch([request.slot for request in active], run.num_draft_tokens)
        for request in active:
            request.in_flight += 1
        run.in_flight.append(active)
        run.num_launched += 1
        self.num_device_steps += 1
        return True

    def _reserve_blocks(self, run: _DecodeRun, active: Sequence[_RunRequest]) -> bool:
        """Reserve blocks for this step and those in flight."""
        lengths = [(request.state, run.max_len(request) + run.tokens_per_step) for request in active]
        if run.num_draft_tokens:
            states, ahead = [request.state for request in active], PIPELINE_DEPTH * run.tokens_per_step
            if not self._proposer.call_device_drafter(lambda d: d.reserve_device(states, ahead)):
                return False
        return self._scheduler.block_manager.reserve(lengths)

    def _extend_blocks(self, run: _DecodeRun, request: _RunRequest) -> None:
        """Upload new blocks of a request."""
        blocks = request.state.blocks
        draft_blocks = self._device_drafter.device_blocks(request.state) if run.num_draft_tokens else ()
        if len(blocks) > request.num_blocks or len(draft_blocks) > request.num_draft_blocks:
            run.decode_loop.extend_blocks(request.slot, tuple(blocks), tuple(draft_blocks))
            request.num_blocks, request.num_draft_blocks = len(blocks), len(draft_blocks)

    def _collect_step(self, run: _DecodeRun) -> OverlapStep | None:
        """Collect the oldest step in flight; None if none of its requests has a result."""
        requests = run.in_flight.popleft()
        with self._timer("forward"):
            results = run.decode_loop.collect()
        with self._timer("sample"):
            for request in requests:
                request.in_flight -= 1
            live = [request for request in requests if self._is_live(request)]
            valid = [
                (request, _validate_result(result, self._vocab_size, run.num_draft_tokens))
                for request in live
                if (result := results.get(request.slot)) is not None
            ]
            run.draining |= len(valid) < len(live) or any(result.token_ids[-1] < 0 for _, result in valid)
            usable = [(request, result) for request, result in valid if result.token_ids[0] >= 0]
            if not usable:
                return None
            outputs = [
                step_output(request.state, result.token_ids, result.logprobs, result.logits_hashes)
                for request, result in usable  # a row without a token is left to the synchronous loop
            ]
            name = "" if self._proposer.device_drafter is None else self._proposer.device_drafter.name
            scheduled = tuple(_scheduled_request(request.state, result, name) for request, result in usable)
        if run.num_draft_tokens:
            self._record_verified(usable, outputs, name)
        return ScheduleOutput(scheduled), outputs

    def _record_verified(
        self,
        results: Sequence[tuple[_RunRequest, DecodeResult]],
        outputs: Sequence[StepOutput],
        drafter_name: str,
    ) -> None:
        """Report the drafts to the proposer. The draft model has not computed its last draft token."""
        drafts = []
        for (request, result), output in zip(results, outputs, strict=True):
            num_computed = min(output.num_accepted, max(len(result.draft_ids) - 1, 0))
            request.num_draft_computed = len(request.state.tokens) + num_computed
            if result.draft_ids:
                draft = Draft(result.draft_ids, drafter_name, tuple(map(exp, result.draft_logprobs)))
                drafts.append((request.state, draft, output.token_ids))
        with self._timer("draft"):
            self._proposer.record_verified(drafts)

    # End

    def _end_run(self) -> None:
        """All steps are collected: the synchronous loop can continue."""
        run, self._run = self._run, None
        self._scheduler.block_manager.release_reserved()
        if run is not None and run.num_draft_tokens:
            for request in run.requests:
                if self._is_live(request):
                    state, num_computed = request.state, request.num_draft_computed
                    self._proposer.call_device_drafter(
                        lambda d, s=state, n=num_computed: d.release_device(s, n)  # type: ignore[misc]
                    )

    def _abandon(self) -> None:
        """After an error, in its except block: drop the steps in flight, and back off for a while.

        The synchronous loop recomputes the dropped steps, and isolates the request that fails.
        """
        self.num_errors += 1
        logger.exception("overlap: error %d, continuing synchronously", self.num_errors)
        run = self._run
        while run is not None and run.in_flight:
            run.in_flight.popleft()
            with suppress(Exception):
                run.decode_loop.collect()
        reset_state([] if run is None else [request.state for request in run.requests])
        self._end_run()
        self._backoff_steps = min(1 << self.num_errors, MAX_BACKOFF_STEPS)


def make_overlap_loop(
    model_runner: ModelRunner,
    scheduler: Scheduler,
    proposer: Proposer,
    timer: StepTimer,
    resolved: ResolvedConfig,
) -> OverlapLoop | None:
    """None if the backend has no decode loop, or overlap is off."""
    forward, sampler = model_runner.decode_loop_forward, model_runner.sampler
    if forward is None or not resolved.overlap:
        return None

    def make_decode_loop(
        drafter: SupportsDecodeLoop | None, states: Sequence[RequestState] | None
    ) -> DecodeLoop:
        loop = forward.get_decode_loop(
            resolved.block_size, sampler.never_sampled_ids, drafter, sampler.with_hashes
        )
        return loop if states is None else HostSampledLoop(loop, states, sampler, model_runner.grammars)

    vocab_size, mrope = model_runner.vocab_size, model_runner.mrope
    return OverlapLoop(scheduler, proposer, timer, make_decode_loop, vocab_size, mrope)


def _is_text_decode(state: RequestState) -> bool:
    """Only its last token is uncomputed, and that is no image token: the device has no image features."""
    return state.is_decoding and not pending_images(state, state.num_computed)


def _sampling_of(state: RequestState, vocab_size: int) -> _Sampling:
    by_host = state.params.logprobs is not None or not only_filters(state.request)
    return _Sampling(draft_sampling_params(state.request, vocab_size), by_host)


def _validate_result(result: DecodeResult, vocab_size: int, num_draft_tokens: int) -> DecodeResult:
    """Reject impossible results here: in the next step they would fail without a request to blame."""
    run, drafted = result.token_ids, result.draft_ids
    if not 0 < len(run) <= len(drafted) + 1 <= num_draft_tokens + 1 or run[:-1] != drafted[: len(run) - 1]:
        raise RuntimeError(f"decode loop: {len(run)} tokens do not follow from {len(drafted)} draft tokens")
    if not -1 <= run[-1] < vocab_size or not all(0 <= token_id < vocab_size for token_id in drafted):
        raise RuntimeError(f"decode loop: a token id is outside the vocabulary of {vocab_size}")
    return result


def _scheduled_request(state: RequestState, result: DecodeResult, drafter: str) -> ScheduledRequest:
    """The step as the scheduler would have scheduled it. Draft tokens beyond max_len count as verified."""
    num_draft = len(result.draft_ids)
    if num_draft:
        state.draft, state.drafter = list(result.draft_ids), drafter
        state.confidence = tuple(map(exp, result.draft_logprobs))
    return ScheduledRequest(state, state.num_computed, 1, is_sampled=True, num_draft_tokens=num_draft)
