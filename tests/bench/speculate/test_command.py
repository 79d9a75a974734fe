"""`foreword bench speculate` on a tiny model: tables, one JSON line, equal answers, exit codes."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from foreword.bench.speculate import command
from foreword.bench.speculate.local import LocalEngine
from foreword.bench.speculate.types import BenchRepetition
from foreword.cli.main import main
from tests.support.checkpoints import write_checkpoint

QUICK = "--rounds 1 --requests 2 --max-tokens 8 --context 160 --kv-cache-memory 3000tokens --max-num-seqs 4"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("speculate") / "tiny"))


def bench(capsys: pytest.CaptureFixture[str], model: str, *words: str) -> tuple[int, dict[str, Any], str]:
    code = main(["bench", "speculate", "--model", model, *QUICK.split(), *words])
    text = capsys.readouterr().out
    return code, json.loads(text.splitlines()[-1], parse_constant=pytest.fail), text


@pytest.mark.full
def test_bench_speculate_measures_every_case(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "result.json"
    words = "--speculate ngram --categories repeat,agent,random --concurrency 1,64 --fixed 1,2 --plain"
    code, result, text = bench(capsys, model, *words.split(), "--json", str(file))
    assert (code, result["equal"], result["answered_all"]) == (0, True, True)
    assert result["modes"] == ["off", "auto", "fixed 1", "fixed 2", "plain"]
    cells = {(cell["category"], cell["concurrency"], cell["cache_full"]): cell for cell in result["cells"]}
    fits = {(name, load, False) for name in ("repeat", "agent", "random") for load in (1, 4)}
    assert set(cells) == fits | {("random", 4, True)}
    ratios = {"throughput", "first_token", "slowest_request"}
    for cell in cells.values():
        assert ratios | {"tokens_per_step", "stage_us_per_token", "equal"} <= set(cell["modes"]["auto"])
        assert cell["auto_to_best_fixed"]["best"] in ("off", "fixed 1", "fixed 2")
        assert cell["modes"]["off"]["drafters"] == cell["modes"]["plain"]["drafters"] == {}
    assert cells["agent", 1, False]["requests"] > 2, "an agent has several turns"
    assert result["worst"]["auto"]["throughput"]["ratio"] == min(
        cell["modes"]["auto"]["throughput"]["ratio"] for cell in cells.values()
    )
    assert json.loads(file.read_text())["cells"] == result["cells"]
    assert "4 at once, in a cache too small" in text


def test_replayed_drafts_have_the_set_acceptance(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--replay-acceptance 0,1 --categories chat --concurrency 2 --no-full-cache --fixed 3"
    code, result, _ = bench(capsys, model, *words.split())
    assert (code, result["equal"]) == (0, True)
    figures = {cell["category"]: cell["modes"]["fixed 3"] for cell in result["cells"]}
    assert set(figures) == {"replay 0", "replay 1", "replay mixed"}
    assert (figures["replay 0"]["acceptance"], figures["replay 1"]["acceptance"]) == (0.0, 1.0)
    assert 0 < figures["replay mixed"]["acceptance"] < 1
    assert figures["replay 1"]["tokens_per_step"] > 2


def test_different_outputs_fail_the_benchmark(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = LocalEngine.run

    def run_wrong(self: LocalEngine, *args: Any) -> BenchRepetition:
        repetition = run(self, *args)
        if args[1].name == "auto":
            repetition.results[0].output = (1, 2, 3)
        return repetition

    monkeypatch.setattr(LocalEngine, "run", run_wrong)
    words = "--speculate ngram --categories chat --concurrency 1"
    code, result, text = bench(capsys, model, *words.split())
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
def test_invalid_flags_are_refused(
    model: str, words: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "speculate", "--model", model, *words]) == 2
    assert part in capsys.readouterr().err


def test_quick_keeps_explicit_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[argparse.Namespace] = []

    def measure(args: argparse.Namespace) -> dict[str, Any]:
        received.append(args)
        return {"equal": True, "answered_all": True, "cells": [], "worst": {}}

    monkeypatch.setattr(command, "_local", measure)
    assert main(["bench", "speculate", "--quick", "--rounds", "5"]) == 0
    (args,) = received
    assert (args.rounds, args.requests, args.concurrency) == (5, 2, "1,4")
