"""The cost of requests to a server process: CPU time, peak memory, and the longest silence of GET /live."""

from __future__ import annotations

import contextlib
import http.client
import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

LIVE_INTERVAL_S = 0.01
SETTLE_S = 30.0  # longest wait for an answer of /live
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
LONGEST, ANSWERS, STARTED = range(3)  # shared with the prober: seconds, a count, time of the last request


@dataclass(frozen=True, slots=True)
class ServerCost:
    """Costs of the API process and of its descendants, the workers."""

    api_s: float  # CPU seconds
    workers_s: float
    api_mib: float  # peak above the resident memory before
    workers_mib: float
    silent_s: float  # longest time without an answer of /live; inf: the connection broke


class ServerMeter:
    """Reads the cost of what happens between begin() and end(), while a process of its own asks /live."""

    def __init__(self, url: str, pid: int) -> None:
        self._pid = pid
        context = multiprocessing.get_context("spawn")
        self._shared: Any = context.Array("d", 3, lock=False)
        self._prober = context.Process(target=_ask_live, args=(url, self._shared), daemon=True)
        self._api_s = self._all_s = 0.0
        self._mib: dict[int, float] = {}

    def __enter__(self) -> ServerMeter:
        self._prober.start()
        self._await_answers(1)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._prober.kill()
        self._prober.join()

    def begin(self) -> None:
        for pid in _process_tree(self._pid):
            with contextlib.suppress(OSError):  # it has ended
                Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
        self._mib = {pid: _peak_mib(pid) for pid in _process_tree(self._pid)}
        self._api_s, self._all_s = _own_cpu_s(self._pid), self._tree_cpu_s()
        self._shared[LONGEST] = 0.0

    def end(self) -> ServerCost:
        """The cost since begin(), once /live answers."""
        silent_s = (
            self._shared[LONGEST] if self._await_answers(1) else time.monotonic() - self._shared[STARTED]
        )
        api_s, all_s = _own_cpu_s(self._pid) - self._api_s, self._tree_cpu_s() - self._all_s
        grown = {pid: max(0.0, _peak_mib(pid) - self._mib.get(pid, 0.0)) for pid in _process_tree(self._pid)}
        api_mib = grown.pop(self._pid)
        return ServerCost(
            api_s, max(0.0, all_s - api_s), api_mib, sum(grown.values()), max(silent_s, self._shared[LONGEST])
        )

    def _await_answers(self, count: int) -> bool:
        """Whether /live has answered `count` times more."""
        wanted, end_s = self._shared[ANSWERS] + count, time.monotonic() + SETTLE_S
        while self._shared[ANSWERS] < wanted and time.monotonic() < end_s:
            time.sleep(LIVE_INTERVAL_S / 5)
        return bool(self._shared[ANSWERS] >= wanted)

    def _tree_cpu_s(self) -> float:
        """CPU seconds of all processes; those of a child that has ended are its parent's."""
        return sum(_own_cpu_s(pid) + _ended_children_s(pid) for pid in _process_tree(self._pid))


def _ask_live(url: str, shared: Any) -> None:
    """Ask /live until killed."""
    address = httpx.URL(url)
    connection = http.client.HTTPConnection(address.host, address.port or 80)
    while True:
        shared[STARTED] = started = time.monotonic()
        try:
            connection.request("GET", "/live")
            connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            shared[LONGEST] = float("inf")
            return
        shared[LONGEST] = max(shared[LONGEST], time.monotonic() - started)
        shared[ANSWERS] += 1
        time.sleep(LIVE_INTERVAL_S)


def _process_tree(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    with contextlib.suppress(OSError):  # it has ended
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in file.read_text().split():
                yield from _process_tree(int(child))


def _own_cpu_s(pid: int) -> float:
    try:
        return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3) of Linux; 2: nanoseconds
    except OSError:
        return 0.0


def _ended_children_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[13]) + int(fields[14])) / CLOCK_TICKS


def _peak_mib(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return int(status.split("VmHWM:")[1].split()[0]) / 1024 if "VmHWM:" in status else 0.0
