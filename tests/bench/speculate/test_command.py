"""`foreword bench speculate` end to end on a tiny model: tables, one JSON line, equal answers; and what makes it fail."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from foreword.bench.speculate import command as bench_speculate
from foreword.bench.speculate.local import LocalEngine
from foreword.bench.speculate.types import BenchRepetition
from foreword.cli.main import main
from tests.support.checkpoints import write_checkpoint

QUICK = (
    "--rounds",
    "1",
    "--requests",
    "2",
    "--max-tokens",
    "8",
    "--context",
    "160",
    "--kv-cache-memory",
    "3000tokens",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("speculate") / "tiny"))


def bench(capsys: pytest.CaptureFixture[str], model: str, *words: str) -> tuple[int, dict[str, Any], str]:
    code = main(["bench", "speculate", "--model", model, "--max-num-seqs", "4", *QUICK, *words])
    text = capsys.readouterr().out
    return code, json.loads(text.splitlines()[-1], parse_constant=pytest.fail), text


def test_a_run(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    words = (
        "--speculate",
        "ngram",
        "--categories",
        "repeat,agent,random",
        "--concurrency",
        "1,64",
        "--fixed",
        "1,2",
        "--plain",
    )
    code, result, text = bench(capsys, model, *words, "--json", str(file))
    assert (code, result["equal"], result["answered_all"]) == (0, True, True)
    assert result["modes"] == ["off", "auto", "fixed 1", "fixed 2", "plain"]
    cells = {(cell["category"], cell["concurrency"], cell["cache_full"]): cell for cell in result["cells"]}
    assert set(cells) == {
        (name, load, False) for name in ("repeat", "agent", "random") for load in (1, 4)
    } | {("random", 4, True)}
    for cell in cells.values():
        auto = cell["modes"]["auto"]
        assert {
            "throughput",
            "first_token",
            "slowest_request",
            "tokens_per_step",
            "stage_us_per_token",
            "equal",
        } <= set(auto)
        assert cell["auto_to_best_fixed"]["best"] in ("off", "fixed 1", "fixed 2")
        assert cell["modes"]["off"]["drafters"] == cell["modes"]["plain"]["drafters"] == {}
    assert cells["agent", 1, False]["requests"] > 2, "an agent has several turns"
    assert result["worst"]["auto"]["throughput"]["ratio"] == min(
        cell["modes"]["auto"]["throughput"]["ratio"] for cell in cells.values()
    )
    assert json.loads(file.read_text())["cells"] == result["cells"]
    assert "4 at once, in a cache too small" in text


def test_replayed_answers_are_accepted_as_asked_for(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--replay-acceptance",
        "0,1",
        "--categories",
        "chat",
        "--concurrency",
        "2",
        "--no-full-cache",
        "--fixed",
        "3",
    )
    code, result, _ = bench(capsys, model, *words)
    assert (code, result["equal"]) == (0, True)
    found = {cell["category"]: cell["modes"]["fixed 3"] for cell in result["cells"]}
    assert set(found) == {"replay 0", "replay 1", "replay mixed"}
    assert found["replay 0"]["acceptance"] == 0.0
    assert found["replay 1"]["acceptance"] == 1.0
    assert 0 < found["replay mixed"]["acceptance"] < 1
    assert found["replay 1"]["tokens_per_step"] > 2


def test_answers_that_differ_are_a_failure(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = LocalEngine.run

    def wrong(self: LocalEngine, *given: Any) -> BenchRepetition:
        found = run(self, *given)
        if given[1].name == "auto":
            found.results[0].output = (1, 2, 3)
        return found

    monkeypatch.setattr(LocalEngine, "run", wrong)
    code, result, text = bench(
        capsys, model, "--speculate", "ngram", "--categories", "chat", "--concurrency", "1"
    )
    assert (code, result["equal"]) == (1, False)
    assert "NOT EQUAL" in text


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--categories", "chat,sport"), "'sport' is none of chat"),
        (("--concurrency", "0"), "--concurrency must be whole numbers"),
        (("--fixed", "two"), "--fixed must be whole numbers"),
        (("--modes", "draft", "--speculate", "ngram"), "'draft' is none of auto"),
        (("--replay-acceptance", "1.5"), "numbers from 0 to 1"),
        (("--replay-acceptance", "1", "--speculate", "ngram"), "needs the drafter replay"),
        (("--base-url", "http://box", "--fixed", "1"), "leave out --base-url"),
    ],
)
def test_a_wrong_command_line(
    model: str, words: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "speculate", "--model", model, *words]) == 2
    assert part in capsys.readouterr().err


def test_quick_gives_way_to_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[argparse.Namespace] = []

    def look(args: argparse.Namespace) -> dict[str, Any]:
        seen.append(args)
        return {"equal": True, "answered_all": True, "cells": [], "worst": {}}

    monkeypatch.setattr(bench_speculate, "_local", look)
    assert main(["bench", "speculate", "--quick", "--rounds", "5"]) == 0
    assert (seen[0].rounds, seen[0].requests, seen[0].concurrency) == (5, 2, "1,4")
