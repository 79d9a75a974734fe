"""Verdicts of the soak benchmark on fake readings, and its traffic."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.soak import (
    SoakFindings,
    SoakReading,
    _endless,
    acceptance_change,
    memory_growth,
    resident_bytes,
    verdicts,
)
from foreword.bench.workloads import PromptBudget

ROOM = PromptBudget(200, 16, 3.0, 4.0, range(10, 60), ("def f(value):\n    return value",))


def readings(memory: list[int], share: list[float]) -> list[SoakReading]:
    """100 tokens drafted between two readings, of which a share is accepted."""
    accepted = itertools.accumulate(int(100 * one) for one in share)
    return [
        SoakReading(size, 100 * (i + 1), got)
        for i, (size, got) in enumerate(zip(memory, accepted, strict=True))
    ]


def good() -> SoakFindings:
    return SoakFindings(answered=9, compared=3, readings=readings([50, 90, 100, 100, 100, 101], [0.5] * 6))


def test_good_findings_pass_every_verdict() -> None:
    assert all(holds for holds, _ in verdicts(good()).values())


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("all answered", {"errors": {"503": 1}}),
        ("no other token", {"different": [4]}),
        ("no other token", {"compared": 0}),
        ("memory flat", {"readings": readings([50, 90, 100, 100, 110, 110], [0.5] * 6)}),
        ("acceptance not decaying", {"readings": readings([100] * 6, [0.5, 0.5, 0.5, 0.4, 0.4, 0.4])}),
        ("acceptance not decaying", {"readings": [SoakReading(100, 0, 0)] * 6}),
    ],
)
def test_bad_figure_fails_its_verdict(name: str, changed: dict[str, object]) -> None:
    found = good()
    for key, value in changed.items():
        setattr(found, key, found.errors + type(found.errors)(value) if key == "errors" else value)
    assert [check for check, (holds, _) in verdicts(found).items() if not holds] == [name]


def test_short_run_has_no_memory_verdict() -> None:
    assert memory_growth([]) is None and acceptance_change([]) is None
    assert not verdicts(SoakFindings(answered=1, compared=1))["memory flat"][0]


def test_resident_bytes_include_child_processes() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        children = 0
        while children < 4 << 20:  # it is started, and has read its code
            children = sum(resident_bytes(int(pid)) for pid in _children(child.pid))
        assert resident_bytes(child.pid) > children > 0
        child.communicate(b"\n")
    assert resident_bytes(child.pid) == 0


def _children(pid: int) -> list[str]:
    return [one for file in Path(f"/proc/{pid}/task").glob("*/children") for one in file.read_text().split()]


def test_traffic_is_mixed() -> None:
    work = list(itertools.islice(_endless(ROOM), 60))
    assert {mode.name for _, _, mode in work} == {"auto", "off", "at most two"}
    assert {script.num_turns for _, script, _ in work} == {1, 4}
    assert len({script.turns for _, script, _ in work}) > 40
    assert any(script.prediction for _, script, _ in work) and any(
        script.temperature == 0 for _, script, _ in work
    )
