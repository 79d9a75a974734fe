"""The benchmarks end to end on a tiny model: a table, one JSON line, equal answers. Never a figure that is too good."""

import json
import math
from typing import Any

import pytest

from foreword.bench import latency as bench_startup
from foreword.bench import latency as bench_step
from foreword.bench.common import PromptExample
from foreword.bench.latency import ModeSamples, figures_by_category
from foreword.cli.main import main
from foreword.config.options import Config
from tests.support.checkpoints import write_checkpoint

PROMPTS = [{"kind": "a", "prompt": "the thing in the thing"}, {"kind": "b", "prompt": "on and on and on"}]


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags for a model that costs nothing."""
    folder = tmp_path_factory.mktemp("bench")
    model = write_checkpoint(folder / "tiny")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, PROMPTS)))
    return [
        "--model",
        str(model),
        "--prompts",
        str(prompts),
        "--max-tokens",
        "6",
        "--rounds",
        "1",
        "--kv-cache-memory",
        "8000tokens",
    ]


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["bench", *words])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 3
    return code, json.loads(lines[-1], parse_constant=pytest.fail)


def test_latency(
    common: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_step, "STEPS", 3)
    code, result = bench(capsys, "latency", "--skip-startup", *common)
    assert code == 0
    assert result["equal"] is True
    assert set(result["kinds"]) == {"a", "b"}
    assert set(result["kinds"]["a"]) == {"off", "auto"}
    assert result["kinds"]["a"]["off"]["ratio"] == 1.0
    assert "acceptance" not in result["kinds"]["a"]["off"]
    assert set(result["step_overhead_us"]) == {"1", "64"}
    assert result["step_overhead_us"]["64"]["total"] > 0


def test_throughput(common: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, result = bench(capsys, "throughput", "--num-requests", "6", "--concurrency", "3", *common)
    assert code == 0
    assert result["equal"] is True
    assert set(result["modes"]) == {"off", "auto"}
    assert 0 < result["tokens"] <= 36


def test_serve(common: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, result = bench(capsys, "serve", "--num-requests", "6", "--concurrency", "3", *common)
    assert code == 0
    assert (result["answered_all"], result["equal"]) == (True, True)
    assert result["modes"]["auto"]["e2e_ms"]["p50"] > 0


def test_start_up(common: list[str]) -> None:
    spans = bench_startup.measure_startup_s(Config(model=common[1], kv_cache_memory="8000tokens"))
    assert spans["total"] == pytest.approx(spans["until ready"] + spans["first token"])
    assert 0 <= spans["engine: weights"] < spans["until ready"]


def test_figures_by_kind_are_of_the_same_prompts() -> None:
    plain, fast = (
        ModeSamples(seconds=[2.0, 4.0], tokens=12),
        ModeSamples(seconds=[1.0, 2.0], tokens=12, drafted=8, accepted=6.0),
    )
    fast.verify_steps, fast.emitted = 4, 10.0
    assert figures_by_category({"edit": {"off": plain, "ngram": fast}}, ("off", "ngram")) == {
        "edit": {
            "off": {"tokens_per_second": 2.0, "ratio": 1.0},
            "ngram": {
                "tokens_per_second": 4.0,
                "ratio": 2.0,
                "acceptance": 0.75,
                "mean_acceptance_length": 2.5,
            },
        }
    }


def test_step_overhead_leaves_the_forward_pass_out(
    common: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_step, "STEPS", 3)
    config = Config(model=common[1], kv_cache_memory="8000tokens")
    spans = bench_step.measure_step_overhead(config, [PromptExample("a", "the thing")], 2)
    assert "forward" not in spans
    assert all(math.isfinite(span) and span >= 0 for span in spans.values())
    assert spans["total"] >= max(span for stage, span in spans.items() if stage != "total") / 2
