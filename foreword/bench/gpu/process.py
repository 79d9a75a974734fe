"""A job of `foreword bench gpu` in a process of its own, so that an error of the device costs no other job.

The parent never calls CUDA: it forks, merges what the job has written so far, and names how the job ended.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from foreword.bench.gpu.config import BenchConfig, Job
from foreword.bench.gpu.device import BenchDevice, CompileCounter, query_nvidia_smi
from foreword.bench.gpu.report import Report, WarningLog
from foreword.bench.result_file import ResultFile
from foreword.kernels.gpu import is_device_lost, skip_trial

GRACE_S = 8.0  # beyond a job's deadline, after which it prints its stacks and exits
KILL_AFTER_S = 3.0  # after that, for a process that does not exit
POLL_S = 0.5  # between reads of a running job's findings
STDERR_LINES = 12  # of a process that failed, kept in the findings
MAX_LINE_CHARS = 200
STACK_DUMPS = ("Timeout (", "Fatal Python error")  # of faulthandler; the last call comes first
STARTS = "start"  # the section whose engines start as a server does, after a trial of bits


def job_function(job: Job) -> Any:
    module, _, name = job.function.partition(":")
    return getattr(importlib.import_module(f"foreword.bench.gpu.{module}"), name)


def run_job(job: Job, config: BenchConfig, report: Report, deadline: float) -> None:
    """Run a job until `deadline`, and merge its findings into `report` while it runs and at its end."""
    label = f"{job.section}: {job.name}"
    path, log = (report.folder / f"{len(report.processes)}.{suffix}" for suffix in ("json", "log"))
    report.processes[label] = {}
    context: Any = multiprocessing.get_context("fork")  # takes no time: everything is imported
    process = context.Process(
        target=_main, args=(job, config, report.folder, path, log, deadline), name=label
    )
    started, merged_at = report.clock(), 0.0
    process.start()
    try:
        limit = deadline + GRACE_S + KILL_AFTER_S
        while process.is_alive() and report.clock() < limit:
            process.join(POLL_S)
            merged_at = _merge(report, path, merged_at)
    finally:
        if process.is_alive():
            process.kill()
        process.join(KILL_AFTER_S)
        _merge(report, path, 0.0)  # two writes may have the same time
        report.processes[label]["seconds"] = report.clock() - started
        if process.exitcode != 0:
            report.broken[label] = _describe_end(process.exitcode, report.running, log)
            report.show(f"{label}: {report.broken[label].splitlines()[0]}")
        report.running = ""
        report.write()


def _merge(report: Report, path: Path, merged_at: float) -> float:
    """Merge the findings at `path` if they are newer than `merged_at`; returns their time."""
    try:
        changed_at = path.stat().st_mtime
        if changed_at > merged_at:
            findings = json.loads(path.read_text(encoding="utf-8"))
            report.merge(findings)
            report.running = findings["running"]
            report.write()
    except (OSError, ValueError):  # nothing yet
        return merged_at
    return changed_at


def _describe_end(code: int | None, running: str, log: Path) -> str:
    """How a process ended, in which part, and the last lines of its stderr or the first of a dumped stack."""
    if code is None:
        end = "does not end, even when killed"
    else:
        end = f"exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    kept = [line[:MAX_LINE_CHARS] for line in lines if line.strip()]
    dumps = [place for place, line in enumerate(kept) if line.startswith(STACK_DUMPS)]
    kept = kept[dumps[0] :][:STDERR_LINES] if dumps else kept[-STDERR_LINES:]
    return "\n".join([f"{end} in {running or 'no part'}", *kept])


def _main(job: Job, config: BenchConfig, folder: Path, path: Path, log: Path, deadline: float) -> None:
    """The process of a job; its output goes to the file `log`, and progress to the parent's stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches this process, too; the parent ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    console = os.fdopen(os.dup(2), "w", buffering=1)
    output = log.open("w", buffering=1, encoding="utf-8")
    for fd in (1, 2):
        os.dup2(output.fileno(), fd)
    sys.stdout = sys.stderr = output
    faulthandler.enable(output)
    # A hanging kernel cannot be interrupted: print every stack and exit.
    limit_s = max(deadline - time.perf_counter(), 0.0) + GRACE_S
    faulthandler.dump_traceback_later(limit_s, exit=True, file=output)
    if job.section != STARTS:
        skip_trial()
    warnings, counter = WarningLog(), CompileCounter()
    logging.getLogger().addHandler(warnings)
    report = Report(
        {},
        ResultFile("findings", str(path)),
        folder,
        is_fatal=is_device_lost,
        show=lambda line: print(line, file=console),
    )
    facts: dict[str, Any] = {"warnings": warnings.lines}
    report.processes[f"{job.section}: {job.name}"] = facts
    with counter:
        function = job_function(job)
        report.run_section(job.section, lambda: function(config, report, *job.args), deadline, job.name)
    faulthandler.cancel_dump_traceback_later()
    device = BenchDevice(config.device)
    facts |= {**counter.facts(), "peak_gib": device.peak_gib()}
    if device.cuda:
        facts |= query_nvidia_smi("clocks.sm", "temperature.gpu", "power.draw")
    report.write()
