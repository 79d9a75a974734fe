"""`foreword bench gpu` as a dry run: every section's code on a CPU, kernels in Triton's interpreter."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from foreword.bench.gpu import command, process
from foreword.bench.gpu.command import MACHINE, run_jobs
from foreword.bench.gpu.config import DRY_RUN, FULL, JOBS, QUICK, SECTIONS, BenchConfig, Job
from foreword.bench.gpu.device import BenchDevice, idle_shares
from foreword.bench.gpu.engines import BenchResult, compare_outputs, eager, make_requests, open_engine
from foreword.bench.gpu.kernels import OpChecks, describe_difference, kernel_ops, record_launches
from foreword.bench.gpu.report import Report
from foreword.bench.gpu.steps import count_weights, prompt_flops
from foreword.bench.gpu.tables import MAX_CHARS, format_tables, judge, thresholds
from foreword.bench.gpu.variants import compare_variants
from foreword.bench.result_file import ResultFile
from foreword.cli.main import main
from foreword.engine import loader
from foreword.kernels.ops import Ops
from foreword.kernels.reference.backend import FastMathOps
from foreword.kernels.triton import variants
from tests.support.graph_capture_fake import GraphCapturableOps
from tests.support.triton_interpreter import IS_INTERPRETED, exact_dot

LIMIT_S = 540.0  # of the whole command
KERNEL_SECTIONS = ("start", "checks", "kernels", "variants")


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


def printed_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The first line; tables follow."""
    printed: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[0], parse_constant=pytest.fail)
    return printed


@pytest.mark.skipif(not IS_INTERPRETED, reason="kernels are compiled here: a dry run needs the interpreter")
def test_kernel_sections_run_in_the_interpreter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    faster = variants.Variant("nothing", "nothing")
    monkeypatch.setitem(variants.VARIANTS, "faster", faster)
    monkeypatch.setattr("foreword.bench.gpu.variants.VARIANTS", {"faster": faster})
    with exact_dot():
        code, report = dry_run(tmp_path / "report.json", *KERNEL_SECTIONS)
    assert (code, report["broken"], report["skipped"], report["rehearsal"]) == (0, {}, {}, True)
    checks = report["figures"]["checks"]
    assert not [name for name, figures in checks.items() if figures.get("ok") is False]
    names = {"linear int4", "linear q4_k", "linear small head", "gated small", "attention small, fp8 KV"}
    assert names <= set(checks)
    assert report["figures"]["kernels"]["linear small qkv"]["1 us"] > 0
    assert report["figures"]["kernels"]["attention planned"]["2 at 24 us"] > 0
    assert report["figures"]["start"]["cold"]["s"] > 0
    assert report["figures"]["variants"]["faster"]["ok"] is True
    printed = printed_json(capsys)
    assert set(printed["targets"].values()) == {"not measured"}


def test_engine_sections_measure_every_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "select_backend", capturable_ops)
    sections = [name for name in SECTIONS if name not in KERNEL_SECTIONS]
    code, report = dry_run(tmp_path / "report.json", *sections)
    assert (code, report["broken"], report["skipped"]) == (0, {}, {})
    figures = report["figures"]
    assert set(figures) == {"start", *sections}
    assert not [name for parts in figures.values() for name, part in parts.items() if part.get("ok") is False]
    assert figures["engines"]["graphs, 4 at once"]["compared"] > 0, "expected outputs of another process"
    assert figures["engines"]["--fast-math, negative control"]["compared"] > 0
    assert figures["steps"]["large arrivals"]["p99 ms"] >= figures["steps"]["large arrivals"]["p50 ms"] > 0
    printed = printed_json(capsys)
    assert set(printed["targets"].values()) == {"rehearsal"}, "a target that no section measures"
    assert printed["failed_checks"] == []


def stub_jobs(monkeypatch: pytest.MonkeyPatch, run: Callable[[Report, str], None]) -> None:
    """Replace the function of every job by `run`, which gets the job's section; processes stay real."""

    def job_function(job: Job) -> Callable[..., None]:
        return lambda config, report, *args: run(report, job.section)

    monkeypatch.setattr(process, "job_function", job_function)


@pytest.mark.parametrize("victim", [SECTIONS[0], SECTIONS[-1]])
def test_section_that_is_killed_costs_no_other_sections_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    def run(report: Report, section: str) -> None:
        report.measure("first", lambda: {"us": 1.0})
        if section == victim:
            print("CUDA error: an illegal memory access was encountered", file=sys.stderr)
            report.measure("second", lambda: {"us": os.kill(os.getpid(), signal.SIGKILL)})
        report.measure("second", lambda: {"us": 2.0})

    stub_jobs(monkeypatch, run)
    jobs = {job.section: job for job in JOBS}
    path = tmp_path / "report.json"
    report = Report({}, ResultFile("--out", str(path)), tmp_path)
    run_jobs(list(jobs.values()), DRY_RUN, report, process.run_job)
    findings = json.loads(path.read_text())
    assert findings["figures"] == {
        section: {"first": {"us": 1.0}} | ({} if section == victim else {"second": {"us": 2.0}})
        for section in SECTIONS
    }
    (label,) = findings["broken"]
    assert label == f"{victim}: {jobs[victim].name}"
    assert findings["broken"][label].splitlines() == [
        f"ended by SIGKILL in {victim}: second",
        "CUDA error: an illegal memory access was encountered",
    ]
    assert set(findings["processes"]) == {f"{job.section}: {job.name}" for job in jobs.values()}


def test_hanging_job_ends_with_its_stack_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(report: Report, section: str) -> None:
        report.measure(
            "part", (lambda: {"us": Event().wait()}) if section == "steps" else (lambda: {"us": 1.0})
        )

    stub_jobs(monkeypatch, run)
    monkeypatch.setattr(process, "GRACE_S", -3.2)
    report = Report({}, None, tmp_path)
    jobs = [Job("steps", "hangs", "", 4.0), Job("peers", "next", "", 60.0)]
    run_jobs(jobs, FULL, report, process.run_job)
    assert report.figures == {"peers": {"part": {"us": 1.0}}}
    assert report.broken["steps: hangs"].startswith("exit code 1 in steps: part\nTimeout")
    assert "in wait" in report.broken["steps: hangs"]


def test_lost_device_ends_the_job_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault() -> dict[str, Any]:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def run(report: Report, section: str) -> None:
        logging.getLogger("foreword.test").warning("CUDA graphs are disabled in %s", section)
        report.measure("first", fault if section == "steps" else lambda: {"us": 1.0})
        report.measure("second", lambda: {"us": 2.0})

    stub_jobs(monkeypatch, run)
    report = Report({}, None, tmp_path)
    run_jobs([Job("steps", "a", "", 60.0), Job("peers", "b", "", 60.0)], DRY_RUN, report, process.run_job)
    assert report.figures == {"peers": {"first": {"us": 1.0}, "second": {"us": 2.0}}}
    assert set(report.broken) == {"steps: first"}
    assert "the device is lost" in report.skipped["steps: a: remaining parts"]
    assert report.processes["peers: b"]["warnings"] == ["foreword.test: CUDA graphs are disabled in peers"]


def test_missing_gpu_is_reported_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of its own asks CUDA: after a call of CUDA, no process could fork others that use it."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    parent, is_available = os.getpid(), torch.cuda.is_available
    monkeypatch.setattr(torch.cuda, "is_available", lambda: os.getpid() == parent or is_available())
    assert main(["bench", "gpu"]) == 2
    output = capsys.readouterr()
    assert "no NVIDIA GPU" in output.err
    assert (len(output.err.splitlines()), output.out) == (1, "")


def test_findings_file_that_cannot_be_written_is_named_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "run_jobs", lambda *_: pytest.fail("measured"))
    path = tmp_path / "no" / "report.json"
    assert main(["bench", "gpu", "--device", "cpu", "--out", str(path)]) == 2
    assert f"--out {path}: No such file or directory" in capsys.readouterr().err


def test_unknown_section_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu", "--device", "cpu", "--only", "steps,stairs"]) == 2
    assert "stairs" in capsys.readouterr().err


def test_budgets_fit_the_time_limit() -> None:
    total = sum(job.budget_s for job in JOBS)
    assert total + process.GRACE_S + process.KILL_AFTER_S < LIMIT_S
    assert QUICK.budget_factor <= 0.5
    assert len({(job.section, job.name) for job in JOBS}) == len(JOBS)


def test_few_sections_have_the_time_of_all() -> None:
    total = sum(job.budget_s for job in JOBS)
    for sections, least in ((("checks",), 4.0), (("steps", "engines", "kernels"), 2.0), (SECTIONS, 1.0)):
        jobs = [job for job in JOBS if job.section in sections]
        factor = command._stretch_budgets(FULL, jobs).budget_factor
        assert factor >= least and factor * sum(job.budget_s for job in jobs) <= total + 1e-6


def test_unused_time_goes_to_later_jobs(tmp_path: Path) -> None:
    now, deadlines = [0.0], {}
    report = Report({}, None, tmp_path, clock=lambda: now[0])

    def run_job(job: Job, config: BenchConfig, report: Report, deadline: float) -> None:
        deadlines[job.name] = deadline
        now[0] += {"short": 1.0, "long": 41.0, "last": 1.0}[job.name]

    jobs = [Job("steps", "short", "", 20.0), Job("steps", "long", "", 20.0), Job("steps", "none", "", 2.0)]
    run_jobs([*jobs, Job("peers", "last", "", 20.0)], FULL, report, run_job)
    assert deadlines == {"short": 20.0, "long": 40.0, "last": 62.0}
    assert report.skipped == {"steps: none": "no time was left"}


def test_report_skips_late_parts_and_survives_broken_parts(tmp_path: Path) -> None:
    now, path = [0.0], tmp_path / "report.json"
    written: list[dict[str, Any]] = []

    def take(seconds: float, **figures: Any) -> Callable[[], dict[str, Any]]:
        def run() -> dict[str, Any]:
            now[0] += seconds
            written.append(json.loads(path.read_text()))
            return figures

        return run

    report = Report({"rehearsal": False}, ResultFile("--out", str(path)), clock=lambda: now[0])

    def job() -> None:
        report.measure("quick", take(1.0, us=1.0))
        report.measure("broken", lambda: {"us": 1 / 0})
        report.measure("long", take(1.0), needs_s=70.0)
        with report.guard("engine"):
            raise RuntimeError("not loaded")
        report.measure("last", take(63.5, ok=False))
        report.measure("late", take(1.0))
        raise AssertionError("ran after the job's time was over")

    report.run_section("checks", job, 65.0, "linear")
    findings = json.loads(path.read_text())
    assert [one["running"] for one in written] == ["checks: quick", "checks: last"]
    assert set(written[1]["figures"]["checks"]) == {"quick"}
    assert findings["figures"] == {"checks": {"quick": {"us": 1.0}, "last": {"ok": False}}}
    assert set(findings["skipped"]) == {"checks: long", "checks: late", "checks: linear: remaining parts"}
    assert set(findings["broken"]) == {"checks: broken", "checks: engine"}
    assert "ZeroDivisionError" in findings["broken"]["checks: broken"]
    assert report.failed_checks() == ["checks: last"]


def test_interrupt_keeps_what_is_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As JSON without nan."""

    def interrupted(jobs: list[Job], config: BenchConfig, report: Report, run_job: object) -> None:
        if MACHINE in jobs:
            return
        report.figures = {"steps": {"large decode": {"1 of bandwidth": math.nan}}}
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_jobs", interrupted)
    path = tmp_path / "report.json"
    assert main(["bench", "gpu", "--device", "cpu", "--out", str(path)]) == 130
    printed = printed_json(capsys)
    assert printed.items() > json.loads(path.read_text()).items()
    assert printed["figures"] == {"steps": {"large decode": {"1 of bandwidth": None}}}
    assert printed["skipped"] == {"remaining jobs": "interrupted"}


def test_interrupt_ends_the_running_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(report: Report, section: str) -> None:
        report.measure("first", lambda: {"us": 1.0})
        report.measure("second", lambda: {"us": Event().wait()})

    def show(line: str) -> None: ...

    def merge(report: Report, findings: Any) -> None:
        kept(report, findings)
        if findings["running"] == "steps: second":
            raise KeyboardInterrupt

    stub_jobs(monkeypatch, run)
    report, kept = Report({}, None, tmp_path, show=show), Report.merge
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Report, "merge", merge)
        run_jobs([Job("steps", "a", "", 60.0)], DRY_RUN, report, process.run_job)
    assert report.figures == {"steps": {"first": {"us": 1.0}}}
    assert not multiprocessing.active_children()


def test_findings_that_cannot_be_written_do_not_end_the_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "removed"
    folder.mkdir()
    report = Report({}, ResultFile("--out", str(folder / "report.json")))
    shutil.rmtree(folder)
    report.run_section("checks", lambda: report.measure("part", lambda: {"us": 1.0}), report.clock() + 60)
    assert report.figures == {"checks": {"part": {"us": 1.0}}} and not report.broken
    assert report.write() == 1
    assert "report.json was not written: FileNotFoundError" in capsys.readouterr().err


@pytest.mark.full
def test_parent_imports_no_optional_package_and_no_variant() -> None:
    code = """if True:
        import sys
        sys.modules.update(dict.fromkeys(("rich", "llguidance", "markdown_it", "pygments"), None))
        from foreword.cli.main import main
        from foreword.kernels.triton.variants import enabled_variants
        code = main(["bench", "gpu", "--device", "cpu", "--only", "start"])
        assert enabled_variants.cache_info().currsize == 0, "a variant is read at import"
        sys.exit(code)"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[0])["broken"] == {}


def test_tables_fit_the_end_of_the_output() -> None:
    """A part keeps a line, clipped; verdicts and failures come last."""
    report = Report({})
    parts = {f"part {number}": {f"figure {n}": n / 7 for n in range(40)} for number in range(20)}
    report.figures = dict.fromkeys(("start", "checks", "steps", "kernels"), parts)
    report.broken = {"engines: graphs": "ended by SIGSEGV in engines: eager\nlast line of stderr"}
    report.processes = {"engines: graphs": {"seconds": 3.0, "warnings": ["CUDA graphs are disabled"]}}
    text = format_tables(report, FULL)
    assert len(text) <= MAX_CHARS
    assert text.count("part 19: figure 0 0, figure 1 0.1429") == 4
    end = text[text.index("== processes") :]
    for line in (
        "CUDA graphs are disabled",
        "ended by SIGSEGV",
        "last line of stderr",
        "none of those that ran",
    ):
        assert line in end


def test_variants_are_compared_with_the_defaults_around_them() -> None:
    report = Report({})
    report.figures = {
        "variants": {
            "run 0 default linear": {"1 us": 10.0, "1 bits": "a"},
            "run 1 pdl linear": {"1 us": 6.0, "1 bits": "a"},
            "run 2 default linear": {"1 us": 14.0, "1 bits": "a"},
            "run 3 wide linear": {"1 us": 14.0, "1 bits": "b"},
            "run 4 default linear": {"1 us": 14.0, "1 bits": "a"},
            "run 5 lost linear": {"1 us": 14.0, "1 bits": "a"},
        }
    }
    compare_variants(report)
    parts = report.figures["variants"]
    assert parts["pdl"] == {
        "ok": True,
        "differ": [],
        "geometric mean": pytest.approx(0.5),
        "default again": pytest.approx(1.4),
        "linear, 1": pytest.approx(0.5),
    }
    assert (parts["wide"]["ok"], parts["wide"]["differ"]) == (False, ["linear, 1"])
    assert "lost" not in parts
    assert report.failed_checks() == ["variants: wide"]


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
    for start in ("1 rows from 0: ", "2 rows from 0: "):
        (line,) = [line for line in found["differ"] if line.startswith(start)]
        assert re.search(r"\d+ of \d+ values, first \[\d+, \d+\]: \S+, not \S+; at most \d+ ulp", line)


def test_difference_names_the_first_value_and_the_largest_distance() -> None:
    values = torch.tensor([[1.0, -0.0], [2.0, -4.0]], dtype=torch.bfloat16)
    others = torch.tensor([[1.0, 0.0], [2.0 + 2 / 64, -4.0]], dtype=torch.bfloat16)
    assert describe_difference(values, others) == ("2 of 4 values, first [0, 1]: -0, not 0; at most 2 ulp")


@pytest.mark.skipif(not IS_INTERPRETED, reason="launches in the interpreter")
def test_recorded_launches_name_kernels_with_their_grid_and_tiles() -> None:
    ops = kernel_ops("cpu")
    weight = ops.pack_linear([torch.ones(64, 32)], "float32")
    with record_launches() as launches:
        ops.linear(torch.ones(3, 32), weight, None)
    assert len(launches) == 1
    assert re.match(r"gemm_kernel\(\d+, \d+\) .*BM=\d+ BN=\d+ .*num_warps=\d", launches[0])


def test_engine_checks_find_bits_that_depend_on_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "select_backend", lambda *options, **named: RowDependentOps())
    report = Report({}, None, tmp_path)
    report.run_section("engines", lambda: eager(DRY_RUN, report), report.clock() + 600)
    assert report.get("engines", "one at a time", "ok") is True
    assert "engines: 2 at once, eager" in report.failed_checks()


def test_engine_without_graphs_fails_its_part_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report({})
    monkeypatch.setattr(BenchConfig, "is_dry_run", False)
    with open_engine(DRY_RUN, report, "engine", "small"):
        pass
    assert report.figures[""]["engine"]["graphs"] == 0 and report.failed_checks() == [": engine"]


def test_closed_engine_frees_its_memory() -> None:
    with open_engine(DRY_RUN, Report({}), "engine", "small") as engine:
        engine.run(make_requests(1, 4, 3, DRY_RUN.small.vocab))
        client = weakref.ref(engine.client)
        runner = weakref.ref(engine.client._engine.model_runner)
    assert engine is not None and client() is None and runner() is None


def test_failed_run_leaves_no_requests_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one failed part would break all parts after it."""
    requests = make_requests(2, 4, 6, DRY_RUN.small.vocab)
    with open_engine(DRY_RUN, Report({}), "engine", "small") as engine:
        expected = engine.run(requests).tokens
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no profiler"):
            patch.setattr(BenchDevice, "idle", Mock(side_effect=RuntimeError("no profiler")))
            engine.idle(requests, 1)
        assert engine.run(requests).tokens == expected


def test_shares_count_the_weights_and_operations_of_the_shape() -> None:
    """Llama-3.1-8B reads 7.5 billion weights a token; a prompt costs two operations for each and token."""
    assert count_weights(FULL.large) == 7_504_658_432
    length = 1000
    attention = 4 * 32 * 32 * 128 * length * length / 2
    assert prompt_flops(FULL.large, length) == pytest.approx(2 * 6_979_321_856 * length + attention, rel=1e-3)
