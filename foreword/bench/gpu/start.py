"""Section "start" of `foreword bench gpu`: the machine, its ceilings, compilation, time to a first token.

A first run on a machine finds Triton's disk cache empty: its cold start is that of a new server.
"""

from __future__ import annotations

import importlib
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from foreword.bench.gpu.config import BenchConfig
from foreword.bench.gpu.device import query_nvidia_smi, roofline
from foreword.bench.gpu.engines import make_requests, open_engine
from foreword.bench.gpu.kernels import (
    KernelTimings,
    check_attention,
    check_experts,
    check_linear,
    check_sampling,
)
from foreword.bench.gpu.report import Report
from foreword.errors import ConfigError
from foreword.kernels.registry import native_unavailable_reason, source_digest
from foreword.planning.hardware import probe_hardware

PACKAGES = ("torch", "triton", "numpy", "transformers", "llguidance")
COMMAND_TIMEOUT_S = 10.0


def machine(config: BenchConfig, report: Report) -> None:
    """What a reader of the findings must know; "unavailable" says why there is no GPU."""
    try:
        probe_hardware("cpu" if config.is_dry_run else "cuda")
    except ConfigError as error:
        report.record("machine", {"unavailable": str(error)})
        return
    limits = roofline(config)
    report.measure("machine", partial(_describe_machine, config))
    report.measure("copy", lambda: {"gb_s": limits.bandwidth / 1e9})
    report.measure("product", lambda: {"tflop_s": limits.product / 1e12})
    report.measure("launch", lambda: {"us": limits.launch * 1e6})


def cold_start(config: BenchConfig, report: Report) -> None:
    report.measure("cold", partial(_first_token, config, report, "cold engine"))


def warm_start(config: BenchConfig, report: Report) -> None:
    report.measure("warm", partial(_first_token, config, report, "warm engine"))


def compile_kernels(config: BenchConfig, report: Report) -> None:
    """Compile in threads what the sections "checks" and "kernels" launch; engines do so when they load."""
    if config.is_dry_run:  # the interpreter compiles nothing
        return
    for part, launch in (
        ("compile checks", partial(_launch_checks, replace(config, repeats=1))),
        ("compile kernels", KernelTimings(config, only_launch=True).launch_all),
    ):
        report.measure(part, partial(compile_in_threads, launch))


def _describe_machine(config: BenchConfig) -> Mapping[str, Any]:
    facts: dict[str, Any] = {name: _version(name) for name in PACKAGES}
    facts |= {
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "compiler": _first_line(os.environ.get("CC") or shutil.which("gcc") or "cc", "--version"),
        "commit": _first_line("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"),
        "kernels": source_digest(),  # of their sources
        "native": native_unavailable_reason("cpu") or "yes",
    }
    if config.is_dry_run:
        return {"name": "cpu (dry run)", **facts}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "gib": properties.total_memory / (1 << 30),
        "multiprocessors": properties.multi_processor_count,
        "cuda": str(torch.version.cuda),
        **query_nvidia_smi("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "temperature.gpu"),
        **facts,
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _first_line(*command: str) -> str:
    try:
        output = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {type(error).__name__}"
    return output.stdout.partition("\n")[0]


def _first_token(config: BenchConfig, report: Report, engine_part: str) -> Mapping[str, Any]:
    """Seconds until a new engine of the small shape has answered with one token; imports are done."""
    (request,) = make_requests(1, config.prompt, 2, config.small.vocab)
    started = time.perf_counter()
    with open_engine(config, report, engine_part, "small") as engine:
        engine.first_token_s(request)
        return {"s": time.perf_counter() - started}


def _launch_checks(config: BenchConfig) -> None:
    scratch = Report({})
    for check in (check_linear, check_experts, check_attention, check_sampling):
        scratch.run_section("", partial(check, config, scratch), math.inf)
    for error in scratch.broken.values():
        print(error, file=sys.stderr)


def compile_in_threads(launch: Callable[[], object]) -> Mapping[str, Any]:
    """Figures of the compilation of all kernels that launch() would launch."""
    summary = importlib.import_module("foreword.kernels.triton.precompile").precompile(launch)
    ok = summary.num_failed == 0 < summary.num_kernels  # 0: it failed, which a warning describes
    return {"ok": ok, "kernels": summary.num_kernels, "s": summary.seconds}
