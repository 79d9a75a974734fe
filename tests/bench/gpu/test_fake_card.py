"""Jobs of `foreword bench gpu` on a fake GPU: what only a card runs, but for time, profiler and peers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foreword.bench.gpu.config import DRY_RUN, JOBS, Job
from foreword.bench.gpu.device import BenchDevice, IdleShare
from foreword.bench.gpu.process import job_function
from foreword.bench.gpu.report import Report
from foreword.engine import memory_profiler
from foreword.kernels import gpu
from foreword.kernels.triton.backend import TritonOps
from tests.support.device import DEVICE
from tests.support.fake_cuda import FakeCuda
from tests.support.triton_interpreter import IS_INTERPRETED, exact_dot

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(DEVICE != "cpu" or not IS_INTERPRETED, reason="needs the interpreter, and no GPU"),
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning"),
]

CARD = replace(
    DRY_RUN,
    device="cuda",
    large=replace(DRY_RUN.small, name="tiny-large"),
    streams=(1, 2),
    fast_streams=(2,),
    batch_sizes=(2,),
    num_requests=2,
    check_tokens=2,
    long_contexts=((2, 18),),
    prompt=3,
    answer=3,
    replayed=3,
    arrivals=1,
    arrival_prompt=3,
    arrival_streams=1,
    long_prompt=18,
)
# One job for each way to open an engine or to launch kernels.
JOB_NAMES = {
    "start": ("machine", "cold"),
    "checks": ("experts", "attention", "sampling", "at load"),
    "steps": ("large", "contexts", "int8", "draft model"),
    "engines": ("eager", "graphs", "drafts"),
    "kernels": ("attention", "rows"),
    "speculation": ("paid",),
}
CALLS = [job for job in JOBS if job.name in JOB_NAMES.get(job.section, ())]


def take_time(device: BenchDevice, run: Callable[[], object], times: int = 1) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def idle(device: BenchDevice, run: Callable[[], object]) -> IdleShare:
    run()
    return IdleShare(1.0, 1, 0.0, 0.0)


@pytest.fixture(autouse=True)
def small_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(memory_profiler, "MIN_GRAPH_ROWS", 2)
    monkeypatch.setattr("foreword.bench.gpu.steps.ARRIVAL_STEPS", 2)
    monkeypatch.setattr("foreword.bench.gpu.steps.CONTEXT_ANSWER", 3)
    monkeypatch.setattr("foreword.bench.gpu.start.query_nvidia_smi", lambda *fields: {})
    monkeypatch.setattr("foreword.bench.gpu.device.MIN_TIMED_S", 0.0)
    monkeypatch.setattr(BenchDevice, "time", take_time)
    monkeypatch.setattr(BenchDevice, "idle", idle)
    monkeypatch.setattr(gpu, "_skips_trial", True)
    monkeypatch.setattr(TritonOps, "precompile", lambda *_: None)  # runs all that is captured later
    with exact_dot():
        yield


@pytest.mark.parametrize("job", CALLS, ids=lambda job: f"{job.section}: {job.name}")
def test_job_runs_on_a_fake_card(tmp_path: Path, job: Job) -> None:
    report = Report({}, None, tmp_path)
    with FakeCuda() as card:
        run: Any = job_function(job)
        report.run_section(job.section, lambda: run(CARD, report, *job.args), report.clock() + 600, job.name)
    assert (report.broken, report.skipped, card.refused) == ({}, {}, [])
    assert report.figures[job.section]
    loads = [
        figures for parts in report.figures.values() for figures in parts.values() if "backend" in figures
    ]
    assert all(figures["backend"].startswith("triton") for figures in loads)
    assert report.failed_checks() == []
