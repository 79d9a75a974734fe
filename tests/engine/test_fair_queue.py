"""Fair queueing: equal shares between flows, order of arrival within a flow, bounded waiting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.core.request import RequestState
from foreword.engine.fair_queue import FairQueue
from tests.support.budget import examples
from tests.support.scheduler_simulation import SchedulerSimulation, make_request, noisy_drafter

MAX_TOKENS = 40  # maximum tokens of a request


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
