"""Malformed inputs to every parser of foreign data: each ends in success or a documented refusal.

    python -m benchmarks.fuzz_parsers [NAME ...] [--inputs 10000 | --seconds N] [--seed S] [--jobs 2]

Regime: each parser in a process of its own, with a limit of memory, and of processor time per input.
Valid inputs are mutated as bytes and as JSON; inputs that reach new lines of the parser are mutated
further. A finding is an error other than a documented refusal, too much time or memory, or the end of the
process. It is shortened, printed, and written to --findings. Memory of the last third of the inputs is
compared with that of the second. Prints a table and one JSON line; exit code 1 if there are findings.

    python -m benchmarks.fuzz_parsers NAME --replay FILE      one input again, with its traceback
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.fuzz_mutate import shrink
from benchmarks.script import print_json
from foreword.bench.tables import print_table

WORKER = (sys.executable, "-m", "benchmarks.fuzz_worker")
INPUT_TIMEOUT_S = 120.0  # for one input on a busy machine
GROWTH = 1.05  # limit of memory of the last third over that of the second
GROWTH_BYTES = 8 << 20  # fluctuation that is no growth
MAX_SHOWN_CHARS = 400
CRASH_ATTEMPTS = 60  # processes spent on shortening a crashing input


@dataclass(slots=True)
class ParserTally:
    """Totals of one parser over its workers, including crashed ones."""

    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    kept: int = 0
    lines: int = 0
    slowest_s: float = 0.0
    memory: tuple[int, ...] = ()
    findings: dict[str, bytes] = field(default_factory=dict)

    def add_report(self, report: Mapping[str, Any]) -> None:
        self.inputs += report["inputs"]
        self.accepted += report["accepted"]
        self.refused += report["refused"]
        self.kept, self.lines = max(self.kept, report["kept"]), max(self.lines, report["lines"])
        self.slowest_s = max(self.slowest_s, report["slowest_s"])
        self.memory = tuple(report["memory"])
        self.findings.update({what: bytes.fromhex(data) for what, data in report["findings"].items()})

    @property
    def growth(self) -> float:
        """Memory at the end over that after the second third; 1 below GROWTH_BYTES."""
        if len(self.memory) < 3 or self.memory[2] - self.memory[1] < GROWTH_BYTES:
            return 1.0
        return self.memory[2] / self.memory[1]


def fuzz(name: str, args: argparse.Namespace) -> ParserTally:
    """Run workers for one parser until all inputs are tried or the time is over."""
    tally, ends = ParserTally(), time.monotonic() + (args.seconds or float("inf"))
    seed = args.seed
    while (
        (left := args.inputs - tally.inputs) > 0
        and time.monotonic() < ends
        and seed < args.seed + args.deaths
    ):
        seconds = None if args.seconds is None else ends - time.monotonic()
        with TemporaryDirectory(prefix="fuzz-") as folder:
            report, why = _run_worker(name, left, seed, seconds, Path(folder))
            if report is not None:
                tally.add_report(report)
                break
            count, data = _last_input(Path(folder))
        tally.inputs += count
        tally.findings[why] = shrink(data, partial(_crashes, name), CRASH_ATTEMPTS)
        seed += 1
    if tally.growth > GROWTH:
        tally.findings[f"memory grows: {[size >> 20 for size in tally.memory]} MiB at the thirds"] = b""
    return tally


def _run_worker(
    name: str, inputs: int, seed: int, seconds: float | None, folder: Path
) -> tuple[dict[str, Any] | None, str]:
    """The worker's report, or None and the reason of its end."""
    limit = [] if seconds is None else ["--seconds", str(seconds)]
    command = [*WORKER, name, "--inputs", str(inputs), "--seed", str(seed), "--folder", str(folder), *limit]
    with (folder / "log").open("wb") as log, (folder / "report").open("wb") as report:
        # A panic of the tokenizers library would load its symbols once, which looks like a leak.
        process = subprocess.Popen(
            command, stdout=report, stderr=log, env={**os.environ, "RUST_BACKTRACE": "0"}
        )
        hung = not _wait_for_end(process, folder)
    if process.returncode == 0:
        return json.loads((folder / "report").read_bytes()), ""
    last = (folder / "log").read_text(errors="replace").strip().splitlines()[-1:]
    return (
        None,
        f"no end within {INPUT_TIMEOUT_S:g} s"
        if hung
        else f"the process ended with {process.returncode}: {last}",
    )


def _wait_for_end(process: subprocess.Popen[bytes], folder: Path) -> bool:
    """False if one input took too long and the process was killed."""
    while True:
        try:
            process.wait(1.0)
            return True
        except subprocess.TimeoutExpired:
            current = folder / "current"
            if current.exists() and time.time() - current.stat().st_mtime > INPUT_TIMEOUT_S:
                process.kill()
                process.wait()
                return False


def _last_input(folder: Path) -> tuple[int, bytes]:
    """Number and bytes of the last input."""
    try:
        raw = (folder / "current").read_bytes()
    except FileNotFoundError:
        return 0, b""
    return struct.unpack_from("<Q", raw)[0], raw[8:]


def _crashes(name: str, data: bytes) -> bool:
    with TemporaryDirectory(prefix="fuzz-") as folder:
        file = Path(folder) / "input"
        file.write_bytes(data)
        command = [*WORKER, name, "--replay", str(file), "--folder", folder]
        try:
            return subprocess.run(command, capture_output=True, timeout=INPUT_TIMEOUT_S).returncode not in (
                0,
                1,
            )
        except subprocess.TimeoutExpired:
            return True


def _names() -> list[str]:
    """Names of all parsers, without importing them here."""
    return subprocess.run([*WORKER, "--list"], capture_output=True, check=True, text=True).stdout.split()


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    if args.replay is not None:
        return subprocess.run([*WORKER, *args.names, "--replay", args.replay]).returncode
    names = args.names or _names()
    began = time.perf_counter()
    tallies: dict[str, ParserTally] = {}
    with ThreadPoolExecutor(args.jobs) as threads:
        for name, tally in zip(names, threads.map(lambda name: fuzz(name, args), names), strict=True):
            tallies[name] = tally
            print(
                f"{name}: {tally.inputs} inputs, {len(tally.findings)} findings", file=sys.stderr, flush=True
            )
    _show(tallies, time.perf_counter() - began)
    for line in _findings(tallies, args.findings):
        print(line, file=sys.stderr)
    return 1 if any(tally.findings for tally in tallies.values()) else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="parsers (default: all)")
    parser.add_argument(
        "--inputs", type=int, default=10_000, metavar="N", help="for each parser; slow ones get fewer"
    )
    parser.add_argument("--seconds", type=float, default=None, metavar="X", help="for each parser, at most")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="parsers at once")
    parser.add_argument(
        "--deaths",
        type=int,
        default=20,
        metavar="N",
        help="crashes of a parser's process before it is given up",
    )
    parser.add_argument(
        "--findings", type=Path, default=None, metavar="FOLDER", help="write the inputs there"
    )
    parser.add_argument("--replay", default=None, metavar="FILE", help="try this one input")
    return parser.parse_args(arguments)


def _findings(tallies: Mapping[str, ParserTally], folder: Path | None) -> Iterator[str]:
    for name, tally in tallies.items():
        for number, (what, data) in enumerate(tally.findings.items()):
            yield f"{name}: {what}\n    input: {data[:MAX_SHOWN_CHARS]!r}"
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{name}-{number}").write_bytes(data)


def _show(tallies: Mapping[str, ParserTally], seconds: float) -> None:
    columns = ("parser", "inputs", "taken", "refused", "findings", "kept", "lines", "slowest s", "memory MiB")
    rows = [
        [
            name,
            *map(
                str,
                (tally.inputs, tally.accepted, tally.refused, len(tally.findings), tally.kept, tally.lines),
            ),
            f"{tally.slowest_s:.2f}",
            " ".join(str(size >> 20) for size in tally.memory),
        ]
        for name, tally in tallies.items()
    ]
    print_table("Malformed inputs", columns, rows)
    print_json(
        {
            "bench": "fuzz_parsers",
            "inputs": sum(tally.inputs for tally in tallies.values()),
            "by_parser": {name: tally.inputs for name, tally in tallies.items()},
            "findings": sum(len(tally.findings) for tally in tallies.values()),
            "memory_growth": {name: round(tally.growth, 3) for name, tally in tallies.items()},
            "seconds": round(seconds, 1),
        }
    )


if __name__ == "__main__":
    sys.exit(main())
