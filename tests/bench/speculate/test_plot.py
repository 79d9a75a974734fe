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


def test_interval_beyond_the_axes_has_an_arrow(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    module = importlib.import_module(MODULE)
    axes = importlib.import_module("matplotlib.figure").Figure().subplots()
    cells = [cell("chat", 1, throughput={"ratio": 1.0, "low": 0.1, "high": 9.0})]
    module._ratios(axes, cells, ["chat"], ["off", "auto"], 2)
    arrows = [
        (line.get_marker(), line.get_xdata()[0]) for line in axes.lines if line.get_marker() in ("<", ">")
    ]
    assert arrows == [("<", module._span(cells)[0]), (">", module._span(cells)[1])]


def test_missing_matplotlib_is_refused_before_measuring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "foreword.bench.speculate.command", None)  # which imports torch
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "speculate", "--plot", "x.png"])
    assert "pip install 'foreword[bench]'" in capsys.readouterr().err
