"""Findings of `foreword bench gpu`: written before and after every part, so that a killed run keeps them."""

from __future__ import annotations

import json
import logging
import platform
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foreword.bench.regime import RegimeError, checked_share
from foreword.bench.result_file import ResultFile, without_nan, write_result

TRACEBACK_LINES = 12
SHARES = ("of bandwidth", "of product")  # figures with these names are shares of a ceiling
MIN_LEFT_S = 1.0  # with less time left, no further part or engine starts
MERGED = ("skipped", "broken", "processes")  # fields of findings by part or job
RAW_PART = "run "  # parts that begin with this are compared by another; tables omit them
MAX_WARNINGS, MAX_WARNING_CHARS = 20, 300


class JobEnded(Exception):
    """The job's budget is spent, or its device is lost."""


@dataclass(slots=True)
class Report:
    """Figures by section and part: of one job in its process, or merged of all jobs in the parent."""

    regime: Mapping[str, Any]
    file: ResultFile | None = None
    folder: Path = field(default_factory=Path)  # where jobs leave files for later ones
    clock: Callable[[], float] = time.perf_counter
    is_fatal: Callable[[BaseException], bool] = lambda error: False  # no part can follow
    show: Callable[[str], None] = lambda line: None  # progress
    figures: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)  # reason by part
    broken: dict[str, str] = field(default_factory=dict)  # last traceback lines by part
    processes: dict[str, dict[str, Any]] = field(default_factory=dict)  # facts by "section: job"
    running: str = ""  # the part in progress
    _section: str = ""
    _deadline: float = 0.0

    def run_section(self, name: str, run: Callable[[], None], deadline: float, job: str = "") -> None:
        """Run the parts of a section's job until `deadline` on the clock."""
        self._section, self._deadline = name, deadline
        rest = ": ".join(filter(None, (name, job, "remaining parts")))
        try:
            with self.guard(job):
                run()
        except JobEnded as end:
            self.skipped[rest] = str(end)
        self.running = ""
        self.write()

    def measure(self, part: str, run: Callable[[], Mapping[str, Any]], needs_s: float = 2.0) -> None:
        """Run a part and keep its figures; `ok` says whether a check held. Raises JobEnded.

        A part that needs more seconds than are left is skipped.
        """
        left = self._deadline - self.clock()
        name = f"{self._section}: {part}"
        if left < needs_s:
            self.skipped[name] = f"{max(left, 0.0):.0f} s were left, it needs about {needs_s:.0f}"
            self.require_time(MIN_LEFT_S)
            return
        self.running = name
        self.write()
        self.show(f"{name} ...")
        with self.guard(part):
            self.record(part, run())
        self.write()

    def require_time(self, needs_s: float) -> None:
        """Raises JobEnded if less is left."""
        if self._deadline - self.clock() < needs_s:
            raise JobEnded(f"{needs_s:.0f} s more were needed")

    def record(self, part: str, figures: Mapping[str, Any]) -> None:
        """Keep figures; shares beyond their ceiling are void, and fail the part's check."""
        kept = dict(figures)
        for name, value in figures.items():
            if name.endswith(SHARES):
                try:
                    checked_share(value, 1.0)
                except RegimeError as error:
                    kept |= {name: str(error), "ok": False}
        self.figures.setdefault(self._section, {})[part] = kept

    @contextmanager
    def guard(self, part: str) -> Iterator[None]:
        """Record a failure of the block under `part` and go on after it. Raises JobEnded."""
        self.require_time(MIN_LEFT_S)
        try:
            yield
        except JobEnded:
            raise
        except Exception as error:  # one failed part must not cost the others
            name = f"{self._section}: {part}" if part else self._section
            self.broken[name] = "".join(traceback.format_exc().splitlines(keepends=True)[-TRACEBACK_LINES:])
            self.show(f"{name}: {self.broken[name].splitlines()[-1]}")
            if self.is_fatal(error):
                raise JobEnded(f"the device is lost: {error}") from error

    def merge(self, findings: Mapping[str, Any]) -> None:
        """Add what as_json() of a job's process returned; a later state of the same job replaces it."""
        for section, parts in findings["figures"].items():
            self.figures.setdefault(section, {}).update(parts)
        for name in MERGED:
            getattr(self, name).update(findings[name])

    def get(self, section: str, part: str, name: str) -> Any:
        return self.figures.get(section, {}).get(part, {}).get(name)

    def failed_checks(self) -> list[str]:
        return [
            f"{section}: {name}"
            for section, parts in self.figures.items()
            for name, part in parts.items()
            if part.get("ok") is False
        ]

    def as_json(self) -> dict[str, Any]:
        findings = {
            "bench": "gpu",
            "machine": platform.platform(),
            **self.regime,
            "running": self.running,
            "figures": self.figures,
            **{name: getattr(self, name) for name in MERGED},
        }
        return {name: without_nan(value) for name, value in findings.items()}

    def write(self) -> int:
        """Replace the findings file; returns an exit code. A full disk does not end the measurement."""
        if self.file is None:
            return 0
        text = json.dumps(self.as_json(), indent=1, allow_nan=False)
        return write_result(self.file, lambda path: path.write_text(text, encoding="utf-8"))


class WarningLog(logging.Handler):
    """Keeps the first different warnings and errors of a process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{record.name}: {record.getMessage()}"[:MAX_WARNING_CHARS]
        if line not in self.lines and len(self.lines) < MAX_WARNINGS:
            self.lines.append(line)
