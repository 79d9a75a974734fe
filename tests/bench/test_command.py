"""`foreword bench latency|throughput|serve` on a tiny model: a table, one JSON line, equal answers."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from foreword.bench import latency
from foreword.bench.engine import LocalEngine
from foreword.bench.workloads import Conversation
from foreword.cli.main import main
from foreword.config.options import Config
from foreword.metrics.request_stats import SpecDecodeStats
from tests.support.checkpoints import write_checkpoint

PROMPTS = [{"kind": "a", "prompt": "the thing in the thing"}, {"kind": "b", "prompt": "on and on and on"}]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a tiny model and a short run."""
    folder = tmp_path_factory.mktemp("bench")
    model = write_checkpoint(folder / "tiny")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, PROMPTS)))
    sizes = ["--max-tokens", "6", "--rounds", "1", "--kv-cache-memory", "8000tokens"]
    return ["--model", str(model), "--prompts", str(prompts), *sizes]


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["bench", *words])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 3
    return code, json.loads(lines[-1], parse_constant=pytest.fail)


def test_bench_latency_gives_equal_answers_and_overhead(
    flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latency, "STEPS", 3)
    code, result = bench(capsys, "latency", "--skip-startup", *flags)
    assert (code, result["equal"]) == (0, True)
    assert set(result["kinds"]) == {"a", "b"}
    assert set(result["kinds"]["a"]) == {"off", "suffix", "text", "auto"}
    assert result["kinds"]["a"]["off"]["ratio"] == 1.0
    assert "acceptance" not in result["kinds"]["a"]["off"]
    assert set(result["step_overhead_us"]) == {"1", "64"}
    assert result["step_overhead_us"]["64"]["total"] > 0


def test_bench_throughput_gives_equal_answers(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, result = bench(capsys, "throughput", "--num-requests", "6", "--concurrency", "3", *flags)
    assert (code, result["equal"]) == (0, True)
    assert set(result["modes"]) == {"off", "suffix", "text", "auto"}
    assert 0 < result["tokens"] <= 36


@pytest.mark.parametrize("kind", ["latency", "throughput"])
def test_drafts_with_speculation_off_are_no_measurement(
    kind: str, flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter goes on although the request says off: answers stay equal, but nothing is compared."""
    stats = SpecDecodeStats()
    stats.add(2, 1, 2)
    run = LocalEngine.run
    monkeypatch.setattr(LocalEngine, "run", lambda *args: replace(run(*args), draft_stats={"ngram": stats}))
    monkeypatch.setattr("foreword.bench.latency.OVERHEAD_REQUESTS", ())
    more = ["--skip-startup"] if kind == "latency" else ["--num-requests", "2", "--concurrency", "2"]
    assert main(["bench", kind, *flags, *more]) == 1
    assert "off: draft tokens verified: 2, not 0" in capsys.readouterr().err


@pytest.mark.full
def test_bench_serve_gives_equal_answers(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, result = bench(capsys, "serve", "--num-requests", "6", "--concurrency", "3", *flags)
    assert (code, result["answered_all"], result["equal"]) == (0, True, True)
    assert result["modes"]["auto"]["e2e_ms"]["p50"] > 0


@pytest.mark.full
def test_startup_stages_add_up(flags: list[str]) -> None:
    seconds = latency.measure_startup_s(Config(model=flags[1], kv_cache_memory="8000tokens"))
    assert seconds["total"] == pytest.approx(seconds["until ready"] + seconds["first token"])
    assert 0 <= seconds["engine: weights"] < seconds["until ready"]


def test_step_overhead_excludes_the_forward_pass(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "STEPS", 3)
    config = Config(model=flags[1], kv_cache_memory="8000tokens")
    stages = latency.measure_step_overhead(config, [Conversation(("the thing",), category="a")], 2)
    assert "forward" not in stages
    assert all(math.isfinite(us) and us >= 0 for us in stages.values())
    assert stages["total"] >= max(us for stage, us in stages.items() if stage != "total") / 2
