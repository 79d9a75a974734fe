"""Who is tried with whom after an error, what is asked of a harmless request, and what no request can be blamed for."""

from __future__ import annotations

import gc
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foreword.core.outputs import StepOutput
from foreword.core.request import RequestState
from foreword.engine.fault_isolation import MAX_FAILED_STEPS, NONFINITE, FaultIsolation
from foreword.engine.schedule import ScheduledRequest
from foreword.engine.timers import StepTimer
from foreword.errors import InvalidRequest, RequestFailed
from tests.support.scheduler_simulation import make_request

Pass = Callable[[Sequence[str]], Sequence[StepOutput]]


class Steps:
    """A containment around a pass that sees names alone. `tried` are its calls, in order."""

    def __init__(self, compute: Pass) -> None:
        self.tried: list[list[str]] = []
        self.announced: list[list[str]] = []
        self.faults: Counter[str] = Counter()
        stages = StepTimer()

        def attempt(works: Sequence[ScheduledRequest]) -> Sequence[StepOutput]:
            self.tried.append([work.state.id for work in works])
            with stages("forward"):
                return compute(self.tried[-1])

        def announce(works: Sequence[ScheduledRequest]) -> None:
            self.announced.append([work.state.id for work in works])

        self.containment = FaultIsolation(
            attempt, announce, lambda error: StepOutput(error=error), None, stages, self.faults
        )

    def run(self, *names: str) -> list[str]:
        """Of each name its result: "ok", or the class of its error."""
        works = [
            ScheduledRequest(RequestState(make_request(name, [1]), 0, 9), 0, 1, is_sampled=True)
            for name in names
        ]
        results = self.containment.run(works)
        return ["ok" if result.error is None else type(result.error).__name__ for result in results]


def breaking(*bad: str, error: type[Exception] = RuntimeError) -> Pass:
    """A pass that fails where one of these takes part."""

    def compute(names: Sequence[str]) -> Sequence[StepOutput]:
        if set(bad) & set(names):
            raise error("broken")
        return [StepOutput()] * len(names)

    return compute


def test_halves_are_tried_until_it_is_known_who_fails() -> None:
    steps = Steps(breaking("c"))
    assert steps.run(*"abcd") == ["ok", "ok", "RequestFailed", "ok"]
    assert ["".join(names) for names in steps.tried] == ["abcd", "ab", "cd", "c", "c", "d"]
    assert steps.announced == steps.tried, "if it ends the process, that was it"
    assert steps.faults == {"forward": 1} and steps.containment.was_retried


@given(st.sets(st.sampled_from("abcdefgh")), st.integers(1, 8))
def test_exactly_those_fail_that_fail_alone(bad: set[str], count: int) -> None:
    names = "abcdefgh"[:count]
    steps = Steps(breaking(*bad))
    assert steps.run(*names) == ["RequestFailed" if name in bad else "ok" for name in names]
    assert steps.containment.was_retried == bool(bad & set(names))
    assert len(steps.tried) <= 3 * count + 1


def test_what_passes_ends_nobody() -> None:
    errors = [MemoryError()]

    def compute(names: Sequence[str]) -> Sequence[StepOutput]:
        if errors and len(names) == 1:
            raise errors.pop()
        return [StepOutput()] * len(names)

    steps = Steps(compute)
    assert steps.run("a") == ["ok"]
    assert steps.run("a", "b") == ["ok", "ok"] and not steps.containment.was_retried
    assert not steps.faults


def test_a_step_that_is_too_large_ends_nobody() -> None:
    def compute(names: Sequence[str]) -> Sequence[StepOutput]:
        if len(names) > 2:
            raise torch.OutOfMemoryError("too much at once")
        return [StepOutput()] * len(names)

    assert Steps(compute).run(*"abcdefg") == ["ok"] * 7


def test_the_memory_of_what_failed_is_free_before_the_next_try(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "foreword.engine")  # what pytest captures, it holds
    held: list[weakref.ref[torch.Tensor]] = []
    still_there: list[Sequence[str]] = []

    def compute(names: Sequence[str]) -> Sequence[StepOutput]:
        if any(ref() is not None for ref in held):
            still_there.append(names)
        activations = torch.zeros(4)
        held.append(weakref.ref(activations))
        if "bad" in names and names != ["nobody"]:
            raise RuntimeError("broken")
        return [StepOutput()] * len(names)

    gc.disable()
    try:
        assert Steps(compute).run("a", "bad", "c") == ["ok", "RequestFailed", "ok"]
    finally:
        gc.enable()
    assert not still_there, "an error holds what it was raised over"


def test_a_lost_device_ends_the_engine_at_once() -> None:
    steps = Steps(breaking("b", error=torch.AcceleratorError))
    with pytest.raises(torch.AcceleratorError):
        steps.run("a", "b")
    assert len(steps.tried) == 1


@pytest.mark.parametrize(
    ("told", "lost"),
    [
        ("an illegal memory access was encountered", True),
        ("unspecified launch failure", True),
        ("out of memory", False),
        ("invalid argument", False),
    ],
)
def test_a_kernel_of_triton_may_be_the_first_to_know_that_the_device_is_lost(told: str, lost: bool) -> None:
    def compute(names: Sequence[str]) -> Sequence[StepOutput]:
        if "b" in names:
            raise RuntimeError(f"Triton Error [CUDA]: {told}")
        return [StepOutput()] * len(names)

    steps = Steps(compute)
    if lost:
        with pytest.raises(RuntimeError, match=told):
            steps.run("a", "b")
        assert len(steps.tried) == 1
    else:
        assert steps.run("a", "b") == ["ok", "RequestFailed"]


def test_a_device_without_memory_is_not_lost() -> None:
    def compute(names: Sequence[str]) -> Sequence[StepOutput]:
        if len(names) > 1:
            raise torch.AcceleratorError("CUDA error: out of memory")
        return [StepOutput()]

    assert Steps(compute).run("a", "b") == ["ok", "ok"]


def test_where_all_fail_a_harmless_request_tells_whose_fault_it_is() -> None:
    steps = Steps(breaking("a", "b"))
    assert steps.run("a", "b") == ["RequestFailed", "RequestFailed"]
    assert steps.tried[-1] == ["nobody"] and steps.announced[-1] == ["b"]
    with pytest.raises(RuntimeError):
        Steps(breaking("a", "b", "nobody")).run("a", "b")
    with pytest.raises(RuntimeError, match="nobody sent fails as well"):
        Steps(lambda names: [StepOutput(error=RequestFailed("NaN"))] * len(names)).run("a")


def test_patience_ends_only_where_nobody_gets_anything() -> None:
    steps = Steps(breaking("bad"))
    for _ in range(2 * MAX_FAILED_STEPS):
        steps.run("bad")
        if len(steps.tried) % 2:
            steps.run("good")
        steps.run("good")
    for _ in range(MAX_FAILED_STEPS - 1):
        steps.run("bad")
    with pytest.raises(RuntimeError, match=f"{MAX_FAILED_STEPS} steps"):
        steps.run("bad")


def test_errors_of_the_caller_are_none_of_ours() -> None:
    def compute(names: Sequence[str]) -> Sequence[StepOutput]:
        errors = {"nan": RequestFailed("NaN"), "asked": InvalidRequest("nothing is left")}
        return [StepOutput(error=errors.get(name)) for name in names]

    steps = Steps(compute)
    for _ in range(2 * MAX_FAILED_STEPS):
        assert steps.run("asked") == ["InvalidRequest"]
    assert steps.run("a", "nan") == ["ok", "RequestFailed"]
    assert steps.faults == {NONFINITE: 1}
