"""Queues of waiting requests: images, and grammars."""

from collections.abc import Generator, Iterator
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.core.images import PromptImage
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.core.structured_output import RequestGrammar
from foreword.engine.waiting_queue import (
    FairQueue,
    PendingGrammar,
    PendingGrammars,
    UnencodedImages,
    WaitingQueue,
)
from tests.support.budget import examples
from tests.support.scheduler_simulation import (
    VOCAB,
    FakeVisionEncoder,
    SchedulerSimulation,
    expected_output,
    make_image,
    make_request,
    noisy_drafter,
)

LENGTH = 24

MAX_TOKENS = 40  # maximum tokens of a request


class StuckEncoder(FakeVisionEncoder):
    """A vision encoder too slow to finish during a test."""

    def encode(self, image: PromptImage) -> Generator[int, None, torch.Tensor]:
        for _ in range(10_000):
            yield 1
        return (yield from super().encode(image))


def image_request(name: str, which: int, num_tokens: int, seed: int = 0, **changes: object) -> Request:
    prompt = [5, *[VOCAB] * num_tokens, 6]
    request = make_request(name, prompt, seed, max_tokens=2, ignore_eos=True)
    return replace(request, images=(make_image(which, 1, num_tokens),), **changes)  # type: ignore[arg-type]


def waiting_state(name: str, arrival: int, **changes: object) -> RequestState:
    return RequestState(image_request(name, arrival, 3, **changes), arrival, LENGTH)


@settings(max_examples=examples(150))
@given(
    images=st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 10), st.integers(1, 3)), max_size=12
    ),  # image, tokens, choices
    before=st.integers(0, 3),  # steps before the text request
    two_flows=st.booleans(),
    max_num_seqs=st.integers(2, 6),
    budget=st.integers(6, 24),
    prefix_caching=st.booleans(),
)
def test_text_starts_despite_waiting_image_requests(
    images, before, two_flows, max_num_seqs, budget, prefix_caching
) -> None:
    """It has its first token in a few steps, though no image is encoded meanwhile."""
    simulation = SchedulerSimulation(
        200,
        4,
        LENGTH,
        cache_features=100,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        prefix_caching=prefix_caching,
    )
    simulation.encoder._encoder = StuckEncoder()
    requests = [
        image_request(
            f"{number}-{choice}",
            which,
            num_tokens,
            choice,
            fairness_key="ab"[number % 2] if two_flows else "",
        )
        for number, (which, num_tokens, choices) in enumerate(images)
        for choice in range(choices)
    ]
    for request in requests:
        simulation.add(request)
    for _ in range(before if requests else 0):
        simulation.step()
    simulation.add(make_request("text", [1, 2, 3], max_tokens=4, ignore_eos=True))
    for _ in range(6):
        simulation.step()
    assert simulation.outputs["text"]
    simulation.encoder._encoder, simulation.encoder._job = FakeVisionEncoder(), None
    simulation.run()
    for request in requests:
        assert simulation.outputs[request.id] == expected_output(request, LENGTH)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 4])
def test_image_requests_finish_despite_steady_text(max_num_seqs: int) -> None:
    simulation = SchedulerSimulation(200, 4, LENGTH, cache_features=100, max_num_seqs=max_num_seqs)
    for number in range(8):
        simulation.add(image_request(f"{number}", number, 10))
    for step in range(200):
        simulation.add(
            make_request(f"text {step}", [1, 2, step % VOCAB], step, max_tokens=2, ignore_eos=True)
        )
        simulation.step()
    assert {f"{number}" for number in range(8)} <= simulation.reasons.keys()
    simulation.run()


def test_image_request_of_better_priority_starts_first() -> None:
    simulation = SchedulerSimulation(200, 4, LENGTH, cache_features=100, max_num_seqs=4)
    simulation.encoder._encoder = StuckEncoder()
    for number in range(4):
        simulation.add(image_request(f"{number}", number, 4, priority=1))
    simulation.step()
    simulation.add(image_request("urgent", 5, 4))
    simulation.step()
    assert [state.id for state in simulation.scheduler.running] == ["urgent", "0", "1"]


def test_blocked_image_requests_are_not_rescanned() -> None:
    """The lookups of a step do not grow with the number of blocked requests."""
    lookups = []
    for num in (5, 50):
        simulation = SchedulerSimulation(200, 4, LENGTH, cache_features=100)
        simulation.encoder._encoder = StuckEncoder()
        for number in range(num):
            simulation.add(image_request(f"{number}", number % 10, 10, seed=number))
        for _ in range(3):
            simulation.step()
        before = simulation.num_image_lookups
        simulation.step()
        lookups.append(simulation.num_image_lookups - before)
    assert lookups[0] == lookups[1]


def test_blocked_requests_stay_in_the_queue_by_rank() -> None:
    waiting = WaitingQueue()
    states = [waiting_state(f"{number}", number) for number in range(5)]
    for state in reversed(states):
        waiting.add(state)
    waiting.block(3)
    waiting.block(0)
    assert waiting.ready == [states[1], states[2], states[4]] and waiting.blocked_on_images == [
        states[0],
        states[3],
    ]
    assert list(waiting) == states and len(waiting) == 5 and all(state in waiting for state in states)
    waiting.remove(states[3])
    states[0].virtual_start = 9
    waiting.resort()
    assert waiting.ready == [states[1], states[2], states[4], states[0]] and not waiting.blocked_on_images
    waiting.block(0)
    waiting.unblock_all()
    assert waiting.ready == [states[1], states[2], states[4], states[0]] and not waiting.blocked_on_images


def test_unencoded_images_block_later_requests() -> None:
    first, second, third = (waiting_state(f"{number}", number) for number in range(3))
    urgent = waiting_state("urgent", 9, priority=-1)
    computable = {"0": 1, "1": 5, "2": 1}  # of five tokens: the second request has all its images
    unencoded = UnencodedImages([first, second, third], lambda state, start: computable[state.id])
    last = waiting_state("last", 7)
    assert unencoded.blocks(last, max_tokens=8, max_slots=9)
    assert not unencoded.blocks(last, max_tokens=9, max_slots=9)
    assert unencoded.blocks(last, max_tokens=99, max_slots=2)
    assert not unencoded.blocks(last, max_tokens=99, max_slots=3)
    assert not unencoded.blocks(second, max_tokens=5, max_slots=9)
    assert unencoded.blocks(second, max_tokens=4, max_slots=9)
    assert not unencoded.blocks(urgent, max_tokens=1, max_slots=1)
    same = UnencodedImages([first, third], lambda state, start: 1)
    fewer = UnencodedImages([first], lambda state, start: 1)
    assert unencoded.entries == same.entries != fewer.entries


def test_pending_grammars_are_popped_once() -> None:
    def make_pending(name: str, arrival: int) -> PendingGrammar:
        grammar: Future[RequestGrammar] = Future()
        return PendingGrammar(Request(name, (1,), SamplingParams(), 0), arrival, grammar)

    a, b, c = make_pending("a", 0), make_pending("b", 1), make_pending("c", 2)
    grammars = PendingGrammars({pending.request.id: pending for pending in (a, b, c)})
    assert grammars.pop_ready(block=True) == [] and len(grammars) == 3
    assert a.grammar.set_running_or_notify_cancel() and grammars.running_arrivals() == [0]
    a.grammar.set_exception(ValueError())
    assert grammars.cancel("b") and b.grammar.cancelled() and not grammars.cancel("b")
    assert grammars.pop_ready(block=False) == [a]
    assert list(grammars) == ["c"]


class Queue:
    """Requests of several flows, started by rank, with more or fewer tokens than estimated."""

    def __init__(self) -> None:
        self.fair_queue = FairQueue()
        self.waiting: list[RequestState] = []
        self.running: list[RequestState] = []
        self.started: list[RequestState] = []
        self._arrivals = 0

    def add(self, flow: str, length: int, max_tokens: int) -> RequestState:
        request = replace(
            make_request(str(self._arrivals), [1] * length, max_tokens=max_tokens), fairness_key=flow
        )
        state = RequestState(request, self._arrivals, 4 * MAX_TOKENS)
        self._arrivals += 1
        self.fair_queue.add(state)
        self.waiting.append(state)
        return state

    def start(self) -> None:
        if self.waiting:
            state = min(self.waiting, key=lambda state: state.sort_key)
            self.waiting.remove(state)
            state.scheduled_s = 0.0
            self.fair_queue.on_start(state)
            self.running.append(state)
            self.started.append(state)

    def end(self, place: int, written: int) -> None:
        if self.running:
            state = self.running.pop(place % len(self.running))
            state.tokens += [2] * min(written, state.max_len - len(state.tokens))
            self._over(state)

    def give_up(self, place: int) -> None:
        if self.waiting:
            self._over(self.waiting.pop(place % len(self.waiting)))

    def _over(self, state: RequestState) -> None:
        self.fair_queue.on_finish(state)
        self.waiting.sort(key=lambda state: state.sort_key)
        self.fair_queue.update_tags(self.waiting)


lengths = st.integers(1, MAX_TOKENS // 2)
moves = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("aaabc"), lengths, lengths),
        st.tuples(st.just("start")),
        st.tuples(st.just("end"), st.integers(0, 9), st.integers(0, MAX_TOKENS)),
        st.tuples(st.just("give_up"), st.integers(0, 9)),
    ),
    max_size=120,
)


def play(moves: list[tuple[object, ...]]) -> Iterator[Queue]:
    """The queue after each move of the test."""
    queue = Queue()
    for name, *arguments in moves:
        getattr(queue, str(name))(*arguments)
        yield queue
    while queue.waiting:
        queue.start()
        yield queue


@settings(max_examples=examples(300))
@given(moves)
def test_flow_is_served_in_order_of_arrival_and_pruned_when_idle(moves: list[tuple[object, ...]]) -> None:
    queue = Queue()
    for queue in play(moves):
        arrivals: dict[str, list[int]] = {}
        for state in queue.started:
            arrivals.setdefault(state.request.fairness_key, []).append(state.arrival)
        assert all(flow == sorted(flow) for flow in arrivals.values())
        assert len(queue.fair_queue) <= len(arrivals.keys() | {s.request.fairness_key for s in queue.waiting})
    while queue.running:
        queue.end(0, 3)
    assert len(queue.fair_queue) == 0


@settings(max_examples=examples(300))
@given(moves)
def test_flow_is_passed_over_by_a_bounded_amount(moves: list[tuple[object, ...]]) -> None:
    """While a flow's first request waits, another flow starts at most its owed share and one request more."""
    passed: dict[int, dict[str, int]] = {}
    seen = 0
    fair = [move for move in moves if move[0] != "end"]
    for queue in play(fair):
        for state in queue.started[seen:]:
            for work in (passed[state.arrival] for state in _first(queue) if state.arrival in passed):
                flow = state.request.fairness_key
                work[flow] = work.get(flow, 0) + state.max_len
            passed.pop(state.arrival, None)
        seen = len(queue.started)
        for state in _first(queue):
            passed.setdefault(state.arrival, {})
        for state in _first(queue):
            assert all(
                work <= 2 * MAX_TOKENS
                for flow, work in passed[state.arrival].items()
                if flow != state.request.fairness_key
            )


def _first(queue: Queue) -> list[RequestState]:
    """The first waiting request of each flow."""
    firsts: dict[str, RequestState] = {}
    for state in queue.waiting:
        firsts.setdefault(state.request.fairness_key, state)
    return list(firsts.values())


def test_idle_flow_saves_up_no_share() -> None:
    queue = Queue()
    for _ in range(40):
        queue.add("a", 5, 5)
    for _ in range(20):
        queue.start()
    for _ in range(20):
        queue.add("b", 5, 5)
    for _ in range(10):
        queue.start()
    assert sum(state.request.fairness_key == "b" for state in queue.started) in (5, 6)


def simulation_of(**options: object) -> SchedulerSimulation:
    return SchedulerSimulation(num_blocks=64, block_size=4, max_model_len=40, **options)  # type: ignore[arg-type]


def test_single_requests_start_during_a_flood() -> None:
    simulation = simulation_of(max_num_seqs=2)
    for number in range(100):
        flood = make_request(f"flood-{number}", [1, 2, 3], number, max_tokens=6, ignore_eos=True)
        simulation.add(replace(flood, fairness_key="flood"))
    for _ in range(5):
        simulation.step()
    for number in range(5):
        name = f"single-{number}"
        simulation.add(
            replace(
                make_request(name, [4, 5, 6], number, max_tokens=6, ignore_eos=True), fairness_key="single"
            )
        )
        before = _num_started(simulation)
        while not simulation.outputs[name]:
            simulation.step()
        assert _num_started(simulation) - before <= 3
        while name not in simulation.reasons:
            simulation.step()
    assert len(simulation.scheduler.waiting) > 70
    simulation.run()


def _num_started(simulation: SchedulerSimulation) -> int:
    return sum(bool(output) for output in simulation.outputs.values())


def test_flows_get_equal_work_for_unequal_requests() -> None:
    """Flows of long requests, of short ones, and of ones far below their max_tokens."""
    simulation = simulation_of(max_num_seqs=3)
    for number in range(200):
        for flow, length, max_tokens, ignore_eos in (
            ("long", 20, 16, True),
            ("short", 3, 3, True),
            ("modest", 4, 36, False),
        ):
            request = make_request(
                f"{flow}-{number}",
                [1 + number % 9] * length,
                number,
                max_tokens=max_tokens,
                ignore_eos=ignore_eos,
            )
            simulation.add(replace(request, fairness_key=flow))
    work = dict.fromkeys(("long", "short", "modest"), 0)
    for _ in range(400):
        for item in simulation.step().requests:
            work[item.state.request.fairness_key] += item.num_tokens
    assert max(work.values()) < 1.5 * min(work.values()), work


def test_priority_precedes_fair_share() -> None:
    simulation = simulation_of(max_num_seqs=1)
    simulation.add(make_request("first", [1, 2], max_tokens=3, ignore_eos=True))
    for number in range(3):
        urgent = make_request(f"urgent-{number}", [1, 2], number, priority=-1, max_tokens=3, ignore_eos=True)
        simulation.add(replace(urgent, fairness_key="busy"))
    simulation.add(
        replace(make_request("other", [1, 2], max_tokens=3, ignore_eos=True), fairness_key="quiet")
    )
    simulation.run()
    order = list(dict.fromkeys(name for name, output in simulation.outputs.items() if output))
    assert order and list(simulation.reasons) == ["urgent-0", "urgent-1", "urgent-2", "first", "other"]


def test_preempted_requests_keep_their_tag() -> None:
    """With few blocks and several flows every request gets its tokens."""
    simulation = SchedulerSimulation(12, 2, 20, noisy_drafter(3, 4, 0.2))
    for number in range(12):
        request = make_request(str(number), [number % 5] * 3, number, ignore_eos=True)
        simulation.add(replace(request, fairness_key="abc"[number % 3]))
    simulation.run()
    assert simulation.scheduler.num_preemptions > 0
    assert {len(output) for output in simulation.outputs.values()} == {17}
