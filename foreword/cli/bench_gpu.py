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

from foreword.cli.bench_common import show, show_json
from foreword.cli.bench_gpu_bed import Yard
from foreword.cli.bench_gpu_ceilings import Ceilings
from foreword.cli.bench_gpu_checks import Checks
from foreword.cli.bench_gpu_device import Device
from foreword.cli.bench_gpu_engines import Engines
from foreword.cli.bench_gpu_findings import Findings, Section, run_sections
from foreword.cli.bench_gpu_kernels import Kernels
from foreword.cli.bench_gpu_peers import Peers
from foreword.cli.bench_gpu_scale import FULL, QUICK, REHEARSAL, SECTIONS, Scale
from foreword.cli.bench_gpu_speculation import Speculated
from foreword.cli.bench_gpu_steps import Steps
from foreword.cli.bench_gpu_targets import verdicts
from foreword.errors import ConfigError
from foreword.hardware import probe

__all__ = ["run"]

GRACE_S = 60.0  # beyond all budgets: then the run is taken to hang, and ends with what was written


def run(args: argparse.Namespace) -> int:
    names = _sections(args.only)
    scale = _scale(args)
    findings = Findings({"rehearsal": scale.rehearsal, "quick": args.quick}, Path(args.out) if args.out else None)
    with tempfile.TemporaryDirectory(prefix="foreword-bench-") as folder, _watched(sum(scale.budgets[name] for name in names)):
        run_sections(_made(scale, Path(folder), names), findings)
    findings.write()
    _show(findings, scale)
    return 1 if findings.broken or (findings.failed_checks() and not scale.rehearsal) else 0


def _scale(args: argparse.Namespace) -> Scale:
    """Raises ConfigError where there is no GPU."""
    if args.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read where a kernel is defined, which is later
        return REHEARSAL
    probe("cuda")
    return QUICK if args.quick else FULL


def _sections(text: str | None) -> tuple[str, ...]:
    """In their own order. Raises ConfigError."""
    asked = [name.strip() for name in text.split(",")] if text else list(SECTIONS)
    for name in asked:
        if name not in SECTIONS:
            raise ConfigError(f"--only: unknown {name!r}; known: {', '.join(SECTIONS)}")
    return tuple(name for name in SECTIONS if name in asked)


def _made(scale: Scale, folder: Path, names: tuple[str, ...]) -> list[Section]:
    """Nothing is loaded before its section begins."""
    device = Device(scale.device)
    ceilings, yard = Ceilings(scale, device), Yard(scale, device, folder)
    parts: dict[str, Any] = {
        "ceilings": lambda: ceilings.parts(),
        "checks": lambda: Checks(scale).parts(),
        "engines": lambda: Engines(yard).parts(),
        "kernels": lambda: Kernels(scale, device, ceilings).parts(),
        "steps": lambda: Steps(yard, ceilings).parts(),
        "speculation": lambda: Speculated(yard).parts(),
        "peers": lambda: Peers(yard).parts(),
    }
    return [Section(name, parts[name], scale.budgets[name]) for name in names]


@contextmanager
def _watched(budget_s: float) -> Iterator[None]:
    """A kernel that hangs cannot be interrupted: the process tells where it stood, and ends."""
    faulthandler.dump_traceback_later(budget_s + GRACE_S, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _show(findings: Findings, scale: Scale) -> None:
    for section, parts in findings.figures.items():
        rows = [(part, name, _text(value)) for part, figures in parts.items() for name, value in figures.items()]
        show(
            section + (" (rehearsal: these are no figures of a GPU)" if scale.rehearsal else ""),
            ("part", "figure", "value"),
            rows,
        )
    left = [(name, reason) for name, reason in findings.skipped.items()]
    left += [(name, told.splitlines()[-1]) for name, told in findings.broken.items()]
    if left:
        show("left out, or broken", ("part", "reason"), left)
    failed = findings.failed_checks()
    show("checks that failed", ("part",), [(name,) for name in failed] or [("none of those that ran",)])
    judged = verdicts(findings, scale)
    table = [(row.what, row.bound, row.measured, row.verdict) for row in judged]
    show("targets", ("figure", "target", "measured", "verdict"), table)
    targets = {row.what: row.verdict for row in judged}
    show_json({**findings.as_json(), "failed_checks": failed, "targets": targets})


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
