"""`foreword bench gpu` rehearsed: every section's code on a CPU, kernels in Triton's interpreter. No times are asserted."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foreword.bench.gpu import command as bench_gpu
from foreword.bench.gpu.checks import OpChecks
from foreword.bench.gpu.config import DRY_RUN, FULL, QUICK, SECTIONS
from foreword.bench.gpu.device import BenchDevice, idle_shares
from foreword.bench.gpu.engines import BenchResult, EngineFactory, make_requests
from foreword.bench.gpu.exactness import ExactnessChecks, ExpectedOutputs, make_population
from foreword.bench.gpu.report import BenchSection, Measurement, Report, run_sections
from foreword.bench.gpu.steps import count_weight_values, prompt_flops
from foreword.bench.gpu.targets import judge, make_thresholds
from foreword.cli.main import main
from foreword.engine import loader as load
from foreword.kernels.ops import Ops
from foreword.kernels.reference.backend import FastMathOps
from tests.support.graph_capture_fake import GraphCapturableOps
from tests.support.triton_interpreter import IS_INTERPRETED, exact_dot

LIMIT_S = 480.0  # of the whole command
KERNELS = ("ceilings", "checks", "kernels")


def rehearse(path: Path, *sections: str) -> tuple[int, dict[str, Any]]:
    code = main(["bench", "gpu", "--device", "cpu", "--only", ",".join(sections), "--out", str(path)])
    return code, json.loads(path.read_text(), parse_constant=pytest.fail)


def recordable(device: str, fast_math: bool = False, *options: Any, **named: Any) -> Ops:
    """In place of the CPU's kernels: what puts passes into graphs and runs ahead of the host."""
    return FastMathOps() if fast_math else GraphCapturableOps()


@pytest.mark.skipif(not IS_INTERPRETED, reason="kernels are compiled here: there is nothing to rehearse")
def test_kernels_in_rehearsal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with exact_dot():
        code, found = rehearse(tmp_path / "found.json", *KERNELS)
    assert (code, found["broken"], found["skipped"], found["rehearsal"]) == (0, {}, {}, True)
    checks = found["figures"]["checks"]
    assert not [name for name, figures in checks.items() if figures.get("ok") is False]
    assert {
        "linear int4",
        "linear q4_k",
        "linear small head",
        "gated small",
        "attention small, fp8 KV",
        "rows small",
        "sampling",
    } <= set(checks)
    assert found["figures"]["kernels"]["linear small qkv"]["1 us"] > 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1], parse_constant=pytest.fail)
    assert set(last["targets"].values()) == {"not measured"}


def test_engines_in_rehearsal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "select_backend", recordable)
    sections = [name for name in SECTIONS if name not in KERNELS]
    code, found = rehearse(tmp_path / "found.json", *sections)
    assert (code, found["broken"], found["skipped"]) == (0, {}, {})
    figures = found["figures"]
    assert set(figures) == set(sections)
    assert not [name for parts in figures.values() for name, part in parts.items() if part.get("ok") is False]
    assert figures["engines"]["--fast-math, negative control"]["compared"] > 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1], parse_constant=pytest.fail)
    missing = [what for what, verdict in last["targets"].items() if verdict != "rehearsal"]
    assert not missing, "a target whose figure nobody measures"
    assert last["failed_checks"] == []


def test_a_machine_without_a_gpu_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert main(["bench", "gpu"]) == 2
    told = capsys.readouterr()
    assert "no NVIDIA GPU" in told.err
    assert len(told.err.splitlines()) == 1
    assert told.out == ""


def test_an_unknown_section_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu", "--device", "cpu", "--only", "steps,stairs"]) == 2
    assert "stairs" in capsys.readouterr().err


def test_all_of_it_fits_the_limit() -> None:
    assert sum(FULL.budgets.values()) < LIMIT_S
    assert sum(QUICK.budgets.values()) <= LIMIT_S / 2
    assert set(FULL.budgets) == set(SECTIONS)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def working(self, seconds: float, **figures: Any) -> Callable[[], dict[str, Any]]:
        def run() -> dict[str, Any]:
            self.now += seconds
            return figures

        return run


def test_what_does_not_fit_is_skipped_and_what_breaks_costs_nothing_else(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "found.json"
    written: list[set[str]] = []

    def first() -> Iterator[Measurement]:
        yield Measurement("quick", clock.working(1.0, us=1.0))
        yield Measurement("broken", lambda: {"us": 1 / 0})
        written.append(set(json.loads(path.read_text())["figures"]["first"]))
        yield Measurement("long", clock.working(1.0), needs_s=20.0)
        yield Measurement("last", clock.working(8.5, ok=False))
        yield Measurement("late", clock.working(1.0))
        raise AssertionError("more was loaded when the time was over")

    def second() -> Iterator[Measurement]:
        raise RuntimeError("nothing can be loaded")
        yield

    def third() -> Iterator[Measurement]:
        yield Measurement("the rest", clock.working(1.0, us=2.0), needs_s=15.0)

    findings = Report({"rehearsal": False}, path)
    sections = [
        BenchSection("first", first, 10.0),
        BenchSection("second", second, 10.0),
        BenchSection("third", third, 10.0),
    ]
    run_sections(sections, findings, clock)
    found = json.loads(path.read_text())
    assert written == [{"quick"}]
    assert found["figures"] == {
        "first": {"quick": {"us": 1.0}, "last": {"ok": False}},
        "third": {"the rest": {"us": 2.0}},
    }
    assert set(found["skipped"]) == {"first: long", "first: late", "first: all behind that"}
    assert set(found["broken"]) == {"first: broken", "second"}
    assert "ZeroDivisionError" in found["broken"]["first: broken"]
    assert findings.failed_checks() == ["first: last"]


def test_targets_are_met_missed_or_not_measured() -> None:
    findings = Report({})
    findings.figures = {
        "steps": {"large decode": {"1 of bandwidth": 0.9, "8 step over 1": 1.06, "64 step over 1": math.nan}}
    }
    told = {row.what: row.verdict for row in judge(findings, FULL)}
    assert told["llama-3.1-8b, 1 stream: share of bandwidth"] == "met"
    assert told["llama-3.1-8b: step of 8 rows over 1"] == "missed"
    assert told["llama-3.1-8b: step of 64 rows over 1"] == "not measured"
    assert len(told) == len(make_thresholds(FULL))


def test_idle_time_is_what_lies_between_intervals() -> None:
    idle = idle_shares([(10.0, 20.0), (0.0, 10.0), (21.0, 30.0), (12.0, 15.0), (40.0, 50.0)])
    assert idle is not None
    assert (idle.span_us, idle.kernels) == (50.0, 5)
    assert idle.between == pytest.approx(10 / 50)
    assert idle.all == pytest.approx(11 / 50)
    assert idle_shares([]) is None


def test_a_token_or_a_bit_that_differs_is_told() -> None:
    told = ExpectedOutputs()
    assert told.compare(BenchResult([(1, 2), (3,)], [(7, 8), (9,)]))["compared"] == 0
    found = told.compare(BenchResult([(1, 2), (3,), (4,)], [(7, 9), (9,), (1,)]))
    assert (found["ok"], found["tokens_differ"], found["bits_differ"], found["compared"]) == (
        False,
        [],
        [0],
        2,
    )
    assert told.compare(BenchResult([(1, 3)], [(7, 8)]))["tokens_differ"] == [0]


class Crooked(GraphCapturableOps):
    """A linear layer whose bits tell how many rows there are."""

    def linear(self, x: torch.Tensor, *options: Any) -> torch.Tensor:
        y = super().linear(x, *options)
        return y + y.abs() * 1e-6 * len(x)


def test_checks_of_kernels_catch_what_depends_on_the_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreword.bench.gpu.checks.backend", lambda device: Crooked())
    (part,) = [part for part in OpChecks(DRY_RUN).parts() if part.name == "linear small qkv"]
    found = part.run()
    assert (found["ok"], found["close"]) == (False, False)
    assert {"1", "2"} <= set(found["differ"])


def test_checks_of_engines_catch_what_depends_on_the_crowd(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(load, "select_backend", lambda *options, **named: Crooked())
    engines = ExactnessChecks(EngineFactory(DRY_RUN, BenchDevice("cpu"), tmp_path))
    parts = engines.parts()
    assert next(parts).run()["ok"]
    assert not next(parts).run()["ok"]
    parts.close()  # type: ignore[attr-defined]


def test_an_engine_leaves_nothing_behind(tmp_path: Path) -> None:
    """The next one needs its memory, although parts that are over still refer to the bed."""
    with EngineFactory(DRY_RUN, BenchDevice("cpu"), tmp_path).bed("small") as bed:
        bed.answer(make_requests(1, 4, 3, DRY_RUN.small.vocab))
        client = weakref.ref(bed.client)
        engine = weakref.ref(bed.client._engine.model_runner)
    assert bed is not None and client() is None and engine() is None


def test_questions_are_the_same_in_every_run_and_fit_the_vocabulary() -> None:
    assert make_requests(3, 5, 7, 64) == make_requests(3, 5, 7, 64)
    asked = make_population(replace(DRY_RUN, num_requests=40, prompt=20))
    assert all(32 <= token < DRY_RUN.small.vocab for question in asked for token in question.prompt_ids)
    assert len({question.prompt_ids for question in asked}) == 40
    assert {question.temperature for question in asked} == {0.0, 0.7, 1.0}


def test_shares_are_of_what_the_shape_needs() -> None:
    """Llama-3.1-8B reads 7.5 billion weights a token; a prompt costs about two operations for each of them and token."""
    assert count_weight_values(FULL.large) == 7_504_658_432
    length = 1000
    attention = 4 * 32 * 32 * 128 * length * length / 2
    assert prompt_flops(FULL.large, length) == pytest.approx(2 * 6_979_321_856 * length + attention, rel=1e-3)


def test_a_run_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer is set for the budgets of what was asked for, and taken back."""
    calls: list[object] = []
    monkeypatch.setattr(
        bench_gpu.faulthandler, "dump_traceback_later", lambda seconds, **options: calls.append(seconds)
    )
    monkeypatch.setattr(
        bench_gpu.faulthandler, "cancel_dump_traceback_later", lambda: calls.append("cancelled")
    )
    assert main(["bench", "gpu", "--device", "cpu", "--only", "ceilings"]) == 0
    assert calls == [DRY_RUN.budgets["ceilings"] + bench_gpu.GRACE_S, "cancelled"]
