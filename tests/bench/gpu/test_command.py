"""`foreword bench gpu` as a dry run: every section's code on a CPU, kernels in Triton's interpreter."""

from __future__ import annotations

import json
import math
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foreword.bench.gpu import command
from foreword.bench.gpu.command import judge, run_sections, thresholds
from foreword.bench.gpu.config import DRY_RUN, FULL, QUICK, SECTIONS, BenchConfig
from foreword.bench.gpu.device import idle_shares
from foreword.bench.gpu.engines import BenchResult, compare_outputs, engines, make_requests, open_engine
from foreword.bench.gpu.kernels import OpChecks
from foreword.bench.gpu.report import Report
from foreword.bench.gpu.steps import count_weights, prompt_flops
from foreword.bench.session import ResultFile
from foreword.cli.main import main
from foreword.engine import loader
from foreword.kernels.ops import Ops
from foreword.kernels.reference.backend import FastMathOps
from tests.support.graph_capture_fake import GraphCapturableOps
from tests.support.triton_interpreter import IS_INTERPRETED, exact_dot

LIMIT_S = 480.0  # of the whole command
KERNEL_SECTIONS = ("ceilings", "checks", "kernels")


def dry_run(path: Path, *sections: str) -> tuple[int, dict[str, Any]]:
    code = main(["bench", "gpu", "--device", "cpu", "--only", ",".join(sections), "--out", str(path)])
    return code, json.loads(path.read_text(), parse_constant=pytest.fail)


def capturable_ops(device: str, fast_math: bool = False, *options: Any, **named: Any) -> Ops:
    """A backend that captures graphs and supports overlap, as on a GPU."""
    return FastMathOps() if fast_math else GraphCapturableOps()


class RowDependentOps(GraphCapturableOps):
    """A linear layer whose bits depend on the number of rows."""

    def linear(self, x: torch.Tensor, *options: Any) -> torch.Tensor:
        y = super().linear(x, *options)
        return y + y.abs() * 1e-6 * len(x)


@pytest.mark.skipif(not IS_INTERPRETED, reason="kernels are compiled here: a dry run needs the interpreter")
def test_kernel_sections_run_in_the_interpreter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with exact_dot():
        code, report = dry_run(tmp_path / "report.json", *KERNEL_SECTIONS)
    assert (code, report["broken"], report["skipped"], report["rehearsal"]) == (0, {}, {}, True)
    checks = report["figures"]["checks"]
    assert not [name for name, figures in checks.items() if figures.get("ok") is False]
    names = {"linear int4", "linear q4_k", "linear small head", "gated small", "attention small, fp8 KV"}
    assert names <= set(checks)
    assert report["figures"]["kernels"]["linear small qkv"]["1 us"] > 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1], parse_constant=pytest.fail)
    assert set(last["targets"].values()) == {"not measured"}


def test_engine_sections_measure_every_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "select_backend", capturable_ops)
    sections = [name for name in SECTIONS if name not in KERNEL_SECTIONS]
    code, report = dry_run(tmp_path / "report.json", *sections)
    assert (code, report["broken"], report["skipped"]) == (0, {}, {})
    figures = report["figures"]
    assert set(figures) == set(sections)
    assert not [name for parts in figures.values() for name, part in parts.items() if part.get("ok") is False]
    assert figures["engines"]["--fast-math, negative control"]["compared"] > 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1], parse_constant=pytest.fail)
    assert set(last["targets"].values()) == {"rehearsal"}, "a target that no section measures"
    assert last["failed_checks"] == []


def test_missing_gpu_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main(["bench", "gpu"]) == 2
    output = capsys.readouterr()
    assert "no NVIDIA GPU" in output.err
    assert (len(output.err.splitlines()), output.out) == (1, "")


def test_findings_file_that_cannot_be_written_is_named_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "run_sections", lambda *_: pytest.fail("measured"))
    path = tmp_path / "no" / "report.json"
    assert main(["bench", "gpu", "--device", "cpu", "--out", str(path)]) == 2
    assert f"--out {path}: No such file or directory" in capsys.readouterr().err


def test_unknown_section_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu", "--device", "cpu", "--only", "steps,stairs"]) == 2
    assert "stairs" in capsys.readouterr().err


def test_budgets_fit_the_time_limit() -> None:
    assert sum(FULL.budgets.values()) < LIMIT_S
    assert sum(QUICK.budgets.values()) <= LIMIT_S / 2
    assert set(FULL.budgets) == set(SECTIONS)


def test_report_skips_late_parts_and_survives_broken_parts(tmp_path: Path) -> None:
    now, path = [0.0], tmp_path / "report.json"
    written: list[set[str]] = []

    def take(seconds: float, **figures: Any) -> Callable[[], dict[str, Any]]:
        def run() -> dict[str, Any]:
            now[0] += seconds
            return figures

        return run

    def first(config: BenchConfig, report: Report) -> None:
        report.measure("quick", take(1.0, us=1.0))
        report.measure("broken", lambda: {"us": 1 / 0})
        written.append(set(json.loads(path.read_text())["figures"]["checks"]))
        report.measure("long", take(1.0), needs_s=70.0)
        with report.guard("engine"):
            raise RuntimeError("not loaded")
        report.measure("last", take(63.5, ok=False))
        report.measure("late", take(1.0))
        raise AssertionError("ran after the section's time was over")

    def second(config: BenchConfig, report: Report) -> None:
        raise RuntimeError("not loaded")

    def third(config: BenchConfig, report: Report) -> None:
        report.measure("rest", take(1.0, us=2.0), needs_s=120.0)

    report = Report({"rehearsal": False}, ResultFile("--out", str(path)), clock=lambda: now[0])
    run_sections({"checks": first, "engines": second, "kernels": third}, FULL, report)
    findings = json.loads(path.read_text())
    assert written == [{"quick"}]
    assert findings["figures"] == {
        "checks": {"quick": {"us": 1.0}, "last": {"ok": False}},
        "kernels": {"rest": {"us": 2.0}},
    }
    assert set(findings["skipped"]) == {"checks: long", "checks: late", "checks: remaining parts"}
    assert set(findings["broken"]) == {"checks: broken", "checks: engine", "engines"}
    assert "ZeroDivisionError" in findings["broken"]["checks: broken"]
    assert report.failed_checks() == ["checks: last"]


def test_interrupt_keeps_what_is_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As JSON without nan."""

    def interrupted(sections: object, config: BenchConfig, report: Report) -> None:
        report.figures = {"steps": {"large decode": {"1 of bandwidth": math.nan}}}
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_sections", interrupted)
    path = tmp_path / "report.json"
    assert main(["bench", "gpu", "--device", "cpu", "--out", str(path)]) == 130
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed.items() > json.loads(path.read_text()).items()
    assert printed["figures"] == {"steps": {"large decode": {"1 of bandwidth": None}}}
    assert printed["skipped"] == {"remaining parts": "interrupted"}


def test_findings_that_cannot_be_written_do_not_end_the_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "removed"
    folder.mkdir()
    report = Report({}, ResultFile("--out", str(folder / "report.json")))
    shutil.rmtree(folder)
    run_sections({"checks": lambda config, report: report.measure("part", lambda: {"us": 1.0})}, FULL, report)
    assert report.figures == {"checks": {"part": {"us": 1.0}}} and not report.broken
    assert report.write() == 1
    assert "report.json was not written: FileNotFoundError" in capsys.readouterr().err


def test_targets_are_met_missed_or_not_measured() -> None:
    report = Report({})
    report.figures = {
        "steps": {"large decode": {"1 of bandwidth": 0.9, "8 step over 1": 1.06, "64 step over 1": math.nan}}
    }
    verdicts = {row.label: row.verdict for row in judge(report, FULL)}
    assert verdicts["llama-3.1-8b, 1 stream: share of bandwidth"] == "met"
    assert verdicts["llama-3.1-8b: step of 8 rows over 1"] == "missed"
    assert verdicts["llama-3.1-8b: step of 64 rows over 1"] == "not measured"
    assert len(verdicts) == len(thresholds(FULL))


def test_idle_shares_are_gaps_between_intervals() -> None:
    idle = idle_shares([(10.0, 20.0), (0.0, 10.0), (21.0, 30.0), (12.0, 15.0), (40.0, 50.0)])
    assert idle is not None
    assert (idle.span_us, idle.kernels) == (50.0, 5)
    assert (idle.between, idle.all) == (pytest.approx(10 / 50), pytest.approx(11 / 50))
    assert idle_shares([]) is None


def test_compare_outputs_finds_tokens_and_bits_that_differ() -> None:
    expected: dict[int, tuple[list[int], list[int]]] = {}
    assert compare_outputs(expected, BenchResult([[1, 2], [3]], [[7, 8], [9]]))["compared"] == 0
    found = compare_outputs(expected, BenchResult([[1, 2], [3], [4]], [[7, 9], [9], [1]]))
    assert (found["ok"], found["tokens_differ"], found["bits_differ"]) == (False, [], [0])
    assert found["compared"] == 2
    assert compare_outputs(expected, BenchResult([[1, 3]], [[7, 8]]))["tokens_differ"] == [0]


def test_checks_list_rows_that_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreword.bench.gpu.kernels.kernel_ops", lambda device: RowDependentOps())
    found = OpChecks(DRY_RUN).linear(DRY_RUN.dtype, DRY_RUN.small.matrices[0])
    assert found["ok"] is False
    assert {"1 rows from 0", "2 rows from 0"} <= set(found["differ"])


def test_engine_checks_find_bits_that_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "select_backend", lambda *options, **named: RowDependentOps())
    report = Report({})
    report.run_section("engines", lambda: engines(DRY_RUN, report), report.clock() + 600)
    assert report.get("engines", "one at a time", "ok") is True
    assert "engines: 2 at once, eager" in report.failed_checks()


def test_closed_engine_frees_its_memory() -> None:
    with open_engine(DRY_RUN, "small") as engine:
        engine.run(make_requests(1, 4, 3, DRY_RUN.small.vocab))
        client = weakref.ref(engine.client)
        runner = weakref.ref(engine.client._engine.model_runner)
    assert engine is not None and client() is None and runner() is None


def test_shares_count_the_weights_and_operations_of_the_shape() -> None:
    """Llama-3.1-8B reads 7.5 billion weights a token; a prompt costs two operations for each and token."""
    assert count_weights(FULL.large) == 7_504_658_432
    length = 1000
    attention = 4 * 32 * 32 * 128 * length * length / 2
    assert prompt_flops(FULL.large, length) == pytest.approx(2 * 6_979_321_856 * length + attention, rel=1e-3)


def test_time_limit_is_set_and_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    timer = command.faulthandler
    monkeypatch.setattr(timer, "dump_traceback_later", lambda seconds, **options: calls.append(seconds))
    monkeypatch.setattr(timer, "cancel_dump_traceback_later", lambda: calls.append("cancelled"))
    assert main(["bench", "gpu", "--device", "cpu", "--only", "ceilings"]) == 0
    assert calls == [DRY_RUN.budgets["ceilings"] + command.GRACE_S, "cancelled"]
