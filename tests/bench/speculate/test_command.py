"""`foreword bench speculate` on a tiny model: tables, one JSON line, equal answers, exit codes."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foreword.bench.engine import LocalEngine
from foreword.bench.measurement import BenchRepetition
from foreword.bench.speculate import command
from foreword.bench.workloads import Conversation
from foreword.cli.main import main
from foreword.errors import ConfigError
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

    def plan(args: argparse.Namespace, *_: Any) -> None:
        received.append(args)
        raise ConfigError("enough")

    monkeypatch.setattr(command, "_local", plan)
    assert main(["bench", "speculate", "--quick", "--requests", "9"]) == 2
    (args,) = received
    assert (args.rounds, args.requests, args.concurrency, args.full_cache) == (5, 9, "1,4", False)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """Three prompts in two categories, one a conversation."""
    messages = [{"role": "user", "content": "on"}, {"role": "assistant", "content": "and"}]
    messages.append({"role": "user", "content": "the end"})
    lines: list[dict[str, Any]] = [
        {"category": "own, first", "prompt": "the thing in the thing"},
        {"category": "own, first", "turns": ["on and on", "and the end"]},
        {"category": "b", "messages": messages},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return str(file)


def test_own_prompts_are_measured_by_category(
    model: str, prompts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--rounds 2 --max-tokens 8 --kv-cache-memory 3000tokens --speculate ngram --concurrency 1,4"
    words = ["--model", model, "--prompts", prompts, "--no-full-cache", *sizes.split()]
    assert main(["bench", "speculate", *words]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    requests = {(cell["category"], cell["concurrency"]): cell["requests"] for cell in result["cells"]}
    assert requests == {("own, first", 1): 3, ("b", 1): 1, ("own, first", 2): 3}, "no prompt twice in a round"
    assert {"low", "high"} < set(result["cells"][0]["modes"]["auto"]["throughput"])
    assert "3 cells in modes off; ngram, 2 rounds" in err, "the only drafter names the mode `auto`"
    assert (
        "ngram against off: " in out
        and "auto" not in out.partition("{")[0]
        and result["speculate"] == "ngram"
    )
    assert "of 3 cells." in out


def test_own_prompt_that_does_not_fit_is_named(
    model: str, prompts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--max-tokens 250 --max-model-len 255 --kv-cache-memory 3000tokens"
    assert main(["bench", "speculate", "--model", model, "--prompts", prompts, *words.split()]) == 2
    assert "of line 1 and --max-tokens 250 exceed the context of 255" in capsys.readouterr().err


def test_failed_cell_costs_no_other(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = command.make_conversations

    def make_too_long(category: str, *args: Any, **more: Any) -> tuple[Conversation, ...]:
        longer = {"prompt_ids": (5,) * 4000} if category == "json" else {}
        return tuple(replace(each, **longer) for each in make(category, *args, **more))

    monkeypatch.setattr(command, "make_conversations", make_too_long)
    words = "--speculate ngram --categories chat,json,random --concurrency 1 --no-full-cache"
    code, result, _ = bench(capsys, model, *words.split())
    assert (code, result["complete"]) == (1, True)
    assert [cell["category"] for cell in result["cells"]] == ["chat", "random"]
    assert list(result["errors"]) == ["json x1"]
