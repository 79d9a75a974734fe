"""The engine runs ahead: the next round is computed while this one is committed.

The plain loop (engine/engine.py) waits for the device before it plans. Where the requests that run decode, and nothing but
their logits decides what they sample, there is nothing to plan: the device itself knows the next token. So rounds
(kernels/rounds.py) are launched one ahead of what is collected, and planning, events and figures cost no time of the device. As
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

from foreword.core.draft import Draft, Outcome
from foreword.core.request import RequestState
from foreword.drafting.drafting import Drafting
from foreword.engine.containment import is_device_lost
from foreword.engine.pictures import to_come
from foreword.engine.plan import Plan, Work
from foreword.engine.runner import Runner
from foreword.engine.scheduler import Scheduler
from foreword.engine.stages import Stages
from foreword.kernels.ops import DraftSampling
from foreword.kernels.rounds import RoundLane, RoundResult, Rounds, RunsAhead
from foreword.resolve import Resolved
from foreword.sampling.steps import filters_of, is_plain

__all__ = ["Ahead", "ahead_of"]

logger = logging.getLogger(__name__)

DEPTH: Final = 2  # rounds that are launched and not collected, at most
WORTH_IT: Final = 4  # steps that nobody must be asked for: to begin a run takes about as long as it saves in one
TELLING: Final = 4  # of so many rounds one is measured
LONGEST_REST: Final = 1024  # steps after errors

RoundsOf = Callable[[RunsAhead | None], Rounds]
Step = tuple[Plan, list[Outcome]]


@dataclass(slots=True)
class _Lane:
    """A request of a run.

    under_way  rounds with it that are not collected
    blocks, draft_blocks  how many of its block tables the device knows
    drafted    tokens whose KV the draft model's cache holds
    """

    state: RequestState
    number: int
    blocks: int
    draft_blocks: int
    drafted: int
    under_way: int = 0

    def length(self, size: int) -> int:
        """Tokens that it can have when all is collected, with `size` of each round."""
        return len(self.state.tokens) + self.under_way * size


@dataclass(slots=True)
class _Run:
    """Rounds of the same requests.

    num_draft  tokens that the draft model guesses in each
    over       nothing more is launched
    steady     a round was launched before the step that collects it
    """

    rounds: Rounds
    lanes: list[_Lane]
    num_draft: int
    under_way: deque[Sequence[_Lane]] = field(default_factory=deque)
    over: bool = False
    steady: bool = False

    @property
    def size(self) -> int:
        """Tokens that a round can yield for one request."""
        return 1 + self.num_draft


class Ahead:
    """Decides whether the requests that run are computed in rounds, and does it, one round a step.

    rounds_of   rounds, drafted for by a model or not
    vocab_size  of the model's logits
    directions  the model knows positions in several directions
    """

    def __init__(
        self,
        scheduler: Scheduler,
        drafting: Drafting,
        stages: Stages,
        rounds_of: RoundsOf,
        vocab_size: int,
        directions: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._drafting = drafting
        self._stages = stages
        self._rounds_of = rounds_of
        self._vocab_size = vocab_size
        self._directions = directions
        self._run: _Run | None = None
        drafting.expect_ahead()
        self._samplings: Mapping[int, DraftSampling | None] = {}
        self._rest = 0
        self.num_errors = 0
        self.num_rounds = 0
        self.num_runs = 0

    def step(self) -> Step | None:
        """One round, as the plain loop would have planned it, and what it yielded; None: it is the plain loop's turn, and
        nothing is under way. Raises if the device is lost; after any other error the plain loop computes again."""
        try:
            return self._step()
        except Exception as error:
            if is_device_lost(error):
                raise
            self._give_up()
            return None

    def _step(self) -> Step | None:
        run = self._run or self._begun()
        if run is None:
            return None
        run.lanes = [lane for lane in run.lanes if self._lives(lane)]
        run.steady = len(run.under_way) > 0
        while len(run.under_way) < DEPTH and self._goes_on(run) and self._launch(run):
            pass
        while run.under_way:
            step = self._collect(run)
            if step is not None:
                return step
        self._end()
        return None

    def _lives(self, lane: _Lane) -> bool:
        """It was not ended, nor aborted (and another one may have its id by now)."""
        return self._scheduler.states.get(lane.state.id) is lane.state

    # When

    def _goes_on(self, run: _Run) -> bool:
        """Nothing else is to be done; a run that is over stays so."""
        states = [lane.state for lane in run.lanes]
        if not states or self._scheduler.would_change or self._foreseen(states) != run.num_draft:
            run.over = True
        return not run.over

    def _foreseen(self, states: Sequence[RequestState], steps: int = 1) -> int | None:
        """Tokens that are guessed for each of these in the steps to come; None: that is the plain loop's to say."""
        if self._drafting.off:
            return 0
        num_draft = self._drafting.foreseen(states, steps)
        if num_draft and (len(self._scheduler.waiting) or not self._fits(len(states) * (1 + num_draft))):
            return None  # a draft takes no block that anybody else could use, and no row that there is not
        return num_draft

    def _fits(self, rows: int) -> bool:
        return rows <= self._scheduler.max_num_batched_tokens

    def _begun(self) -> _Run | None:
        """A run of all requests that run, if rounds can compute them."""
        scheduler, states = self._scheduler, self._scheduler.running
        if self._rest:
            self._rest -= 1
            return None
        if not states or not all(map(_decodes_text, states)) or scheduler.would_change:
            return None
        num_draft = self._foreseen(states, WORTH_IT)
        if num_draft is None:
            return None
        samplings = self._samplings_of(states)
        ahead = DEPTH * (1 + num_draft)
        if samplings is None or not any(len(state.tokens) + ahead <= state.limit for state in states):
            return None
        if num_draft and not self._can_draft(states, ahead):
            return None
        if not scheduler.hold([(s, len(s.tokens) + ahead if num_draft else min(len(s.tokens) + ahead, s.limit)) for s in states]):
            return None
        return self._with_lanes(states, samplings, num_draft)

    def _samplings_of(self, states: Sequence[RequestState]) -> list[DraftSampling] | None:
        """How they sample, or None if rounds cannot sample for all of them. What is known of the last ones is kept."""
        known, self._samplings = self._samplings, {}
        found = {s.arrival: known[s.arrival] if s.arrival in known else _sampling(s, self._vocab_size) for s in states}
        self._samplings = found
        return None if None in found.values() else [one for one in found.values() if one is not None]

    def _can_draft(self, states: Sequence[RequestState], num_tokens: int) -> bool:
        """The draft model's cache is ready, and the end of the context is far enough for drafts of one length."""
        if any(state.request.pictures for state in states):
            return False
        with self._stages("draft"):
            return self._drafting.lend(states, num_tokens)

    def _with_lanes(self, states: Sequence[RequestState], samplings: Sequence[DraftSampling], num_draft: int) -> _Run:
        """What is known goes to the device once."""
        drafted = num_draft > 0
        lender = self._drafting.lender if drafted else None
        self._run = run = _Run(self._rounds_of(None if lender is None else lender.ahead), [], num_draft)
        lanes: list[RoundLane] = []
        for number, (state, sampling) in enumerate(zip(states, samplings, strict=True)):
            draft_blocks = self._drafting.lent(state) if drafted else ()
            shift = state.positions.shift if self._directions and state.positions is not None else 0
            tail, length = tuple(state.tokens[-2:]), len(state.tokens)
            lanes.append(RoundLane(tail, length, tuple(state.blocks), sampling, tuple(draft_blocks), shift))
            run.lanes.append(_Lane(state, number, len(state.blocks), len(draft_blocks), length - 1))
        run.rounds.begin(lanes)
        self.num_runs += 1
        return run

    # A round

    def _launch(self, run: _Run) -> bool:
        """Begin the next round of those that are sure to want another token; False if there is none."""
        with self._stages("schedule"):
            active = [lane for lane in run.lanes if lane.length(run.size) < lane.state.limit]
            if not active or not self._reserved(run, active):
                run.over = run.over or bool(active)
                return False
        if not (self._drafting.off or run.num_draft):
            self._drafting.propose([lane.state for lane in active])  # nobody is asked, and that is in the books
        with self._stages("assemble"):
            for lane in active:
                self._grow(run, lane)
            run.rounds.launch([lane.number for lane in active], run.num_draft)
        for lane in active:
            lane.under_way += 1
        run.under_way.append(active)
        self.num_rounds += 1
        return True

    def _reserved(self, run: _Run, active: Sequence[_Lane]) -> bool:
        """Blocks for this round and all that is under way."""
        lengths = [(lane.state, lane.length(run.size) + run.size) for lane in active]
        if run.num_draft and not self._drafting.extend([lane.state for lane in active], DEPTH * run.size):
            return False
        return self._scheduler.hold(lengths)

    def _grow(self, run: _Run, lane: _Lane) -> None:
        """Tell the device of new blocks."""
        blocks = lane.state.blocks
        draft_blocks = self._drafting.lent(lane.state) if run.num_draft else ()
        if len(blocks) > lane.blocks or len(draft_blocks) > lane.draft_blocks:
            run.rounds.grow(lane.number, tuple(blocks), tuple(draft_blocks))
            lane.blocks, lane.draft_blocks = len(blocks), len(draft_blocks)

    def _collect(self, run: _Run) -> Step | None:
        """The oldest round under way; None if nobody is left of it."""
        lanes = run.under_way.popleft()
        with self._stages("forward"):
            results = run.rounds.collect()
        with self._stages("sample"):
            for lane in lanes:
                lane.under_way -= 1
            found = [(lane, results.get(lane.number)) for lane in lanes if self._lives(lane)]
            given = [(lane, _checked(result, self._vocab_size, run.num_draft)) for lane, result in found if result is not None]
            run.over |= len(given) < len(found) or any(result.token_ids[-1] < 0 for _, result in given)
            taken = [(lane, result) for lane, result in given if result.token_ids[0] >= 0]
            outcomes = [_outcome(lane.state, result) for lane, result in taken]
            if not taken:
                return None
            works = tuple(_work(lane.state, result, self._drafter) for lane, result in taken)
        if run.num_draft:
            self._score(run, taken, outcomes)
        return Plan(works), outcomes

    @property
    def telling(self) -> bool:
        """Whether the last round took what rounds without drafts take: others were computed before and behind it. Now and then
        is enough to know that."""
        run = self._run
        return run is not None and run.steady and not (run.over or run.num_draft or self.num_rounds % TELLING)

    @property
    def _drafter(self) -> str:
        return "" if self._drafting.lender is None else self._drafting.lender.name

    def _score(self, run: _Run, taken: Sequence[tuple[_Lane, RoundResult]], outcomes: Sequence[Outcome]) -> None:
        """Tell the drafters' door, and note how far the draft model has come: it has not computed its last guess."""
        drafts = []
        for (lane, result), outcome in zip(taken, outcomes, strict=True):
            lane.drafted = len(lane.state.tokens) + min(outcome.accepted, max(len(result.drafted) - 1, 0))
            confidence = tuple(map(exp, result.logprobs))
            drafts.append((lane.state, Draft(result.drafted, self._drafter, confidence), outcome.token_ids))
        with self._stages("draft"):
            self._drafting.verified([one for one in drafts if one[1].token_ids])

    # The end of a run

    def _end(self) -> None:
        """What is known is all there is; the plain loop can go on from there."""
        run, self._run = self._run, None
        self._scheduler.let_go()
        if run is not None and run.num_draft:
            for lane in run.lanes:
                if self._lives(lane):
                    self._drafting.take_back(lane.state, lane.drafted)

    def _give_up(self) -> None:
        """By the error that is being handled. What was not collected is lost, and computed again by the plain loop, which
        finds out whose fault it is. Rounds are tried again after a while."""
        self.num_errors += 1
        logger.exception("running ahead failed, %d times so far; the plain loop goes on", self.num_errors)
        run = self._run
        while run is not None and run.under_way:
            run.under_way.popleft()
            with suppress(Exception):
                run.rounds.collect()
        self._end()
        self._rest = min(1 << self.num_errors, LONGEST_REST)


def ahead_of(runner: Runner, scheduler: Scheduler, drafting: Drafting, stages: Stages, resolved: Resolved) -> Ahead | None:
    """Where the device can run ahead of the host, and is wanted to. A trace tells of plans, and rounds have none."""
    forward, sampler = runner.ahead, runner.sampler
    if forward is None or not resolved.overlap:
        return None

    def rounds_of(drafter: RunsAhead | None) -> Rounds:
        return forward.rounds(resolved.block_size, sampler.unused_ids, drafter, sampler.hashing)

    return Ahead(scheduler, drafting, stages, rounds_of, runner.vocab_size, runner.directions)


def _decodes_text(state: RequestState) -> bool:
    """All that is to be computed is its last token, and that is no piece of a picture, as it may be where a prompt ends with one:
    rounds know what tokens say, and nothing of what is to be seen."""
    return state.decodes and not to_come(state, state.num_computed)


def _sampling(state: RequestState, vocab_size: int) -> DraftSampling | None:
    """How a request samples, if its logits, its seed and the place are all that decides, and tokens all that it wants."""
    params = state.params
    if params.logprobs is not None or params.prompt_logprobs is not None or not is_plain(state.request):
        return None
    return filters_of(state.request, vocab_size)


def _checked(result: RoundResult, vocab_size: int, num_draft: int) -> RoundResult:
    """Raises if it cannot be right: a wrong id would be an index out of range, where nobody knows whose it is."""
    run, drafted = result.token_ids, result.drafted
    if not 0 < len(run) <= len(drafted) + 1 <= num_draft + 1 or run[:-1] != drafted[: len(run) - 1]:
        raise RuntimeError(f"a round yielded {len(run)} tokens that do not follow from its {len(drafted)} drafted ones")
    if not -1 <= run[-1] < vocab_size or not all(0 <= token_id < vocab_size for token_id in drafted):
        raise RuntimeError(f"a round yielded ids that are none of the {vocab_size} there are")
    return result


def _outcome(state: RequestState, result: RoundResult) -> Outcome:
    """As Runner.run() tells it: cut at the end of the answer. A broken row is left to the plain loop."""
    run, accepted = result.token_ids, len(result.token_ids) - 1
    if run[-1] < 0:
        run, accepted = run[:-1], accepted - 1
    ending = state.ending(run)
    return Outcome(
        token_ids=run[: ending.kept],
        accepted=min(accepted, ending.kept),
        hashes=result.hashes[: ending.kept],
        finish_reason=ending.finish_reason,
        stop_id=ending.stop_id,
        repeating=ending.repeating,
    )


def _work(state: RequestState, result: RoundResult, drafter: str) -> Work:
    """The round as a plan would have told it. What was verified beyond the answer's limit was verified, and is counted."""
    if result.drafted:
        state.draft, state.drafter = list(result.drafted), drafter
    return Work(state, state.num_computed, 1, samples=True, num_draft=len(result.drafted))
