"""The plot of `foreword bench speculate`, and the error where matplotlib is missing."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from foreword.cli.main import main

MODULE = "foreword.bench.speculate.plot"


def cell(category: str, concurrency: int, **auto: Any) -> dict[str, Any]:
    stages = {"stage_us_per_token": {"forward": 90.0, "draft": 10.0}}
    modes = {"off": stages, "auto": {**stages, "throughput": {"ratio": 1.5}, **auto}}
    return {
        "category": category,
        "concurrency": concurrency,
        "cache_full": False,
        "requests": 4,
        "modes": modes,
        "errors": [],
    }


def test_draw_writes_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw = importlib.import_module(MODULE).draw
    cells = [
        cell("chat", 1, throughput={"ratio": 0.9, "low": 0.8, "high": 1.1}),
        cell("edit", 1, acceptance_by_position=[0.9, 0.5]),
        cell("chat", 4),
        {**cell("chat", 4), "cache_full": True},
        {**cell("edit", 4), "modes": {}, "errors": ["503"]},
    ]
    file = tmp_path / "plot.png"
    machine = {"cpu": "a processor", "cores": 2, "isa": ["avx2"], "date": "2026-11-22T12:00:00+00:00"}
    draw(
        {"cells": cells, "modes": ["off", "auto"], "model": "demo", "rounds": 5, "complete": True, **machine},
        file,
    )
    assert file.read_bytes().startswith(b"\x89PNG")


def test_missing_matplotlib_is_refused_before_measuring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    assert main(["bench", "speculate", "--plot", "x.png"]) == 2
    assert "foreword[bench]" in capsys.readouterr().err
