"""States of running requests, and anchors that later requests find."""

import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from foreword.core.outputs import StepOutput
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.core.states import NO_ANCHOR, SEGMENT, StateShape, StateSizes
from foreword.engine.scheduler import ScheduleOutput, Scheduler
from foreword.kv_cache.block_pool import BlockPool
from foreword.kv_cache.state_cache import StateCache, anchors_between

MAX_ROWS = 9  # a token and its draft


def make_scheduler(
    block_size: int = 16,
    num_blocks: int = 200,
    max_num_seqs: int = 3,
    rows: int = 256,
    num_anchors: int = 20,
    interval: int = 256,
) -> Scheduler:
    sizes = StateSizes(max_num_seqs + 1, num_anchors, MAX_ROWS)
    states = StateCache(sizes, interval, block_size)
    return Scheduler(BlockPool(num_blocks), block_size, max_num_seqs, rows, states=states)


def make_request(number: int, prompt: list[int], max_tokens: int = 200) -> RequestState:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return RequestState(Request(str(number), tuple(prompt), params, 0), number, 2000)


def step(scheduler: Scheduler, accepted: int = 0, token: int = 7) -> ScheduleOutput:
    scheduled = scheduler.schedule()
    for request in scheduled.requests:
        check_readable(request.state, request.start, request.num_tokens + request.num_draft_tokens)
    outputs = []
    for request in scheduled.requests:
        count = min(accepted, request.num_draft_tokens)
        run = (*request.state.draft[:count], token) if request.is_sampled else ()
        kept, reason, stop_id, _ = request.state.check_finish(run)
        outputs.append(StepOutput(tuple(run[:kept]), min(count, kept), finish_reason=reason, stop_id=stop_id))
    scheduler.update(scheduled, outputs)
    scheduler.check()
    return scheduled


def check_readable(state: RequestState, start: int, num_rows: int) -> None:
    """The first segment has its anchor, and the row after the last one will have its own."""
    anchors = anchors_between(state, start, start + num_rows)
    assert (anchors[0] == NO_ANCHOR) == (start < SEGMENT)
    assert len(anchors) == 1 or anchors[-1] != NO_ANCHOR
    # What a repeated step reads of its ring is not overwritten by the step itself
    shape = StateShape(8, 4, 1, 1, 16, 16)
    oldest = start - start % SEGMENT if start % SEGMENT else start
    assert start + num_rows - oldest + (shape.kernel_size - 1) * (start == oldest) <= max(
        shape.ring_size(MAX_ROWS), num_rows + 3
    )
    assert start == oldest or start + num_rows - oldest <= shape.ring_size(MAX_ROWS) - shape.kernel_size


def run_until_done(scheduler: Scheduler) -> None:
    while not scheduler.idle:
        step(scheduler)


@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_the_next_turn_recomputes_at_most_a_segment(block_size: int):
    scheduler = make_scheduler(block_size)
    first = make_request(0, list(range(300)), max_tokens=100)
    scheduler.add(first)
    run_until_done(scheduler)
    second = make_request(1, [*first.tokens, 5, 6, 7])
    scheduler.add(second)
    scheduler.schedule()
    unit = max(block_size, SEGMENT)
    assert second.num_cached == (len(first.tokens) - 1) // unit * unit


def test_a_repeated_prompt_uses_the_last_anchor_in_it():
    scheduler = make_scheduler()
    scheduler.add(make_request(0, list(range(300)), max_tokens=150))
    run_until_done(scheduler)
    again = make_request(1, list(range(300)))
    scheduler.add(again)
    scheduler.schedule()
    assert again.num_cached == 299 // SEGMENT * SEGMENT


def test_a_branch_recomputes_at_most_the_interval():
    scheduler = make_scheduler(interval=128, num_anchors=40)
    scheduler.add(make_request(0, list(range(700)), max_tokens=1))
    run_until_done(scheduler)
    branch = make_request(1, [*range(600), *range(50)])
    scheduler.add(branch)
    scheduler.schedule()
    assert branch.num_cached == 600 // 128 * 128


def test_choices_compute_their_prompt_once():
    scheduler = make_scheduler(rows=64)
    choices = [make_request(number, list(range(300)), max_tokens=5) for number in range(3)]
    for choice in choices:
        scheduler.add(choice)
    run_until_done(scheduler)
    assert [choice.num_cached for choice in choices] == [0, 256, 256]


def test_passed_anchors_leave_the_index():
    scheduler = make_scheduler()
    scheduler.add(make_request(0, list(range(100)), max_tokens=700))
    while len(scheduler.running or [1]) and not scheduler.idle:
        step(scheduler)
    assert scheduler.state_cache is not None
    # the prompt's last, those at multiples of 256, and the one at the end
    assert len(scheduler.state_cache.pool.digests) == 1 + 3


def test_least_recently_used_anchors_are_reused():
    scheduler = make_scheduler(num_anchors=8)
    for number in range(12):
        scheduler.add(make_request(number, [number] * 200, max_tokens=1))
        run_until_done(scheduler)
    found = {}
    for number in (11, 10, 0):
        state = make_request(20 + number, [number] * 200, max_tokens=1)
        scheduler.add(state)
        scheduler.schedule()
        found[number] = state.num_cached
        scheduler.remove(state.id)
    assert found == {11: 192, 10: 192, 0: 0}


def test_anchors_leave_with_their_blocks():
    scheduler = make_scheduler(num_blocks=30, num_anchors=20)
    for number in range(4):
        scheduler.add(make_request(number, [number] * 200, max_tokens=1))
        run_until_done(scheduler)
    assert scheduler.state_cache is not None
    anchors = scheduler.state_cache.pool.digests
    assert anchors and all(digest in scheduler.pool for digest in anchors)


@pytest.mark.parametrize("accepted", [0, 1, 40, 62, 64])
@pytest.mark.parametrize("start", [61, 62, 63, 64, 127])
def test_longest_drafts_may_be_rejected_anywhere(start: int, accepted: int, monkeypatch: pytest.MonkeyPatch):
    """With 64 tokens a step could pass two anchors, and a request has room for one."""
    monkeypatch.setattr(sys.modules[__name__], "MAX_ROWS", 65)
    scheduler = make_scheduler()
    state = make_request(0, list(range(start)))
    scheduler.add(state)
    step(scheduler)
    for _ in range(3):
        state.set_draft([5] * 64, "test")
        step(scheduler, accepted, 5)


def test_a_failed_request_leaves_no_anchor():
    scheduler = make_scheduler()
    state = make_request(0, list(range(200)))
    scheduler.add(state)
    step(scheduler)
    scheduler._fail_commit(state)
    again = make_request(1, list(range(200)))
    scheduler.add(again)
    step(scheduler)
    assert again.num_cached == 0


def test_a_failed_request_leaves_no_anchor_that_it_has_passed():
    """Its blocks may be in the index by another request's, which stay."""
    scheduler = make_scheduler(interval=128, rows=512)
    state = make_request(0, list(range(400)))
    scheduler.add(state)
    step(scheduler)
    cache = scheduler.state_cache
    assert cache is not None and len(cache.pool.digests) == 3 and set(state.anchors) == {6}
    cache.invalidate(state)
    assert not cache.pool.digests


class Requests(RuleBasedStateMachine):
    """Any order of arrivals, steps with drafts, removals: the invariants of the scheduler hold."""

    @initialize(
        block_size=strategies.sampled_from([16, 32, 128]),
        interval=strategies.sampled_from([128, 512]),
        rows=strategies.sampled_from([8, 48, 200]),
        num_anchors=strategies.integers(7, 12),
        num_blocks=strategies.integers(40, 90),
    )
    def start(self, block_size: int, interval: int, rows: int, num_anchors: int, num_blocks: int) -> None:
        blocks = num_blocks * 16 // block_size + 1
        self.scheduler = make_scheduler(block_size, blocks, 3, rows, num_anchors, interval)
        self.capacity = blocks * block_size
        self.count = 0
        self.tokens = self.token_stream()

    def token_stream(self) -> Iterator[int]:
        while True:
            yield from range(100, 220)

    @rule(
        prefix=strategies.integers(0, 3), length=strategies.integers(1, 330), new=strategies.integers(1, 90)
    )
    def add(self, prefix: int, length: int, new: int) -> None:
        """Prompts share prefixes of one of four kinds."""
        length = min(length, self.capacity - new - 1)
        if length < 1:
            return
        self.scheduler.add(make_request(self.count, [prefix] * length, new))
        self.count += 1

    @precondition(lambda self: not self.scheduler.idle)
    @rule(draft=strategies.integers(0, MAX_ROWS - 1), accepted=strategies.integers(0, MAX_ROWS - 1))
    def run(self, draft: int, accepted: int) -> None:
        for state in self.scheduler.running:
            if state.is_decoding:
                state.set_draft([next(self.tokens) for _ in range(draft)], "test")
        step(self.scheduler, accepted, next(self.tokens))

    @precondition(lambda self: not self.scheduler.idle)
    @rule(data=strategies.data())
    def remove(self, data: strategies.DataObject) -> None:
        self.scheduler.remove(data.draw(strategies.sampled_from(sorted(self.scheduler.states))))

    @invariant()
    def bookkeeping_is_intact(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()


Requests.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestRequests = Requests.TestCase
