"""`foreword bench gpu`: checks, measures and writes down what a machine with an NVIDIA GPU does, within eight minutes.

Sections, each with a budget of seconds; what one leaves is its successors', and parts that no longer fit are listed as skipped:

ceilings     what the device allows: copies, products, launches (bench_gpu_ceilings)
checks       bits of every kernel, and errors against the reference (bench_gpu_checks)
engines      equality of whole engines, under every setting (bench_gpu_engines)
kernels      speed of every kernel as shares of the ceilings (bench_gpu_kernels)
steps        tokens a second, idle time, --fast-math, drafters on the host (bench_gpu_steps)
speculation  at rates of acceptance that are set (bench_gpu_speculation)
peers        transformers beside it (bench_gpu_peers)

Weights are random, of the shapes of Llama-3.1-8B and Qwen2.5-0.5B; nothing is downloaded. `--out` is written after every part.
With `--device cpu` the same code runs on tiny shapes and on Triton's interpreter, where Triton is installed: a rehearsal,
whose figures mean nothing. Exit code 1: a check failed, or a part broke.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foreword.bench.common import print_json, print_table
from foreword.bench.gpu.baselines import Baselines
from foreword.bench.gpu.checks import OpChecks
from foreword.bench.gpu.config import DRY_RUN, FULL, QUICK, SECTIONS, BenchConfig
from foreword.bench.gpu.device import BenchDevice
from foreword.bench.gpu.engines import EngineFactory
from foreword.bench.gpu.exactness import ExactnessChecks
from foreword.bench.gpu.kernels import KernelTimings
from foreword.bench.gpu.report import BenchSection, Report, run_sections
from foreword.bench.gpu.roofline import Roofline
from foreword.bench.gpu.speculation import SpeculationTimings
from foreword.bench.gpu.steps import StepTimings
from foreword.bench.gpu.targets import judge
from foreword.config.hardware import probe_hardware
from foreword.errors import ConfigError

__all__ = ["run"]

GRACE_S = 60.0  # beyond all budgets: then the run is taken to hang, and ends with what was written


def run(args: argparse.Namespace) -> int:
    names = _sections(args.only)
    scale = _scale(args)
    findings = Report(
        {"rehearsal": scale.is_dry_run, "quick": args.quick}, Path(args.out) if args.out else None
    )
    with (
        tempfile.TemporaryDirectory(prefix="foreword-bench-") as folder,
        _watched(sum(scale.budgets[name] for name in names)),
    ):
        run_sections(_made(scale, Path(folder), names), findings)
    findings.write()
    _show(findings, scale)
    return 1 if findings.broken or (findings.failed_checks() and not scale.is_dry_run) else 0


def _scale(args: argparse.Namespace) -> BenchConfig:
    """Raises ConfigError where there is no GPU."""
    if args.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read where a kernel is defined, which is later
        return DRY_RUN
    probe_hardware("cuda")
    return QUICK if args.quick else FULL


def _sections(text: str | None) -> tuple[str, ...]:
    """In their own order. Raises ConfigError."""
    asked = [name.strip() for name in text.split(",")] if text else list(SECTIONS)
    for name in asked:
        if name not in SECTIONS:
            raise ConfigError(f"--only: unknown {name!r}; known: {', '.join(SECTIONS)}")
    return tuple(name for name in SECTIONS if name in asked)


def _made(scale: BenchConfig, folder: Path, names: tuple[str, ...]) -> list[BenchSection]:
    """Nothing is loaded before its section begins."""
    device = BenchDevice(scale.device)
    ceilings, yard = Roofline(scale, device), EngineFactory(scale, device, folder)
    parts: dict[str, Any] = {
        "ceilings": lambda: ceilings.parts(),
        "checks": lambda: OpChecks(scale).parts(),
        "engines": lambda: ExactnessChecks(yard).parts(),
        "kernels": lambda: KernelTimings(scale, device, ceilings).parts(),
        "steps": lambda: StepTimings(yard, ceilings).parts(),
        "speculation": lambda: SpeculationTimings(yard).parts(),
        "peers": lambda: Baselines(yard).parts(),
    }
    return [BenchSection(name, parts[name], scale.budgets[name]) for name in names]


@contextmanager
def _watched(budget_s: float) -> Iterator[None]:
    """A kernel that hangs cannot be interrupted: the process tells where it stood, and ends."""
    faulthandler.dump_traceback_later(budget_s + GRACE_S, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _show(findings: Report, scale: BenchConfig) -> None:
    for section, parts in findings.figures.items():
        rows = [
            (part, name, _text(value)) for part, figures in parts.items() for name, value in figures.items()
        ]
        print_table(
            section + (" (rehearsal: these are no figures of a GPU)" if scale.is_dry_run else ""),
            ("part", "figure", "value"),
            rows,
        )
    left = [(name, reason) for name, reason in findings.skipped.items()]
    left += [(name, told.splitlines()[-1]) for name, told in findings.broken.items()]
    if left:
        print_table("left out, or broken", ("part", "reason"), left)
    failed = findings.failed_checks()
    print_table(
        "checks that failed", ("part",), [(name,) for name in failed] or [("none of those that ran",)]
    )
    judged = judge(findings, scale)
    table = [(row.what, row.bound, row.measured, row.verdict) for row in judged]
    print_table("targets", ("figure", "target", "measured", "verdict"), table)
    targets = {row.what: row.verdict for row in judged}
    print_json({**findings.as_json(), "failed_checks": failed, "targets": targets})


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
