"""Whose turn it is: shares are equal whoever sends more, within an account nobody overtakes, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.core.request import RequestState
from foreword.engine.queue import FairQueue
from tests.engine.test_scheduler import noisy_guess
from tests.support.scheduler_simulation import SchedulerSimulation, make_request

LONGEST = 40  # tokens of a request here


class Queue:
    """Requests of accounts, started by rank and ended with more or fewer tokens than were expected."""

    def __init__(self) -> None:
        self.shares = FairQueue()
        self.waiting: list[RequestState] = []
        self.running: list[RequestState] = []
        self.started: list[RequestState] = []
        self._arrivals = 0

    def add(self, account: str, length: int, max_tokens: int) -> RequestState:
        request = replace(
            make_request(str(self._arrivals), [1] * length, max_tokens=max_tokens), account=account
        )
        state = RequestState(request, self._arrivals, 4 * LONGEST)
        self._arrivals += 1
        self.shares.add(state)
        self.waiting.append(state)
        return state

    def start(self) -> None:
        if self.waiting:
            state = min(self.waiting, key=lambda one: one.sort_key)
            self.waiting.remove(state)
            state.scheduled_s = 0.0
            self.shares.on_start(state)
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
        self.shares.on_finish(state)
        self.waiting.sort(key=lambda one: one.sort_key)
        self.shares.update_tags(self.waiting)


moves = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"), st.sampled_from("abc"), st.integers(1, LONGEST // 2), st.integers(1, LONGEST // 2)
        ),
        st.tuples(st.just("add"), st.just("a"), st.integers(1, LONGEST // 2), st.integers(1, LONGEST // 2)),
        st.tuples(st.just("start")),
        st.tuples(st.just("end"), st.integers(0, 9), st.integers(0, LONGEST)),
        st.tuples(st.just("give_up"), st.integers(0, 9)),
    ),
    max_size=120,
)


def played(moves: list[tuple[object, ...]]) -> Iterator[Queue]:
    """The queue after each move."""
    queue = Queue()
    for name, *arguments in moves:
        getattr(queue, str(name))(*arguments)
        yield queue
    while queue.waiting:
        queue.start()
        yield queue


@settings(max_examples=300, deadline=None)
@given(moves)
def test_nobody_overtakes_within_an_account(moves: list[tuple[object, ...]]) -> None:
    for queue in played(moves):
        for account in "abc":
            arrivals = [state.arrival for state in queue.started if state.request.fairness_key == account]
            assert arrivals == sorted(arrivals)


@settings(max_examples=300, deadline=None)
@given(moves)
def test_nobody_is_passed_over_by_more_than_a_little(moves: list[tuple[object, ...]]) -> None:
    """While the first request of an account waits, another account may start what it is owed for its own waiting, and one more.

    Each ends as long as was expected, so that work is what was charged for it.
    """
    passed: dict[int, dict[str, int]] = {}
    seen = 0
    fair = [move for move in moves if move[0] != "end"]
    for queue in played(fair):
        for state in queue.started[seen:]:
            for worked in (passed[one.arrival] for one in _first(queue) if one.arrival in passed):
                account = state.request.fairness_key
                worked[account] = worked.get(account, 0) + state.max_len
            passed.pop(state.arrival, None)
        seen = len(queue.started)
        for state in _first(queue):
            passed.setdefault(state.arrival, {})
        for state in _first(queue):
            assert all(
                work <= 2 * LONGEST
                for account, work in passed[state.arrival].items()
                if account != state.request.fairness_key
            )


def _first(queue: Queue) -> list[RequestState]:
    """The first that waits, of each account."""
    firsts: dict[str, RequestState] = {}
    for state in queue.waiting:
        firsts.setdefault(state.request.fairness_key, state)
    return list(firsts.values())


def test_who_was_away_has_not_saved_anything_up() -> None:
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


@settings(max_examples=100, deadline=None)
@given(moves)
def test_one_account_is_served_in_order_of_arrival(moves: list[tuple[object, ...]]) -> None:
    alone = [(name, "a", *rest[1:]) if name == "add" else (name, *rest) for name, *rest in moves]
    for queue in played(alone):
        arrivals = [state.arrival for state in queue.started]
        assert arrivals == sorted(arrivals)


@settings(max_examples=100, deadline=None)
@given(moves)
def test_accounts_are_forgotten(moves: list[tuple[object, ...]]) -> None:
    queue = Queue()
    for queue in played(moves):
        assert len(queue.shares) <= len(
            {state.request.fairness_key for state in (*queue.waiting, *queue.started)}
        )
    while queue.running:
        queue.end(0, 3)
    assert len(queue.shares) == 0


def simulation_of(**options: object) -> SchedulerSimulation:
    return SchedulerSimulation(num_blocks=64, block_size=4, max_model_len=40, **options)  # type: ignore[arg-type]


def test_single_requests_start_between_those_of_a_flood() -> None:
    simulation = simulation_of(max_num_seqs=2)
    for number in range(100):
        flood = make_request(f"flood-{number}", [1, 2, 3], number, max_tokens=6, ignore_eos=True)
        simulation.add(replace(flood, account="flood"))
    for _ in range(5):
        simulation.step()
    for number in range(5):
        name = f"single-{number}"
        simulation.add(
            replace(make_request(name, [4, 5, 6], number, max_tokens=6, ignore_eos=True), account="single")
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


def test_accounts_get_equal_work_whatever_their_requests_look_like() -> None:
    """One sends long requests, one short ones, one says that it wants much and takes little."""
    simulation = simulation_of(max_num_seqs=3)
    for number in range(200):
        for account, length, max_tokens, ignore_eos in (
            ("long", 20, 16, True),
            ("short", 3, 3, True),
            ("modest", 4, 36, False),
        ):
            request = make_request(
                f"{account}-{number}",
                [1 + number % 9] * length,
                number,
                max_tokens=max_tokens,
                ignore_eos=ignore_eos,
            )
            simulation.add(replace(request, account=account))
    work = dict.fromkeys(("long", "short", "modest"), 0)
    for _ in range(400):
        for item in simulation.step().requests:
            work[item.state.request.fairness_key] += item.num_tokens
    assert max(work.values()) < 1.5 * min(work.values()), work


def test_turns_are_within_a_priority() -> None:
    simulation = simulation_of(max_num_seqs=1)
    simulation.add(make_request("first", [1, 2], max_tokens=3, ignore_eos=True))
    for number in range(3):
        urgent = make_request(f"urgent-{number}", [1, 2], number, priority=-1, max_tokens=3, ignore_eos=True)
        simulation.add(replace(urgent, account="busy"))
    simulation.add(replace(make_request("other", [1, 2], max_tokens=3, ignore_eos=True), account="quiet"))
    simulation.run()
    order = list(dict.fromkeys(name for name, output in simulation.outputs.items() if output))
    assert order and list(simulation.reasons) == ["urgent-0", "urgent-1", "urgent-2", "first", "other"]


def test_who_gave_way_keeps_its_turn() -> None:
    """Blocks are short, accounts are many: each request gets its tokens, and somebody always progresses."""
    simulation = SchedulerSimulation(12, 2, 20, noisy_guess(3, 4, 0.2))
    for number in range(12):
        request = make_request(str(number), [number % 5] * 3, number, ignore_eos=True)
        simulation.add(replace(request, account="abc"[number % 3]))
    simulation.run()
    assert simulation.scheduler.num_preemptions > 0
    assert {len(output) for output in simulation.outputs.values()} == {17}
