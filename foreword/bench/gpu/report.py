"""Findings of `foreword bench gpu`: written after every part, so that a killed run keeps its figures."""

from __future__ import annotations

import json
import platform
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from foreword.bench.regime import RegimeError, checked_share
from foreword.bench.session import ResultFile, without_nan, write_result
from foreword.cli.terminal import stderr_console

__all__ = ["Report", "SectionTimeUp"]

TRACEBACK_LINES = 12
SHARES = ("of bandwidth", "of product")  # figures with these names are shares of a ceiling
MIN_LEFT_S = 1.0  # with less time left, no further part or engine starts


class SectionTimeUp(Exception):
    """The budget of the section is spent."""


@dataclass(slots=True)
class Report:
    """Figures by section and part."""

    regime: Mapping[str, Any]
    file: ResultFile | None = None
    clock: Callable[[], float] = time.perf_counter
    figures: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)  # reason by part
    broken: dict[str, str] = field(default_factory=dict)  # last traceback lines by part
    seconds: dict[str, float] = field(default_factory=dict)  # by section
    _section: str = ""
    _deadline: float = 0.0

    def run_section(self, name: str, run: Callable[[], None], deadline: float) -> None:
        """Run the parts of a section until `deadline` on the clock; write the findings."""
        self._section, self._deadline = name, deadline
        started = self.clock()
        try:
            with self.guard(""):
                run()
        except SectionTimeUp:
            self.skipped[f"{name}: remaining parts"] = "the section's time is over"
        self.seconds[name] = self.clock() - started
        self.write()

    def measure(self, part: str, run: Callable[[], Mapping[str, Any]], needs_s: float = 2.0) -> None:
        """Run a part and keep its figures; `ok` says whether a check held. Raises SectionTimeUp.

        A part that needs more seconds than are left is skipped.
        """
        left = self._deadline - self.clock()
        name = f"{self._section}: {part}"
        if left < needs_s:
            self.skipped[name] = f"{max(left, 0.0):.0f} s were left, it needs about {needs_s:.0f}"
            self._check_time()
            return
        stderr_console().print(f"{name} ...", style="dim")
        with self.guard(part):
            self.figures.setdefault(self._section, {})[part] = self._without_wrong_shares(dict(run()))
        self.write()

    def _without_wrong_shares(self, figures: dict[str, Any]) -> dict[str, Any]:
        """Void shares of a ceiling that are beyond it; the part's check fails."""
        for name, value in figures.items():
            if name.endswith(SHARES):
                try:
                    checked_share(value, 1.0)
                except RegimeError as error:
                    figures = figures | {name: str(error), "ok": False}
        return figures

    @contextmanager
    def guard(self, part: str) -> Iterator[None]:
        """Record a failure of the block under `part` and go on after it. Raises SectionTimeUp."""
        self._check_time()
        try:
            yield
        except SectionTimeUp:
            raise
        except Exception:  # one failed part must not cost the others
            name = f"{self._section}: {part}" if part else self._section
            self.broken[name] = "".join(traceback.format_exc().splitlines(keepends=True)[-TRACEBACK_LINES:])
            stderr_console().print(f"{name}: {self.broken[name].splitlines()[-1]}", style="red", markup=False)

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
            "figures": self.figures,
            "skipped": self.skipped,
            "broken": self.broken,
            "section_seconds": self.seconds,
        }
        return {name: without_nan(value) for name, value in findings.items()}

    def write(self) -> int:
        """Replace the findings file; returns an exit code. A full disk does not end the measurement."""
        if self.file is None:
            return 0
        text = json.dumps(self.as_json(), indent=1, allow_nan=False)
        return write_result(self.file, lambda path: path.write_text(text, encoding="utf-8"))

    def _check_time(self) -> None:
        if self._deadline - self.clock() < MIN_LEFT_S:
            raise SectionTimeUp
