"""The engine runs ahead: the next round is computed while this one is committed.

The plain loop (engine/engine.py) waits for the device before it plans. Where the requests that run decode, and nothing but
their logits decides what they sample, there is nothing to plan: the device itself knows the next token. So rounds
(executor/decode_loop.py) are launched one ahead of what is collected, and planning, events and figures cost no time of the device. As
soon as there is something to decide, no more is launched, what is under way is collected, and the plain loop goes on with the
same tokens; it is the twin that says what is right.

What is found late is arithmetic. Between two steps one round is under way that knows nothing of what the host found in the
round before: an answer that ended, an abort, a request that could not be taken. Its results for such a request are dropped, and
the blocks are free at once, though the round still writes to them. That is harmless, for three reasons.
* The device works in order. Whoever gets such a block is launched later, and writes every slot before it reads it.
* A round that starts with n known tokens writes to positions from n - 1 on. The host knows these n tokens when it commits the
  round before, so that num_computed is at most n - 1, and blocks that can be found by their content end there, or before: no
  late write reaches one, whoever shares it.
* Blocks are held for all that is under way (Scheduler.hold()), and are not given back while it is: a request that goes on never
  loses a block that is written to. Nobody is preempted during a run. Before the plain loop plans, which may preempt, everything
  is collected.
The draft model's blocks have the same order, and no content by which they are found.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import exp
from typing import Final

from foreword.config.resolve import ResolvedConfig
from foreword.core.outputs import Draft, StepOutput
from foreword.core.request import RequestState
from foreword.engine.encoder_runner import pending_images
from foreword.engine.fault_isolation import is_device_lost
from foreword.engine.model_runner import ModelRunner
from foreword.engine.schedule import ScheduledRequest, ScheduleOutput
from foreword.engine.scheduler import Scheduler
from foreword.engine.timers import StepTimer
from foreword.executor.decode_loop import DecodeLoop, DecodeResult, DecodeSlot, SupportsDecodeLoop
from foreword.kernels.ops import DraftSamplingParams
from foreword.sampling.logits_processors import draft_sampling_params, only_filters
from foreword.speculation.proposer import Proposer

__all__ = ["OverlapLoop", "make_overlap_loop"]

logger = logging.getLogger(__name__)

PIPELINE_DEPTH: Final = 2  # rounds that are launched and not collected, at most
MIN_RUN_STEPS: Final = (
    4  # steps that nobody must be asked for: to begin a run takes about as long as it saves in one
)
COST_SAMPLE_EVERY: Final = 4  # of so many rounds one is measured
MAX_BACKOFF_STEPS: Final = 1024  # steps after errors

MakeDecodeLoop = Callable[[SupportsDecodeLoop | None], DecodeLoop]
OverlapStep = tuple[ScheduleOutput, list[StepOutput]]


@dataclass(slots=True)
class _RunRequest:
    """A request of a run.

    under_way  rounds with it that are not collected
    blocks, draft_blocks  how many of its block tables the device knows
    drafted    tokens whose KV the draft model's cache holds
    """

    state: RequestState
    slot: int
    num_blocks: int
    num_draft_blocks: int
    num_draft_computed: int
    in_flight: int = 0

    def max_len(self, tokens_per_step: int) -> int:
        """Tokens that it can have when all is collected, with `size` of each round."""
        return len(self.state.tokens) + self.in_flight * tokens_per_step


@dataclass(slots=True)
class _DecodeRun:
    """Rounds of the same requests.

    num_draft  tokens that the draft model guesses in each
    over       nothing more is launched
    steady     a round was launched before the step that collects it
    """

    decode_loop: DecodeLoop
    requests: list[_RunRequest]
    num_draft_tokens: int
    in_flight: deque[Sequence[_RunRequest]] = field(default_factory=deque)
    draining: bool = False
    warm: bool = False

    @property
    def tokens_per_step(self) -> int:
        """Tokens that a round can yield for one request."""
        return 1 + self.num_draft_tokens


class OverlapLoop:
    """Decides whether the requests that run are computed in rounds, and does it, one round a step.

    rounds_of   rounds, drafted for by a model or not
    vocab_size  of the model's logits
    directions  the model knows positions in several directions
    """

    def __init__(
        self,
        scheduler: Scheduler,
        proposer: Proposer,
        timer: StepTimer,
        make_decode_loop: MakeDecodeLoop,
        vocab_size: int,
        mrope: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._proposer = proposer
        self._timer = timer
        self._make_decode_loop = make_decode_loop
        self._vocab_size = vocab_size
        self._mrope = mrope
        self._run: _DecodeRun | None = None
        proposer.enable_overlap()
        self._sampling_params: Mapping[int, DraftSamplingParams | None] = {}
        self._backoff_steps = 0
        self.num_errors = 0
        self.num_device_steps = 0
        self.num_runs = 0

    def step(self) -> OverlapStep | None:
        """One round, as the plain loop would have planned it, and what it yielded; None: it is the plain loop's turn, and
        nothing is under way. Raises if the device is lost; after any other error the plain loop computes again."""
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
        run.requests = [lane for lane in run.requests if self._is_live(lane)]
        run.warm = len(run.in_flight) > 0
        while len(run.in_flight) < PIPELINE_DEPTH and self._can_continue(run) and self._launch_step(run):
            pass
        while run.in_flight:
            step = self._collect_step(run)
            if step is not None:
                return step
        self._end_run()
        return None

    def _is_live(self, request: _RunRequest) -> bool:
        """It was not ended, nor aborted (and another one may have its id by now)."""
        return self._scheduler.states.get(request.state.id) is request.state

    # When

    def _can_continue(self, run: _DecodeRun) -> bool:
        """Nothing else is to be done; a run that is over stays so."""
        states = [lane.state for lane in run.requests]
        if not states or self._scheduler.has_decision or self._draft_len(states) != run.num_draft_tokens:
            run.draining = True
        return not run.draining

    def _draft_len(self, states: Sequence[RequestState], num_steps: int = 1) -> int | None:
        """Tokens that are guessed for each of these in the steps to come; None: that is the plain loop's to say."""
        if self._proposer.is_disabled:
            return 0
        num_draft = self._proposer.fixed_draft_len(states, num_steps)
        if num_draft and (len(self._scheduler.waiting) or not self._fits(len(states) * (1 + num_draft))):
            return None  # a draft takes no block that anybody else could use, and no row that there is not
        return num_draft

    def _fits(self, rows: int) -> bool:
        return rows <= self._scheduler.max_num_batched_tokens

    def _try_start(self) -> _DecodeRun | None:
        """A run of all requests that run, if rounds can compute them."""
        scheduler, states = self._scheduler, self._scheduler.running
        if self._backoff_steps:
            self._backoff_steps -= 1
            return None
        if not states or not all(map(_is_text_decode, states)) or scheduler.has_decision:
            return None
        num_draft = self._draft_len(states, MIN_RUN_STEPS)
        if num_draft is None:
            return None
        samplings = self._sampling_params_of(states)
        ahead = PIPELINE_DEPTH * (1 + num_draft)
        if samplings is None or not any(len(state.tokens) + ahead <= state.max_len for state in states):
            return None
        if num_draft and not self._can_draft(states, ahead):
            return None
        if not scheduler.reserve_ahead(
            [
                (s, len(s.tokens) + ahead if num_draft else min(len(s.tokens) + ahead, s.max_len))
                for s in states
            ]
        ):
            return None
        return self._start_run(states, samplings, num_draft)

    def _sampling_params_of(self, states: Sequence[RequestState]) -> list[DraftSamplingParams] | None:
        """How they sample, or None if rounds cannot sample for all of them. What is known of the last ones is kept."""
        known, self._sampling_params = self._sampling_params, {}
        found = {
            s.arrival: known[s.arrival] if s.arrival in known else _draft_sampling_params(s, self._vocab_size)
            for s in states
        }
        self._sampling_params = found
        return None if None in found.values() else [one for one in found.values() if one is not None]

    def _can_draft(self, states: Sequence[RequestState], num_tokens: int) -> bool:
        """The draft model's cache is ready, and the end of the context is far enough for drafts of one length."""
        if any(state.request.images for state in states):
            return False
        with self._timer("draft"):
            return self._proposer.acquire_device(states, num_tokens)

    def _start_run(
        self,
        states: Sequence[RequestState],
        sampling_params: Sequence[DraftSamplingParams],
        num_draft_tokens: int,
    ) -> _DecodeRun:
        """What is known goes to the device once."""
        drafted = num_draft_tokens > 0
        lender = self._proposer.device_drafter if drafted else None
        self._run = run = _DecodeRun(
            self._make_decode_loop(None if lender is None else lender.decode_loop_forward),
            [],
            num_draft_tokens,
        )
        lanes: list[DecodeSlot] = []
        for number, (state, sampling) in enumerate(zip(states, sampling_params, strict=True)):
            draft_blocks = self._proposer.device_blocks(state) if drafted else ()
            shift = state.mrope_positions.offset if self._mrope and state.mrope_positions is not None else 0
            tail, length = tuple(state.tokens[-2:]), len(state.tokens)
            lanes.append(DecodeSlot(tail, length, tuple(state.blocks), sampling, tuple(draft_blocks), shift))
            run.requests.append(_RunRequest(state, number, len(state.blocks), len(draft_blocks), length - 1))
        run.decode_loop.start(lanes)
        self.num_runs += 1
        return run

    # A round

    def _launch_step(self, run: _DecodeRun) -> bool:
        """Begin the next round of those that are sure to want another token; False if there is none."""
        with self._timer("schedule"):
            active = [lane for lane in run.requests if lane.max_len(run.tokens_per_step) < lane.state.max_len]
            if not active or not self._reserve_blocks(run, active):
                run.draining = run.draining or bool(active)
                return False
        if not (self._proposer.is_disabled or run.num_draft_tokens):
            self._proposer.propose(
                [lane.state for lane in active]
            )  # nobody is asked, and that is in the books
        with self._timer("assemble"):
            for lane in active:
                self._extend_blocks(run, lane)
            run.decode_loop.launch([lane.slot for lane in active], run.num_draft_tokens)
        for lane in active:
            lane.in_flight += 1
        run.in_flight.append(active)
        self.num_device_steps += 1
        return True

    def _reserve_blocks(self, run: _DecodeRun, active: Sequence[_RunRequest]) -> bool:
        """Blocks for this round and all that is under way."""
        lengths = [(lane.state, lane.max_len(run.tokens_per_step) + run.tokens_per_step) for lane in active]
        if run.num_draft_tokens and not self._proposer.reserve_device(
            [lane.state for lane in active], PIPELINE_DEPTH * run.tokens_per_step
        ):
            return False
        return self._scheduler.reserve_ahead(lengths)

    def _extend_blocks(self, run: _DecodeRun, request: _RunRequest) -> None:
        """Tell the device of new blocks."""
        blocks = request.state.blocks
        draft_blocks = self._proposer.device_blocks(request.state) if run.num_draft_tokens else ()
        if len(blocks) > request.num_blocks or len(draft_blocks) > request.num_draft_blocks:
            run.decode_loop.extend_blocks(request.slot, tuple(blocks), tuple(draft_blocks))
            request.num_blocks, request.num_draft_blocks = len(blocks), len(draft_blocks)

    def _collect_step(self, run: _DecodeRun) -> OverlapStep | None:
        """The oldest round under way; None if nobody is left of it."""
        lanes = run.in_flight.popleft()
        with self._timer("forward"):
            results = run.decode_loop.collect()
        with self._timer("sample"):
            for lane in lanes:
                lane.in_flight -= 1
            found = [(lane, results.get(lane.slot)) for lane in lanes if self._is_live(lane)]
            given = [
                (lane, _validate_result(result, self._vocab_size, run.num_draft_tokens))
                for lane, result in found
                if result is not None
            ]
            run.draining |= len(given) < len(found) or any(result.token_ids[-1] < 0 for _, result in given)
            taken = [(lane, result) for lane, result in given if result.token_ids[0] >= 0]
            outcomes = [_make_step_output(lane.state, result) for lane, result in taken]
            if not taken:
                return None
            works = tuple(
                _make_scheduled_request(lane.state, result, self._drafter_name) for lane, result in taken
            )
        if run.num_draft_tokens:
            self._record_verified(run, taken, outcomes)
        return ScheduleOutput(works), outcomes

    @property
    def should_sample_cost(self) -> bool:
        """Whether the last round took what rounds without drafts take: others were computed before and behind it. Now and then
        is enough to know that."""
        run = self._run
        return (
            run is not None
            and run.warm
            and not (run.draining or run.num_draft_tokens or self.num_device_steps % COST_SAMPLE_EVERY)
        )

    @property
    def _drafter_name(self) -> str:
        return "" if self._proposer.device_drafter is None else self._proposer.device_drafter.name

    def _record_verified(
        self,
        run: _DecodeRun,
        results: Sequence[tuple[_RunRequest, DecodeResult]],
        outputs: Sequence[StepOutput],
    ) -> None:
        """Tell the drafters' door, and note how far the draft model has come: it has not computed its last guess."""
        drafts = []
        for (lane, result), outcome in zip(results, outputs, strict=True):
            lane.num_draft_computed = len(lane.state.tokens) + min(
                outcome.num_accepted, max(len(result.draft_ids) - 1, 0)
            )
            confidence = tuple(map(exp, result.draft_logprobs))
            drafts.append(
                (lane.state, Draft(result.draft_ids, self._drafter_name, confidence), outcome.token_ids)
            )
        with self._timer("draft"):
            self._proposer.record_verified([one for one in drafts if one[1].token_ids])

    # The end of a run

    def _end_run(self) -> None:
        """What is known is all there is; the plain loop can go on from there."""
        run, self._run = self._run, None
        self._scheduler.release_reserved()
        if run is not None and run.num_draft_tokens:
            for lane in run.requests:
                if self._is_live(lane):
                    self._proposer.release_device(lane.state, lane.num_draft_computed)

    def _abandon(self) -> None:
        """By the error that is being handled. What was not collected is lost, and computed again by the plain loop, which
        finds out whose fault it is. Rounds are tried again after a while."""
        self.num_errors += 1
        logger.exception("running ahead failed, %d times so far; the plain loop goes on", self.num_errors)
        run = self._run
        while run is not None and run.in_flight:
            run.in_flight.popleft()
            with suppress(Exception):
                run.decode_loop.collect()
        self._end_run()
        self._backoff_steps = min(1 << self.num_errors, MAX_BACKOFF_STEPS)


def make_overlap_loop(
    model_runner: ModelRunner,
    scheduler: Scheduler,
    proposer: Proposer,
    timer: StepTimer,
    resolved: ResolvedConfig,
) -> OverlapLoop | None:
    """Where the device can run ahead of the host, and is wanted to. A trace tells of plans, and rounds have none."""
    forward, sampler = model_runner.decode_loop_forward, model_runner.sampler
    if forward is None or not resolved.overlap:
        return None

    def rounds_of(drafter: SupportsDecodeLoop | None) -> DecodeLoop:
        return forward.get_decode_loop(
            resolved.block_size, sampler.never_sampled_ids, drafter, sampler.with_hashes
        )

    return OverlapLoop(scheduler, proposer, timer, rounds_of, model_runner.vocab_size, model_runner.mrope)


def _is_text_decode(state: RequestState) -> bool:
    """All that is to be computed is its last token, and that is no piece of a picture, as it may be where a prompt ends with one:
    rounds know what tokens say, and nothing of what is to be seen."""
    return state.is_decoding and not pending_images(state, state.num_computed)


def _draft_sampling_params(state: RequestState, vocab_size: int) -> DraftSamplingParams | None:
    """How a request samples, if its logits, its seed and the place are all that decides, and tokens all that it wants."""
    params = state.params
    if params.logprobs is not None or params.prompt_logprobs is not None or not only_filters(state.request):
        return None
    return draft_sampling_params(state.request, vocab_size)


def _validate_result(result: DecodeResult, vocab_size: int, num_draft_tokens: int) -> DecodeResult:
    """Raises if it cannot be right: a wrong id would be an index out of range, where nobody knows whose it is."""
    run, drafted = result.token_ids, result.draft_ids
    if not 0 < len(run) <= len(drafted) + 1 <= num_draft_tokens + 1 or run[:-1] != drafted[: len(run) - 1]:
        raise RuntimeError(
            f"a round yielded {len(run)} tokens that do not follow from its {len(drafted)} drafted ones"
        )
    if not -1 <= run[-1] < vocab_size or not all(0 <= token_id < vocab_size for token_id in drafted):
        raise RuntimeError(f"a round yielded ids that are none of the {vocab_size} there are")
    return result


def _make_step_output(state: RequestState, result: DecodeResult) -> StepOutput:
    """As Runner.run() tells it: cut at the end of the answer. A broken row is left to the plain loop."""
    run, accepted = result.token_ids, len(result.token_ids) - 1
    if run[-1] < 0:
        run, accepted = run[:-1], accepted - 1
    ending = state.check_finish(run)
    return StepOutput(
        token_ids=run[: ending.num_kept],
        num_accepted=min(accepted, ending.num_kept),
        logits_hashes=result.logits_hashes[: ending.num_kept],
        finish_reason=ending.finish_reason,
        stop_id=ending.stop_id,
        repetition=ending.repetition,
    )


def _make_scheduled_request(state: RequestState, result: DecodeResult, drafter: str) -> ScheduledRequest:
    """The round as a plan would have told it. What was verified beyond the answer's limit was verified, and is counted."""
    if result.draft_ids:
        state.draft, state.drafter = list(result.draft_ids), drafter
    return ScheduledRequest(
        state, state.num_computed, 1, is_sampled=True, num_draft_tokens=len(result.draft_ids)
    )
