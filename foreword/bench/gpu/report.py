"""What `foreword bench gpu` found so far: written after every part, so that a run that is killed leaves what it had."""

from __future__ import annotations

import json
import os
import platform
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foreword.cli.terminal import stderr_console

__all__ = ["BenchSection", "Measurement", "Report", "run_sections"]

TOLD_LINES = 12  # of a traceback
LEAST_S = 1.0  # with less left nothing more is loaded


@dataclass(frozen=True, slots=True)
class Measurement:
    """A piece of a section: `run` yields its figures; it is left out where less than `needs_s` seconds are left.

    A figure named `ok` says whether a check held.
    """

    name: str
    run: Callable[[], Mapping[str, Any]]
    needs_s: float = 2.0


@dataclass(frozen=True, slots=True)
class BenchSection:
    """`parts` may load what its parts share between two of them, and free it."""

    name: str
    parts: Callable[[], Iterator[Measurement]]
    budget_s: float


@dataclass(slots=True)
class Report:
    """Figures by section and part.

    skipped   parts that were left out, with the reason
    broken    parts that raised, with the last lines of the traceback
    seconds   that each section took
    path      where all of it is written, or None
    """

    regime: Mapping[str, Any]
    path: Path | None = None
    figures: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def get(self, section: str, part: str, name: str) -> Any:
        """A figure, or None if there is none."""
        return self.figures.get(section, {}).get(part, {}).get(name)

    def failed_checks(self) -> list[str]:
        """Parts whose `ok` is false."""
        parts = (
            (f"{section}: {name}", part)
            for section, parts in self.figures.items()
            for name, part in parts.items()
        )
        return [name for name, part in parts if part.get("ok") is False]

    def as_json(self) -> dict[str, Any]:
        return {
            "bench": "gpu",
            "machine": platform.platform(),
            **self.regime,
            "figures": self.figures,
            "skipped": self.skipped,
            "broken": self.broken,
            "section_seconds": self.seconds,
        }

    def write(self) -> None:
        """All of it, in place of what was written before."""
        if self.path is not None:
            beside = self.path.with_name(self.path.name + ".part")
            beside.write_text(json.dumps(self.as_json(), indent=1), encoding="utf-8")
            os.replace(beside, self.path)


def run_sections(
    sections: list[BenchSection], findings: Report, clock: Callable[[], float] = time.perf_counter
) -> None:
    """Every part for which there is time. A part that raises is told, and the rest goes on."""
    deadline = clock()
    for section in sections:
        deadline += section.budget_s
        started = clock()
        try:
            _run_parts(section, findings, deadline, clock)
        except Exception:  # between two parts: what the following ones need could not be had
            _broke(findings, section.name)
        findings.seconds[section.name] = clock() - started
        findings.write()


def _run_parts(section: BenchSection, findings: Report, deadline: float, clock: Callable[[], float]) -> None:
    parts = section.parts()
    for part in parts:
        name = f"{section.name}: {part.name}"
        left = deadline - clock()
        if left < part.needs_s:
            findings.skipped[name] = f"{max(left, 0.0):.0f} s were left, it needs about {part.needs_s:.0f}"
            if left < LEAST_S:
                findings.skipped[f"{section.name}: all behind that"] = "the section's time is over"
                break
            continue
        stderr_console().print(f"{name} ...", style="dim")
        try:
            findings.figures.setdefault(section.name, {})[part.name] = dict(part.run())
        except Exception:  # a figure that cannot be had must not cost the others
            _broke(findings, name)
        findings.write()
    parts.close()  # type: ignore[attr-defined]


def _broke(findings: Report, name: str) -> None:
    findings.broken[name] = "".join(traceback.format_exc().splitlines(keepends=True)[-TOLD_LINES:])
    stderr_console().print(f"{name}: {findings.broken[name].splitlines()[-1]}", style="red", markup=False)
