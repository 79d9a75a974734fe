"""One run of a benchmark: result files, progress and time left on stderr, and what an interrupt leaves."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import logging
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import MofNCompleteColumn, TextColumn

from foreword.bench.result_file import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    ResultFile,
    describe_error,
    without_nan,
    write_result,
)
from foreword.cli.startup import format_seconds, startup_line
from foreword.cli.terminal import progress_bar, stderr_console
from foreword.core.readiness import OnLoadProgress
from foreword.errors import ConfigError
from foreword.planning.hardware import probe_hardware

logger = logging.getLogger(__name__)

# Between lines of progress where stderr is no terminal, as of the start-up line.
LINE_INTERVAL_S, LATER_INTERVAL_S, LATER_S = 1.5, 10.0, 60.0
STDOUT = "-"


@dataclass(frozen=True, slots=True)
class BenchStep:
    """A part of a benchmark that runs at a stretch."""

    cell: str  # what it measures; after a failure the cell's other steps are left out
    label: str
    expected_s: float  # an estimate: the time left is corrected by the steps before
    run: Callable[[], None]


class BenchSession(contextlib.ExitStack):
    """Opens the result files of --json and --plot, runs steps, and reports what is complete.

    Ctrl-C and SIGTERM end the steps; an exception ends the steps of its cell alone.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.name = str(args.bench)
        self.complete = True
        self.errors: dict[str, str] = {}  # cell: error
        self._json_alone = args.json == STDOUT
        self._json = self._open("--json", None if self._json_alone else args.json)
        self._plot = self._open("--plot", getattr(args, "plot", None))
        self._date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")

    def __enter__(self) -> BenchSession:
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
            self.callback(signal.signal, signal.SIGTERM, before)
        return self

    def run(self, steps: Sequence[BenchStep], plan: str) -> None:
        """Run the steps in order until Ctrl-C; `plan` says in words what they are."""
        console = stderr_console()
        left = _TimeLeft(steps)
        console.print(f"bench {self.name}: {plan}; Ctrl-C keeps what is complete")
        columns = (MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
        try:
            with progress_bar(*columns) as progress:
                task = progress.add_task("", total=len(steps), left=str(left))
                for number, step in enumerate(steps, 1):
                    progress.update(task, description=step.label, left=str(left))
                    line = f"{number}/{len(steps)}: {step.label}; {left}"
                    if progress.disable:
                        if left.is_line_due():
                            console.print(line)
                        startup_line.begin(line, at_once=False)  # repeats it while the step lasts
                    started = time.monotonic()
                    if step.cell not in self.errors:
                        with self.guard(step.cell):
                            step.run()
                    left.add(step, time.monotonic() - started, self.errors)
                    progress.advance(task)
        except (KeyboardInterrupt, asyncio.CancelledError):  # a step of asyncio may end with either
            self.complete = False
        finally:
            startup_line.end()

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[OnLoadProgress]:
        """Show what the benchmark waits for; yields the function that shows the progress of a model."""
        startup_line.begin(f"bench {self.name}: {what}")
        try:
            yield startup_line.on_load
        finally:
            startup_line.end()

    @contextlib.contextmanager
    def guard(self, cell: str) -> Iterator[None]:
        """Record an exception of the block as the cell's error."""
        try:
            yield
        except Exception as error:  # one failed cell must not cost the others
            logger.debug("%s failed", cell, exc_info=True)
            self.errors[cell] = describe_error(error)

    def finish(
        self,
        result: Mapping[str, Any],
        show: Callable[[Mapping[str, Any]], None],
        *,
        finished: int,
        passed: bool,
        draw: Callable[[Mapping[str, Any], Path], None] | None = None,
    ) -> int:
        """Write the JSON file, print tables and JSON, draw the plot; returns the exit code.

        `finished` is the number of complete cells, `passed` is false where answers differ or lack. A file
        that cannot be written costs nothing else. Without a complete cell no file is touched.
        """
        for cell, error in self.errors.items():
            print(f"bench {self.name}: {cell} failed: {error}", file=sys.stderr)
        if not finished:
            if not self.complete:
                print(f"bench {self.name}: interrupted before anything was complete", file=sys.stderr)
            return EXIT_FAILED if self.complete else EXIT_INTERRUPTED
        result = {"bench": self.name, **describe_host(), "date": self._date, **result}
        result = without_nan(result | {"complete": self.complete, "errors": self.errors})
        code = 0 if passed and not self.errors else EXIT_FAILED
        if self._json is not None:
            text = json.dumps(result, indent=1, allow_nan=False)
            code = max(
                code, write_result(self._json, lambda path: path.write_text(text + "\n", encoding="utf-8"))
            )
        with contextlib.redirect_stdout(sys.stderr) if self._json_alone else contextlib.nullcontext():
            print(describe_machine(result))
            show(result)
        if self._json_alone or not sys.stdout.isatty():
            print(json.dumps(result, allow_nan=False), flush=True)
        if self._plot is not None and draw is not None:
            code = max(code, write_result(self._plot, lambda path: draw(result, path)))
        if not self.complete:
            print(f"bench {self.name}: interrupted; only what was complete is shown", file=sys.stderr)
            return EXIT_INTERRUPTED
        return code

    def _open(self, flag: str, path: str | None) -> ResultFile | None:
        if path is None:
            return None
        try:
            file = ResultFile(flag, path)
        except ConfigError:
            self.close()
            raise
        self.callback(file.discard)
        return file


class _TimeLeft:
    """The expected time of the steps to come, scaled by what those before took, of the same cell if any.

    Nothing is said before the first step: the estimates alone may be wrong by times.
    """

    def __init__(self, steps: Sequence[BenchStep]) -> None:
        self._left_s: dict[str, float] = {}  # expected, by cell
        self._scales: dict[str, float] = {}  # measured over expected time, of the cells that began
        for step in steps:
            self._left_s[step.cell] = self._left_s.get(step.cell, 0.0) + step.expected_s
        self._expected_s = self._measured_s = 0.0  # sums over the steps that ran
        self._started_s = self._next_line_s = time.monotonic()

    def __str__(self) -> str:
        if not self._expected_s:
            return "measuring the speed first"
        scale = self._measured_s / self._expected_s
        left_s = sum(self._scales.get(cell, scale) * seconds for cell, seconds in self._left_s.items())
        return f"about {format_seconds(left_s)} left"

    def add(self, step: BenchStep, seconds: float, failed: Collection[str]) -> None:
        """Count a step as run; those of failed cells will not run."""
        if step.cell in failed:
            self._left_s.pop(step.cell, None)
            return
        self._scales[step.cell] = seconds / step.expected_s if step.expected_s else 1.0
        self._expected_s += step.expected_s
        self._measured_s += seconds
        self._left_s[step.cell] -= step.expected_s

    def is_line_due(self) -> bool:
        """True at first, and then once in LINE_INTERVAL_S, after a while less often."""
        now = time.monotonic()
        if now < self._next_line_s:
            return False
        self._next_line_s = now + (LINE_INTERVAL_S if now - self._started_s < LATER_S else LATER_INTERVAL_S)
        return True


def describe_host() -> dict[str, Any]:
    """Platform, CPU model, usable cores and ISA extensions."""
    host = probe_hardware("cpu")
    return {"machine": platform.platform(), "cpu": host.cpu, "cores": host.cores, "isa": list(host.isa)}


def describe_machine(result: Mapping[str, Any]) -> str:
    """CPU, cores, ISA and date of a result, in one line."""
    cores = "1 core" if result["cores"] == 1 else f"{result['cores']} cores"
    return f"{result['cpu']}, {cores} ({' '.join(result['isa'])}), {result['date'][:10]}"
