"""The load scheduler alone. A case is a script: `time event -> what decide() says`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.config.models_file import ModelEntry
from foreword.config.options import Config
from foreword.fleet.load_scheduler import Decision, LoadScheduler
from foreword.fleet.memory import ModelPlan
from foreword.planning.memory_plan import MemoryPart

CONFIG = Config()


@dataclass(frozen=True)
class Case:
    """models  "A=4": 4 bytes; "A=4/pinned", "/preload", "/keep5" (seconds), "/gpu" (on another device)

    steps   "3 A1 -> load A": at second 3 request A1 of model A is submitted. Other events: `end A1`,
            `loaded A` or `loaded A 5` (measured bytes), `failed A`, `unloaded A`, `measured A 5`, `pin A`,
            `unpin A`, `load A`, `unload A`, and `tick`
    """

    name: str
    models: str
    steps: str
    limit: int = 10
    max_loaded: int | None = None
    max_swap_wait_s: float = 10.0


def make_scheduler(case: Case) -> LoadScheduler:
    plans = []
    for word in case.models.split():
        size, *flags = word.partition("=")[2].split("/")
        keep = [float(flag.removeprefix("keep")) for flag in flags if flag.startswith("keep")]
        device = "gpu" if "gpu" in flags else "cpu"
        keep_alive_s = keep[0] if keep else None
        pins = ("pinned" in flags, "preload" in flags)
        entry = ModelEntry(word.partition("=")[0], CONFIG, keep_alive_s, *pins)
        plans.append(ModelPlan(entry, device, (MemoryPart("all", int(size)),), None))
    limits = {"cpu": case.limit, "gpu": case.limit}
    return LoadScheduler(plans, limits, case.max_loaded, case.max_swap_wait_s)


def apply(scheduler: LoadScheduler, words: Sequence[str], now_s: float) -> None:
    match words:
        case ["tick"]:
            pass
        case ["end", request]:
            scheduler.end(request, now_s)
        case ["loaded", model, *size]:
            scheduler.on_loaded(model, int(size[0]) if size else 0, now_s)
        case ["failed", model]:
            scheduler.on_load_failed(model, now_s)
        case ["unloaded", model]:
            scheduler.on_unloaded(model)
        case ["measured", model, size]:
            scheduler.on_measured(model, int(size))
        case ["pin" | "unpin" as word, model]:
            scheduler.set_pinned(model, word == "pin")
        case ["load", model]:
            scheduler.load(model)
        case ["unload", model]:
            scheduler.unload(model)
        case [request]:
            scheduler.submit(request, request[0], now_s)


def describe(decision: Decision) -> str:
    refused = [f"{each.request_id}:{each.reason}" for each in decision.refused]
    parts = {
        "run": decision.admitted,
        "unload": decision.unload,
        "load": filter(None, [decision.load]),
        "refuse": refused,
    }
    words = ((verb, " ".join(names)) for verb, names in parts.items())
    return ", ".join(f"{verb} {names}" for verb, names in words if names)


def check(case: Case) -> LoadScheduler:
    scheduler = make_scheduler(case)
    for line in filter(None, map(str.strip, case.steps.splitlines())):
        event, _, expected = line.partition("->")
        time_s, *words = event.split()
        apply(scheduler, words, float(time_s))
        assert describe(scheduler.decide(float(time_s))) == expected.strip(), line
    return scheduler


# Cases of our own rules.
CASES = (
    Case(
        "A B A A C becomes A A A B C",
        "A=10 B=10 C=10",
        """
        0 A1 -> load A
        1 loaded A -> run A1
        2 B1 ->
        3 A2 -> run A2
        4 A3 -> run A3
        5 C1 ->
        6 end A1 ->
        7 end A3 ->
        8 end A2 -> unload A
        9 unloaded A -> load B
        10 loaded B -> run B1
        11 end B1 -> unload B
        12 unloaded B -> load C
        13 loaded C -> run C1
        """,
    ),
    Case(
        "requests of the loaded model pass for a limited time, then they wait",
        "A=10 B=10",
        """
        0 A1 -> load A
        1 loaded A -> run A1
        2 B1 ->
        11 A2 -> run A2
        12 A3 ->
        13 B2 ->
        14 end A1 ->
        15 A4 ->
        16 end A2 -> unload A
        17 unloaded A -> load B
        18 loaded B -> run B1 B2
        19 B3 -> run B3
        22 B4 ->
        23 end B1 ->
        24 end B2 ->
        25 end B3 -> unload B
        26 unloaded B -> load A
        27 loaded A -> run A3 A4
        """,
    ),
    Case(
        "the limit counts from the first request that waits",
        "A=10 B=10",
        """
        0 A1 -> load A
        0 loaded A -> run A1
        5 B1 ->
        9 B2 ->
        14 A2 -> run A2
        15 A3 ->
        """,
    ),
    Case(
        "a withdrawn request gives up its turn",
        "A=10 B=10",
        """
        0 A1 -> load A
        0 loaded A -> run A1
        1 B1 ->
        11 A2 ->
        12 end B1 -> run A2
        """,
    ),
    Case(
        "a swap answers some requests even if others are overdue",
        "A=10 B=10",
        """
        0 A1 -> load A
        1 B1 ->
        20 loaded A -> run A1
        21 A2 ->
        22 end A1 -> unload A
        """,
    ),
    Case(
        "a model that fits passes one that waits for room, for a limited time",
        "A=6 B=8 C=4 D=4",
        """
        0 A1 -> load A
        0 loaded A -> run A1
        1 B1 ->
        2 C1 -> load C
        3 loaded C -> run C1
        4 end C1 ->
        11 D1 ->
        12 C2 -> run C2
        13 end A1 ->
        """,
    ),
    Case(
        "the fewest idle models make room, the least recently used first",
        "A=3 B=3 C=4 D=4 E=3",
        """
        0 A1 -> load A
        0 loaded A -> run A1
        1 B1 -> load B
        1 loaded B -> run B1
        2 C1 -> load C
        2 loaded C -> run C1
        3 end A1 ->
        4 end B1 ->
        5 end C1 ->
        6 D1 -> unload C
        7 unloaded C -> load D
        7 loaded D -> run D1
        8 E1 -> unload A
        """,
    ),
    Case(
        "nobody takes the memory that is being freed for another",
        "A=5 B=5 C=10 D=4",
        """
        0 A1 -> load A
        0 loaded A -> run A1
        0 B1 -> load B
        0 loaded B -> run B1
        1 end A1 ->
        1 end B1 ->
        2 C1 -> unload A B
        3 unloaded A ->
        4 D1 ->
        5 unloaded B -> load C
        """,
    ),
    Case(
        "an idle model stays idle for one that waits too long, here because another is being loaded",
        "A=6 B=4 C=6",
        """
        0 A1 -> load A
        0 loaded A -> run A1
        1 end A1 ->
        1 B1 -> load B
        2 C1 ->
        11 A2 -> run A2
        11 end A2 ->
        12 A3 ->
        13 loaded B -> run B1, unload A
        14 unloaded A -> load C
        """,
    ),
    Case(
        "the model that has been loaded the longest makes room, for the first that waits",
        "A=5 B=5 C=5 D=10",
        """
        0 B1 -> load B
        0 loaded B -> run B1
        1 A1 -> load A
        1 loaded A -> run A1
        2 C1 ->
        2 D1 ->
        12 A2 -> run A2
        13 B2 ->
        14 end A1 ->
        14 end A2 -> unload A
        """,
    ),
    Case(
        "with max_loaded, a model of another device makes room",
        "A=1/gpu B=1/gpu C=1",
        """
        0 A1 -> load A
        0 loaded A -> run A1
        1 B1 -> load B
        1 loaded B -> run B1
        2 C1 ->
        12 A2 ->
        13 B2 -> run B2
        14 end A1 -> unload A
        """,
        max_loaded=2,
    ),
    Case(
        "busy and pinned models are not evicted",
        "A=5/pinned B=5 C=5",
        """
        0 tick -> load A
        0 loaded A ->
        1 B1 -> load B
        1 loaded B -> run B1
        2 C1 ->
        3 end B1 -> unload B
        4 unloaded B -> load C
        """,
    ),
    Case(
        "pinned models come first, preloads only where there is room",
        "A=5/preload B=4/preload C=4/pinned D=3",
        """
        0 D1 -> load C
        1 loaded C -> load D
        2 loaded D -> run D1
        3 end D1 ->
        """,
        limit=7,
    ),
    Case(
        "requests come before preloads, and may evict where a preload may not",
        "A=6/preload B=6",
        """
        0 B1 -> load B
        0 loaded B -> run B1
        1 A1 ->
        11 B2 ->
        """,
    ),
    Case(
        "keep_alive counts from the end of the last answer",
        "A=4/keep5",
        """
        0 A1 -> load A
        1 loaded A -> run A1
        9 tick ->
        10 end A1 ->
        14 A2 -> run A2
        16 end A2 ->
        20 tick ->
        21 tick -> unload A
        22 A3 ->
        23 unloaded A -> load A
        24 loaded A -> run A3
        """,
    ),
    Case(
        "pinned models ignore keep_alive",
        "A=4/keep5/pinned",
        """
        0 tick -> load A
        1 loaded A ->
        99 tick ->
        100 unpin A -> unload A
        """,
    ),
    Case(
        "a request that can never fit is refused, also once it is measured",
        "A=11 B=4 C=7/pinned D=3",
        """
        0 tick -> load C
        0 loaded C ->
        1 A1 -> refuse A1:does_not_fit
        2 B1 -> refuse B1:does_not_fit
        3 D1 -> load D
        4 loaded D 4 -> run D1
        5 end D1 -> unload D
        6 unloaded D ->
        7 D2 -> refuse D2:does_not_fit
        """,
    ),
    Case(
        "a measured size above the estimate evicts idle models and blocks loads",
        "A=4 B=4 C=2",
        """
        0 A1 -> load A
        0 loaded A -> run A1
        1 B1 -> load B
        1 loaded B 7 -> run B1
        2 C1 ->
        3 end A1 -> unload A
        4 unloaded A -> load C
        """,
    ),
    Case(
        "a measured size below the estimate may still grow",
        "A=6 B=6",
        """
        0 A1 -> load A
        0 loaded A 1 -> run A1
        1 B1 ->
        """,
    ),
    Case(
        "a failed load ends its requests, and is tried again after a backoff that doubles",
        "A=4",
        """
        0 A1 -> load A
        1 A2 ->
        2 failed A -> refuse A1:load_failed A2:load_failed
        2.5 A3 -> refuse A3:load_failed
        3 A4 -> load A
        4 failed A -> refuse A4:load_failed
        5.5 A5 -> refuse A5:load_failed
        6 A6 -> load A
        7 loaded A -> run A6
        8 end A6 ->
        """,
    ),
    Case(
        "a failed load makes way for others",
        "A=10 B=10",
        """
        0 A1 -> load A
        0 B1 ->
        1 failed A -> load B, refuse A1:load_failed
        """,
    ),
    Case(
        "a pinned model is tried again without a request",
        "A=4/pinned",
        """
        0 tick -> load A
        1 failed A ->
        2 tick -> load A
        """,
    ),
    Case(
        "the engine of a loaded model is gone for good",
        "A=10 B=10",
        """
        0 A1 -> load A
        0 loaded A -> run A1
        1 B1 ->
        2 failed A -> load B
        3 end A1 ->
        4 loaded B -> run B1
        """,
    ),
    Case(
        "an operator's unload lets answers end",
        "A=4/pinned",
        """
        0 tick -> load A
        0 loaded A ->
        1 A1 -> run A1
        2 unload A ->
        3 A2 ->
        4 end A1 -> unload A
        5 unloaded A -> load A
        6 loaded A -> run A2
        """,
    ),
    Case(
        "an operator loads, also after a failure and by eviction",
        "A=10 B=10",
        """
        0 load A -> load A
        1 failed A ->
        1.1 load A -> load A
        2 loaded A ->
        3 load B -> unload A
        3 unloaded A -> load B
        4 loaded B ->
        5 unload A ->
        6 tick ->
        """,
    ),
)


# What the schedulers of llama-swap (a FIFO behind groups or a matrix of models) and of ollama are tested for
# beyond the cases above. "Exclude" means here: both do not fit.
PEER_CASES = (
    Case(
        "llama-swap: a model that two others exclude is evicted once",
        "X=8 A=4 B=4",
        """
        0 X1 -> load X
        0 loaded X -> run X1
        1 end X1 ->
        2 A1 -> unload X
        2 B1 ->
        3 unloaded X -> load A
        4 loaded A -> run A1, load B
        5 loaded B -> run B1
        """,
    ),
    Case(
        "llama-swap: who left before the load ended holds no model",
        "A=10 B=10",
        """
        0 A1 -> load A
        1 end A1 ->
        2 loaded A ->
        3 B1 -> unload A
        """,
    ),
    Case(
        "llama-swap: a withdrawn request causes no load",
        "A=10 B=10",
        """
        0 A1 -> load A
        0 B1 ->
        1 end B1 ->
        2 loaded A -> run A1
        3 end A1 ->
        """,
    ),
    Case(
        "llama-swap: a request that has ended may end again",
        "A=4",
        """
        0 A1 -> load A
        0 loaded A -> run A1
        1 end A1 ->
        2 end A1 ->
        3 end A9 ->
        """,
    ),
    Case(
        "llama-swap fails requests when their model is unloaded by hand; here they are answered before",
        "A=10 B=10",
        """
        0 A1 -> load A
        0 B1 ->
        1 unload A ->
        1 unload B ->
        2 loaded A -> run A1
        3 A2 ->
        4 end A1 -> unload A
        5 unloaded A -> load B
        """,
    ),
    Case(
        "ollama#18282: a model that can never fit evicts nobody",
        "A=4 B=11",
        """
        0 A1 -> load A
        0 loaded A -> run A1
        1 end A1 ->
        2 B1 -> refuse B1:does_not_fit
        3 A2 -> run A2
        """,
    ),
)


@pytest.mark.parametrize("case", (*CASES, *PEER_CASES), ids=lambda case: case.name)
def test_case(case: Case) -> None:
    check(case)


NAMES = "ABCDE"


@st.composite
def fleets(draw: st.DrawFn) -> tuple[Case, list[tuple[float, str, float]]]:
    """Models, and requests: (time, model, seconds of the answer)."""
    sizes = draw(st.lists(st.integers(1, 10), min_size=2, max_size=len(NAMES)))
    flags = draw(st.lists(st.sampled_from(["", "", "/keep2", "/keep0", "/pinned", "/preload", "/gpu"])))
    words = itertools.zip_longest(NAMES[: len(sizes)], sizes, flags[: len(sizes)], fillvalue="")
    models = " ".join(f"{name}={size}{flag}" for name, size, flag in words)
    case = Case("", models, "", 12, draw(st.sampled_from([None, 1, 2, 3])), draw(st.sampled_from([0.0, 3.0])))
    request = st.tuples(st.floats(0, 60), st.sampled_from(NAMES[: len(sizes)]), st.floats(0, MAX_ANSWER_S))
    return case, sorted(draw(st.lists(request, max_size=40)))


MAX_ANSWER_S, LOAD_S, UNLOAD_S = 4.0, 2.0, 0.5


class Simulation:
    """Runs requests against engines that take LOAD_S to load; checks the rules at every step."""

    def __init__(self, case: Case, fail_loads: frozenset[int] = frozenset()) -> None:
        self.scheduler = make_scheduler(case)
        self.case = case
        self.events: list[tuple[float, int, str, str]] = []  # time, order, event, name
        self.submitted_s: dict[str, float] = {}
        self.answer_s: dict[str, float] = {}
        self.waited_s: dict[str, float] = {}  # of requests that ended their wait
        self.open: dict[str, str] = {}  # model by request
        self.loading: str | None = None
        self.fail_loads = fail_loads
        self.num_loads = 0
        self.orders = itertools.count()

    def at(self, time_s: float, event: str, name: str) -> None:
        self.events.append((time_s, next(self.orders), event, name))

    def run(self, requests: Sequence[tuple[float, str, float]]) -> None:
        for number, (time_s, model, answer_s) in enumerate(requests):
            name = f"{model}{number}"
            self.submitted_s[name], self.answer_s[name] = time_s, answer_s
            self.at(time_s, "submit", name)
        self.at(0.0, "tick", "")
        while self.events:
            event = min(self.events)
            self.events.remove(event)
            self.step(*event)
            assert event[0] < 2000, "the simulation does not come to rest"

    def step(self, now_s: float, order: int, event: str, name: str) -> None:
        scheduler = self.scheduler
        if event == "submit":
            scheduler.submit(name, name[0], now_s)
        elif event == "end":
            del self.open[name]
            scheduler.end(name, now_s)
        elif event == "loaded":
            self.loading = None
            self.num_loads += 1
            if self.num_loads in self.fail_loads:
                scheduler.on_load_failed(name, now_s)
            else:
                scheduler.on_loaded(name, 0, now_s)
        elif event == "unloaded":
            scheduler.on_unloaded(name)
        decision = scheduler.decide(now_s)
        for request in decision.admitted:
            assert scheduler.state(request[0]) == "loaded"
            self.open[request] = request[0]
            self.waited_s[request] = now_s - self.submitted_s[request]
            self.at(now_s + self.answer_s[request], "end", request)
        for refusal in decision.refused:
            self.waited_s[refusal.request_id] = now_s - self.submitted_s[refusal.request_id]
        for model in decision.unload:
            assert model not in self.open.values(), f"{model} is unloaded under an answer"
            self.at(now_s + UNLOAD_S, "unloaded", model)
        if decision.load is not None:
            assert self.loading is None, "two loads at a time"
            self.loading = decision.load
            self.at(now_s + LOAD_S, "loaded", decision.load)
        if decision.wake_s is not None:
            assert decision.wake_s > now_s
            self.at(decision.wake_s, "tick", "")
        assert all(scheduler.used_bytes(device) <= self.case.limit for device in ("cpu", "gpu"))
        names = [word[0] for word in self.case.models.split()]
        in_memory = [name for name in names if scheduler.state(name) in ("loading", "loaded", "unloading")]
        assert self.case.max_loaded is None or len(in_memory) <= self.case.max_loaded


@settings(max_examples=300)
@given(fleets())
def test_every_request_is_admitted_or_refused_in_bounded_time(
    fleet: tuple[Case, list[tuple[float, str, float]]],
) -> None:
    case, requests = fleet
    simulation = Simulation(case)
    simulation.run(requests)
    assert simulation.waited_s.keys() == simulation.submitted_s.keys()
    # Every model with an earlier request may be loaded before, and each needs room once.
    turn_s = LOAD_S + MAX_ANSWER_S + UNLOAD_S
    bound_s = case.max_swap_wait_s + (len(case.models.split()) + 1) * turn_s
    assert max(simulation.waited_s.values(), default=0.0) <= bound_s


@settings(max_examples=200)
@given(fleets(), st.frozensets(st.integers(1, 12), max_size=6))
@pytest.mark.full
def test_failing_loads_lose_no_request(
    fleet: tuple[Case, list[tuple[float, str, float]]], fail_loads: frozenset[int]
) -> None:
    case, requests = fleet
    simulation = Simulation(case, fail_loads)
    simulation.run(requests)
    assert simulation.waited_s.keys() == simulation.submitted_s.keys()


def test_memory_counts_by_device() -> None:
    """Also of models that are being loaded or unloaded."""
    scheduler = make_scheduler(Case("", "A=1 B=2/gpu C=4/gpu D=8", "", limit=12))
    for model in "ABC":
        scheduler.load(model)
        assert scheduler.decide(0.0).load == model
        scheduler.on_loaded(model, 0, 0.0)
    scheduler.unload("B")
    scheduler.load("D")
    assert scheduler.decide(0.0) == Decision(load="D", unload=("B",))
    assert (scheduler.used_bytes("cpu"), scheduler.used_bytes("gpu")) == (9, 6)
    scheduler.on_unloaded("B")
    assert scheduler.used_bytes("gpu") == 4


def test_the_arithmetic_of_what_never_fits() -> None:
    scheduler = make_scheduler(Case("", "A=7/pinned B=4 C=3", ""))
    assert scheduler.why_not("B") == "B needs 4 B; models may use 10 B, of which pinned models take 7 B"
    assert scheduler.why_not("C") is None
    scheduler = make_scheduler(Case("", "A=1/pinned B=1", "", max_loaded=1))
    assert scheduler.why_not("B") == "of 1 models at a time, 1 are pinned (A)"


def test_refusals_say_when_to_try_again() -> None:
    scheduler = make_scheduler(Case("", "A=4", ""))
    for failures, backoff_s in ((1, 1.0), (2, 2.0), (3, 4.0)):
        now_s = 100.0 * failures
        scheduler.submit("A1", "A", now_s)
        assert scheduler.decide(now_s).load == "A"
        scheduler.on_load_failed("A", now_s)
        (refusal,) = scheduler.decide(now_s).refused
        assert refusal.retry_at_s == now_s + backoff_s


def test_the_time_of_the_next_decision() -> None:
    scheduler = make_scheduler(Case("", "A=10/keep5 B=10", ""))
    scheduler.submit("A1", "A", 0.0)
    assert scheduler.decide(0.0).wake_s is None, "the load will end"
    scheduler.on_loaded("A", 0, 1.0)
    assert scheduler.decide(1.0).wake_s is None
    scheduler.end("A1", 2.0)
    assert scheduler.decide(2.0).wake_s == 7.0, "keep_alive"
    scheduler.submit("A2", "A", 3.0)
    scheduler.decide(3.0)
    scheduler.submit("B1", "B", 4.0)
    assert scheduler.decide(4.0).wake_s == 14.0, "the wait of B is over"
