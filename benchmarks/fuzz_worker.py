"""The process that runs one parser; started and outlived by fuzz_parsers.py."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import re
import resource
import signal
import struct
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import foreword
from benchmarks.fuzz_checkpoints import checkpoint_targets
from benchmarks.fuzz_images import image_targets
from benchmarks.fuzz_mutate import shrink
from benchmarks.fuzz_targets import FuzzTarget, file_targets
from benchmarks.fuzz_traffic import traffic_targets

TARGETS = {**file_targets(), **image_targets(), **traffic_targets(), **checkpoint_targets()}
PACKAGE = Path(foreword.__file__).parent
INPUT_CPU_S = 4.0  # for one input
MEMORY_BYTES = 2 << 30  # beyond the memory of the ready process
MAX_KEPT = 2000  # inputs that reached new lines
ADDRESS = re.compile(r"0x[0-9a-f]{6,}")


class OutOfTime(BaseException):
    """Not an Exception, so that parsers cannot catch it."""


@dataclass(slots=True)
class Report:
    """Counts of one worker."""

    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    kept: int = 0
    slowest_s: float = 0.0
    memory: list[int] = field(default_factory=list)  # resident bytes after each third
    findings: dict[str, bytes] = field(default_factory=dict)  # input by error and place


class LineCoverage:
    """Executed lines of the parser's modules."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._prefixes = tuple(str(PACKAGE / module) for module in modules)
        self.seen: set[tuple[object, int]] = set()

    @contextmanager
    def trace(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self._prefixes) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        self.seen.add((frame.f_code, frame.f_lineno))
        return self._line


def fuzz(
    target: FuzzTarget, inputs: int, seed: int, folder: Path, seconds: float = float("inf")
) -> tuple[Report, LineCoverage]:
    """Try mutated inputs; `folder` holds the current one for the parent process."""
    report, lines, random = Report(), LineCoverage(target.modules), Random(seed)
    ends = time.monotonic() + seconds
    kept = list(target.seeds)
    scratch = folder / "scratch"
    scratch.mkdir()
    for number, data in enumerate(islice(_inputs(target, kept, random, inputs // 4), inputs)):
        (folder / "current").write_bytes(struct.pack("<Q", number) + data)
        before = len(lines.seen)
        _try(target, data, scratch, report, lines)
        if len(lines.seen) > before and len(kept) < MAX_KEPT:
            kept.append(data)
        if number in (inputs // 3, 2 * inputs // 3):
            report.memory.append(resident_bytes())
        if time.monotonic() > ends:
            break
    report.memory.append(resident_bytes())
    report.kept = len(kept) - len(target.seeds)
    return report, lines


def _inputs(target: FuzzTarget, kept: list[bytes], random: Random, most_cuts: int) -> Iterator[bytes]:
    """The seeds, these truncated in many places, then mutations without end."""
    yield from target.seeds
    step = max(sum(map(len, target.seeds)) // max(most_cuts, 1), 1)
    for data in target.seeds:
        yield from (data[:size] for size in range(0, len(data), step))
    for _ in count():
        yield target.change(random, random.choice(kept), random.choice(kept))


def _try(target: FuzzTarget, data: bytes, scratch: Path, report: Report, lines: LineCoverage) -> None:
    started = time.process_time()
    with lines.trace():
        what = run_target(target, data, scratch)
    report.inputs += 1
    report.slowest_s = max(report.slowest_s, time.process_time() - started)
    report.accepted += what == ""
    report.refused += what is None
    if what and what not in report.findings:
        report.findings[what] = shrink(data, lambda shorter: run_target(target, shorter, scratch) == what)


def run_target(target: FuzzTarget, data: bytes, scratch: Path) -> str | None:
    """ "" for success, None for a refusal, else the error and its place."""
    try:
        with _cpu_limit():
            target.run(data, scratch)
    except target.refusals as error:
        return None if str(error) else f"{type(error).__name__} without a message"
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _describe(error)
    return ""


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(str(PACKAGE))] or list(frames)
    place = ours[-1] if ours else None
    where = "" if place is None else f" at {Path(place.filename).name}:{place.lineno} in {place.name}"
    if isinstance(error, OutOfTime):  # its place is random
        return f"more than {INPUT_CPU_S:g} s of processor time"
    return (
        f"{type(error).__name__}{where}: {ADDRESS.sub('0x', str(error)):.80}"
        if not place
        else f"{type(error).__name__}{where}"
    )


@contextmanager
def _cpu_limit() -> Iterator[None]:
    """Raise OutOfTime after INPUT_CPU_S of processor time."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, INPUT_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def resident_bytes() -> int:
    """Without the allocator's free memory, which one large input leaves."""
    gc.collect()
    with suppress(OSError, AttributeError):  # without glibc
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _limit_memory() -> None:
    """Further allocations raise MemoryError or end the process."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", nargs="?")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--inputs", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--replay", type=Path)
    args = parser.parse_args()
    if args.list:
        print(*TARGETS)
        return 0
    target = TARGETS[args.name]()
    _limit_memory()
    if args.replay is not None:
        return _replay(target, args.replay)
    wanted = max(int(args.inputs * target.share), 1)
    report, lines = fuzz(target, wanted, args.seed, args.folder, args.seconds)
    target.close()
    print(json.dumps(_as_json(report, lines)))
    return 0


def _replay(target: FuzzTarget, file: Path) -> int:
    with TemporaryDirectory(prefix="fuzz-") as folder, suppress(*target.refusals), _cpu_limit():
        target.run(file.read_bytes(), Path(folder))
    return 0


def _as_json(report: Report, lines: LineCoverage) -> Mapping[str, Any]:
    names = ("inputs", "accepted", "refused", "kept", "slowest_s", "memory")
    findings = {what: data.hex() for what, data in report.findings.items()}
    return {name: getattr(report, name) for name in names} | {"lines": len(lines.seen), "findings": findings}


if __name__ == "__main__":
    sys.exit(main())
