"""Fault isolation: retries in halves, the dummy request, and errors that are raised."""

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
from foreword.engine.fault_isolation import MAX_FAILED_PASSES, NONFINITE, FailedPasses, FaultIsolation
from foreword.engine.scheduler import ScheduledRequest
from foreword.engine.timers import StepTimer
from foreword.errors import InvalidRequest, RequestFailed
from tests.support.scheduler_simulation import make_request

Pass = Callable[[Sequence[str]], Sequence[StepOutput]]


class Steps:
    """A FaultIsolation around a pass over request names, with a log of its calls."""

    def __init__(self, compute: Pass, failed_passes: FailedPasses | None = None) -> None:
        self.passes: list[list[str]] = []
        self.reported: list[list[str]] = []
        self.faults: Counter[str] = Counter()
        timer = StepTimer()

        def run_pass(requests: Sequence[ScheduledRequest]) -> Sequence[StepOutput]:
            self.passes.append([request.state.id for request in requests])
            with timer("forward"):
                return compute(self.passes[-1])

        def on_batch(requests: Sequence[ScheduledRequest]) -> None:
            self.reported.append([request.state.id for request in requests])

        self.isolation = FaultIsolation(
            run_pass, StepOutput, on_batch, timer, self.faults, failed_passes or FailedPasses()
        )

    def run(self, *names: str) -> list[str]:
        """The result of each request: "ok" or the class of its error."""
        requests = [
            ScheduledRequest(RequestState(make_request(name, [1]), 0, 9), 0, 1, is_sampled=True)
            for name in names
        ]
        results = self.isolation.run(requests)
        return ["ok" if result.error is None else type(result.error).__name__ for result in results]


def breaking(*bad: str, error: type[Exception] = RuntimeError) -> Pass:
    """A pass that raises if one of these requests is in the batch."""

    def compute(names: Sequence[str]) -> Sequence[StepOutput]:
        if set(bad) & set(names):
            raise error("broken")
        return [StepOutput()] * len(names)

    return compute


def test_failed_batch_is_retried_in_halves() -> None:
    steps = Steps(breaking("c"))
    assert steps.run(*"abcd") == ["ok", "ok", "RequestFailed", "ok"]
    assert ["".join(names) for names in steps.passes] == ["abcd", "ab", "cd", "c", "c", "d"]
    assert steps.reported == steps.passes, "each batch is reported before its pass"
    assert steps.faults == {"forward": 1} and steps.isolation.was_retried


@given(st.sets(st.sampled_from("abcdefgh")), st.integers(1, 8))
def test_only_failing_requests_fail(bad: set[str], count: int) -> None:
    names = "abcdefgh"[:count]
    steps = Steps(breaking(*bad))
    assert steps.run(*names) == ["RequestFailed" if name in bad else "ok" for name in names]
    assert steps.isolation.was_retried == bool(bad & set(names))
    assert len(steps.passes) <= 3 * count + 1


def test_transient_error_fails_no_request() -> None:
    errors = [MemoryError()]

    def compute(names: Sequence[str]) -> Sequence[StepOutput]:
        if errors and len(names) == 1:
            raise errors.pop()
        return [StepOutput()] * len(names)

    steps = Steps(compute)
    assert steps.run("a") == ["ok"]
    assert steps.run("a", "b") == ["ok", "ok"] and not steps.isolation.was_retried
    assert not steps.faults


def test_oom_of_a_large_batch_fails_no_request() -> None:
    def compute(names: Sequence[str]) -> Sequence[StepOutput]:
        if len(names) > 2:
            raise torch.OutOfMemoryError("too much at once")
        return [StepOutput()] * len(names)

    assert Steps(compute).run(*"abcdefg") == ["ok"] * 7


def test_memory_of_a_failed_pass_is_freed_before_the_retry(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "foreword.engine")  # pytest would hold the captured exception
    references: list[weakref.ref[torch.Tensor]] = []
    leaks: list[Sequence[str]] = []

    def compute(names: Sequence[str]) -> Sequence[StepOutput]:
        if any(ref() is not None for ref in references):
            leaks.append(names)
        activations = torch.zeros(4)
        references.append(weakref.ref(activations))
        if "bad" in names and names != ["dummy"]:
            raise RuntimeError("broken")
        return [StepOutput()] * len(names)

    gc.disable()
    try:
        assert Steps(compute).run("a", "bad", "c") == ["ok", "RequestFailed", "ok"]
    finally:
        gc.enable()
    assert not leaks, "the error holds the memory of its pass"


def test_lost_device_is_raised_without_retries() -> None:
    steps = Steps(breaking("b", error=torch.AcceleratorError))
    with pytest.raises(torch.AcceleratorError):
        steps.run("a", "b")
    assert len(steps.passes) == 1


@pytest.mark.parametrize(
    ("message", "lost"),
    [
        ("an illegal memory access was encountered", True),
        ("unspecified launch failure", True),
        ("out of memory", False),
        ("invalid argument", False),
    ],
)
def test_triton_errors_can_mean_a_lost_device(message: str, lost: bool) -> None:
    def compute(names: Sequence[str]) -> Sequence[StepOutput]:
        if "b" in names:
            raise RuntimeError(f"Triton Error [CUDA]: {message}")
        return [StepOutput()] * len(names)

    steps = Steps(compute)
    if lost:
        with pytest.raises(RuntimeError, match=message):
            steps.run("a", "b")
        assert len(steps.passes) == 1
    else:
        assert steps.run("a", "b") == ["ok", "RequestFailed"]


def test_oom_is_no_lost_device() -> None:
    def compute(names: Sequence[str]) -> Sequence[StepOutput]:
        if len(names) > 1:
            raise torch.AcceleratorError("CUDA error: out of memory")
        return [StepOutput()]

    assert Steps(compute).run("a", "b") == ["ok", "ok"]


def test_dummy_request_is_run_when_all_requests_fail() -> None:
    steps = Steps(breaking("a", "b"))
    assert steps.run("a", "b") == ["RequestFailed", "RequestFailed"]
    assert steps.passes[-1] == ["dummy"] and steps.reported[-1] == ["b"]
    with pytest.raises(RuntimeError):
        Steps(breaking("a", "b", "dummy")).run("a", "b")
    with pytest.raises(RuntimeError, match="a dummy request fails as well"):
        Steps(lambda names: [StepOutput(error=RequestFailed("NaN"))] * len(names)).run("a")


def test_engine_gives_up_after_failed_passes_in_a_row() -> None:
    steps = Steps(breaking("bad"))
    for _ in range(2 * MAX_FAILED_PASSES):
        steps.run("bad")
        if len(steps.passes) % 2:
            steps.run("good")
        steps.run("good")
    for _ in range(MAX_FAILED_PASSES - 1):
        steps.run("bad")
    with pytest.raises(RuntimeError, match=f"{MAX_FAILED_PASSES} passes"):
        steps.run("bad")


def test_success_of_one_kind_of_pass_excuses_failures_of_the_other() -> None:
    failed_passes = FailedPasses()
    streams, embeddings = (Steps(breaking("bad"), failed_passes) for _ in range(2))
    for _ in range(2 * MAX_FAILED_PASSES):
        assert streams.run("good") == ["ok"]
        assert embeddings.run("bad") == ["RequestFailed"]
    with pytest.raises(RuntimeError, match=f"{MAX_FAILED_PASSES} passes"):
        for _ in range(MAX_FAILED_PASSES // 2):
            streams.run("bad")
            embeddings.run("bad")


def test_caller_errors_are_not_counted_as_faults() -> None:
    def compute(names: Sequence[str]) -> Sequence[StepOutput]:
        errors = {"nan": RequestFailed("NaN"), "asked": InvalidRequest("nothing is left")}
        return [StepOutput(error=errors.get(name)) for name in names]

    steps = Steps(compute)
    for _ in range(2 * MAX_FAILED_PASSES):
        assert steps.run("asked") == ["InvalidRequest"]
    assert steps.run("a", "nan") == ["ok", "RequestFailed"]
    assert steps.faults == {NONFINITE: 1}
