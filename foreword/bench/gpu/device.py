"""Time on a device, by events and CUDA graphs, and the device's ceilings that every share refers to."""

from __future__ import annotations

import gc
import importlib
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from foreword.bench.gpu.config import BenchConfig

MAX_KERNEL_GAP_US = 4.0  # between kernels of one graph: a longer gap lies between steps
MIN_TIMED_S = 0.002  # of one measurement: events have a resolution of microseconds
LAUNCHES = 200
LAUNCH_SIZE = 64  # values of the tensor in the launch measurement
NVIDIA_SMI_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class IdleShare:
    """Idle time of the device as shares of the time from its first kernel to its last."""

    span_us: float
    kernels: int
    between: float  # in gaps longer than those between kernels of one graph
    all: float  # in all gaps


class BenchDevice:
    """ "cuda", or "cpu" for dry runs, where nothing is asynchronous and a graph is a plain call."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cuda = name == "cuda"

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def graph(self, run: Callable[[], object]) -> Callable[[], object]:
        """Capture `run`, so that its replay has no host time in it."""
        if not self.cuda:
            run()
            return run
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return partial(_replay, graph, run)

    def time(self, run: Callable[[], object], times: int = 1) -> float:
        """Device seconds of one call out of `times` in a row."""
        if not self.cuda:
            started = time.perf_counter()
            for _ in range(times):
                run()
            return (time.perf_counter() - started) / times
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(times):
            run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / times

    def medians(self, runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
        """Median seconds by name, measured in turn; short calls are repeated."""
        times = dict.fromkeys(runs, 1)
        if self.cuda:
            for name, run in runs.items():
                self.time(run)
                times[name] = max(1, min(1000, int(MIN_TIMED_S / max(self.time(run), 1e-7))))
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                seconds[name].append(self.time(run, times[name]))
        return {name: statistics.median(values) for name, values in seconds.items()}

    def idle(self, run: Callable[[], object]) -> IdleShare | None:
        """Idle shares of the device during `run`; None if the profiler saw no kernel."""
        # CUDA activity alone: profiling the host too would slow it down, and the device would wait for it.
        activity, kind = (
            (ProfilerActivity.CUDA, DeviceType.CUDA) if self.cuda else (ProfilerActivity.CPU, DeviceType.CPU)
        )
        self.wait()
        with profile(activities=[activity]) as profiler:
            run()
            self.wait()
        return idle_shares(
            [(e.time_range.start, e.time_range.end) for e in profiler.events() if e.device_type == kind]
        )

    def peak_gib(self) -> float:
        """The most memory that torch reserved in this process; 0 without a GPU."""
        return torch.cuda.max_memory_reserved() / (1 << 30) if self.cuda else 0.0

    def free(self) -> None:
        """Return the memory of dropped tensors to the device."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()


def _replay(graph: torch.cuda.CUDAGraph, run: Callable[[], object]) -> None:
    """Replay; the argument `run` keeps the captured tensors alive."""
    graph.replay()


def idle_shares(intervals: Sequence[tuple[float, float]]) -> IdleShare | None:
    """Gaps between busy intervals (microseconds, any order, may overlap)."""
    if not intervals:
        return None
    ordered = sorted(intervals)
    first = reached = ordered[0][0]
    gaps = []
    for begin, end in ordered:
        if begin > reached:
            gaps.append(begin - reached)
        reached = max(reached, end)
    span = max(reached - first, 1e-9)
    between = sum(gap for gap in gaps if gap > MAX_KERNEL_GAP_US)
    return IdleShare(span, len(intervals), between / span, sum(gaps) / span)


@dataclass
class Roofline:
    """Ceilings measured with torch alone, each at its first use; medians over rounds."""

    config: BenchConfig
    device: BenchDevice

    @cached_property
    def bandwidth(self) -> float:
        """Bytes/s of a copy in device memory, read and written."""
        source = torch.ones(self.config.copy_bytes, dtype=torch.uint8, device=self.device.name)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self._median(lambda: target.copy_(source))

    @cached_property
    def product(self) -> float:
        """Operations/s of square matrix products; a multiply-add is two."""
        side, dtype = self.config.product, getattr(torch, self.config.dtype)
        left = torch.randn(side, side, dtype=dtype, device=self.device.name)
        return 2 * side**3 / self._median(lambda: left @ left)

    @cached_property
    def launch(self) -> float:
        """Host seconds to launch one small torch operation."""
        value = torch.zeros(LAUNCH_SIZE, device=self.device.name)
        return self._median(lambda: [value.add_(1.0) for _ in range(LAUNCHES)]) / LAUNCHES

    def _median(self, run: Callable[[], object]) -> float:
        run()
        return self.device.medians({"": run}, max(self.config.rounds, 3))[""]


@cache
def roofline(config: BenchConfig) -> Roofline:
    return Roofline(config, BenchDevice(config.device))


class CompileCounter:
    """Counts the Triton kernels that this process compiles while entered: those that the disk cache lacks."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def __enter__(self) -> CompileCounter:
        if find_spec("triton") is not None:
            importlib.import_module("triton.knobs").compilation.listener = self._on_compiled
        return self

    def __exit__(self, *_: object) -> None:
        if find_spec("triton") is not None:
            importlib.import_module("triton.knobs").compilation.listener = None

    def facts(self) -> dict[str, float]:
        """The count, and the sum of the compiler's seconds, some in parallel."""
        return {"compiled": len(self._seconds), "compile_s": sum(self._seconds)}

    def _on_compiled(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            self._seconds.append(times.total / 1e6)


def query_nvidia_smi(*fields: str) -> dict[str, str]:
    """Fields of `nvidia-smi --query-gpu` of the first GPU; empty where the command is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, "--id=0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return dict(zip(fields, (value.strip() for value in output.split(",")), strict=False))
