"""`foreword bench gpu`: checks and measures an NVIDIA GPU within nine minutes.

Weights are random, in the shapes of Llama-3.1-8B and Qwen2.5-0.5B; nothing is downloaded. Each job has a
process of its own and a budget in seconds; its unused time goes to the next, and parts that do not fit are
listed as skipped. `--out` is written during the run, and Ctrl-C shows what is complete. `--device cpu` is a
dry run on tiny shapes, in Triton's interpreter. Exit code 1: a check failed or a part broke.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from foreword.bench.gpu.config import DRY_RUN, FULL, JOBS, QUICK, SECTIONS, BenchConfig, Job
from foreword.bench.gpu.report import Report
from foreword.bench.result_file import EXIT_INTERRUPTED, ResultFile
from foreword.errors import ConfigError

RunJob = Callable[[Job, BenchConfig, Report, float], None]

MACHINE, *_ = JOBS  # describes the machine in every run
MAX_STRETCH = 4.0  # of budgets, where --only leaves sections out
MIN_JOB_S = 3.0  # with less time left, a job is not started


def run(args: argparse.Namespace) -> int:
    sections = _parse_sections(args.only)
    config = _select_config(args)
    file = ResultFile("--out", args.out) if args.out else None
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy starts threads, which a fork does not copy
    # TRITON_INTERPRET is read where a kernel is defined. Forked jobs share what is imported here, which must
    # not call CUDA.
    process, tables, variants = (
        importlib.import_module(f"foreword.bench.gpu.{name}") for name in ("process", "tables", "variants")
    )
    is_complete = True
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="foreword-bench-")))
        report = Report(
            {"rehearsal": config.is_dry_run, "quick": args.quick}, folder=folder, show=_print_progress
        )
        if file is not None:
            stack.callback(file.discard)
        try:
            run_jobs([MACHINE], config, report, process.run_job)
            unavailable = report.get(MACHINE.section, MACHINE.name, "unavailable")
            if unavailable is not None:
                raise ConfigError(unavailable, "device")
            report.file = file
            jobs = [job for job in variants.with_variants(JOBS) if job.section in sections]
            for job in jobs:
                process.job_function(job)
            if find_spec("triton") is not None:
                importlib.import_module("foreword.kernels.triton.backend")
            jobs = [job for job in jobs if job is not MACHINE]
            run_jobs(jobs, _stretch_budgets(config, jobs), report, process.run_job)
            variants.compare_variants(report)
        except KeyboardInterrupt:
            is_complete = False
            report.skipped["remaining jobs"] = "interrupted"
        code = report.write()
    tables.show(report, config)
    if not is_complete:
        return EXIT_INTERRUPTED
    return 1 if report.broken or (report.failed_checks() and not config.is_dry_run) else code


def run_jobs(jobs: Sequence[Job], config: BenchConfig, report: Report, run_job: RunJob) -> None:
    """Run jobs in order; a job may use the time that those before it left."""
    deadline = report.clock()
    for job in jobs:
        deadline += job.budget_s * config.budget_factor
        if deadline - report.clock() < MIN_JOB_S:
            report.skipped[f"{job.section}: {job.name}"] = "no time was left"
        else:
            run_job(job, config, report, deadline)


def _stretch_budgets(config: BenchConfig, jobs: Sequence[Job]) -> BenchConfig:
    """Give a few sections the time of all; not too much, since a job that hangs takes all of its own."""
    times = sum(job.budget_s for job in JOBS) / max(sum(job.budget_s for job in jobs), 1.0)
    return replace(config, budget_factor=config.budget_factor * min(times, MAX_STRETCH))


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr)


def _select_config(args: argparse.Namespace) -> BenchConfig:
    if args.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
        return DRY_RUN
    return QUICK if args.quick else FULL


def _parse_sections(text: str | None) -> tuple[str, ...]:
    """The names of --only in the order of SECTIONS. Raises ConfigError."""
    names = [name.strip() for name in text.split(",")] if text else list(SECTIONS)
    for name in names:
        if name not in SECTIONS:
            raise ConfigError(f"--only: unknown {name!r}; known: {', '.join(SECTIONS)}")
    return tuple(name for name in SECTIONS if name in names)
