"""Time on a device: events, graphs without the host, and how long the device has nothing to do."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

__all__ = ["BenchDevice", "IdleShare", "idle_shares", "medians"]

GAP_US = 4.0  # kernels of one graph follow each other within less: a longer gap is one between steps
MIN_SECONDS = 0.002  # of one measurement: events of a device tell microseconds


@dataclass(frozen=True, slots=True)
class IdleShare:
    """How long the device had nothing to do, as shares of the time from its first kernel to its last.

    between  in gaps that are longer than those between kernels of one graph
    all      in all gaps
    """

    span_us: float
    kernels: int
    between: float
    all: float


class BenchDevice:
    """ "cuda", or "cpu" for rehearsals, where nothing is asynchronous and graphs are plain calls."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cuda = name == "cuda"

    def wait(self) -> None:
        """Until all that was launched is done."""
        if self.cuda:
            torch.cuda.synchronize()

    def graph(self, run: Callable[[], object]) -> Callable[[], object]:
        """The same work without the host's part in it."""
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

    def seconds(self, run: Callable[[], object], times: int = 1) -> float:
        """Of one call out of `times` in a row, as the device sees it."""
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

    def in_turn(self, runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
        """Seconds of each, round after round; each is called often enough to be measured."""
        times = {name: self._times(run) for name, run in runs.items()}
        found: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                found[name].append(self.seconds(run, times[name]))
        return found

    def _times(self, run: Callable[[], object]) -> int:
        if not self.cuda:
            return 1
        self.seconds(run)
        return max(1, min(1000, int(MIN_SECONDS / max(self.seconds(run), 1e-7))))

    def idle(self, run: Callable[[], object]) -> IdleShare | None:
        """While `run` runs; None if the profiler saw nothing of the device."""
        activity, wanted = ProfilerActivity.CPU, DeviceType.CPU
        if (
            self.cuda
        ):  # alone: to look at the host as well would slow it down, and the device would wait for it
            activity, wanted = ProfilerActivity.CUDA, DeviceType.CUDA
        self.wait()
        with profile(activities=[activity]) as seen:
            run()
            self.wait()
        return idle_shares(
            [(e.time_range.start, e.time_range.end) for e in seen.events() if e.device_type == wanted]
        )

    def free(self) -> None:
        """Give back the memory of what is no longer referred to."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()


def _replay(graph: torch.cuda.CUDAGraph, run: Callable[[], object]) -> None:
    """A graph reads what `run` refers to where it lay when it was captured: as long as one lives, so must the other."""
    graph.replay()


def idle_shares(intervals: Sequence[tuple[float, float]]) -> IdleShare | None:
    """Intervals of work in microseconds, in any order; they may overlap."""
    if not intervals:
        return None
    ordered = sorted(intervals)
    first, reached = ordered[0][0], ordered[0][0]
    gaps = []
    for begin, end in ordered:
        if begin > reached:
            gaps.append(begin - reached)
        reached = max(reached, end)
    span = max(reached - first, 1e-9)
    return IdleShare(span, len(intervals), sum(gap for gap in gaps if gap > GAP_US) / span, sum(gaps) / span)


def medians(found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in found.items()}
