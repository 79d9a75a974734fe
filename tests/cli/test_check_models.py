"""`foreword check --models`: plans, what fits together, and what is wrong with a model."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.cli.check_models import sets_that_fit
from foreword.cli.main import main
from foreword.config.models_file import ModelEntry
from foreword.config.options import Config
from foreword.demo import MODEL
from foreword.fleet.memory import ModelPlan
from foreword.planning.memory_plan import MemoryPart

FILE = """
memory_limit: 1200MiB
models:
  demo:
    pinned: true
    draft_model: demo
    variants:
      creative: {temperature: 1.2}
  vision: {model: demo-vision, keep_alive: -1, preload: true, cpus: "%d"}
  third: {model: demo, served_model_name: other, threads: 3, speculate: off}
"""


def check(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, *words: str) -> tuple[int, str]:
    file = tmp_path / "models.yaml"
    file.write_text(text)
    code = main(["check", "--models", str(file), *words])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.mark.full
def test_replicas_and_models_of_other_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A router needs a model's config and tokenizer, but not its weights."""
    without_weights = tmp_path / "demo"
    shutil.copytree(MODEL, without_weights, ignore=shutil.ignore_patterns("*.safetensors"))
    file = "models:\n  a: {model: %s, replicas: 0, replica_urls: [http://127.0.0.1:9], pinned: true}\n"
    file += "  b: {model: demo, replicas: 2, variants: {brief: {max_tokens: 3}}}\n"
    code, text = check(tmp_path, capsys, file % without_weights, "--engine-key", "a key of the engines")
    assert code == 1 and text.startswith("no   a: replica http://127.0.0.1:9: no connection"), text
    assert text.count("no   ") == 1 and "ok   a: engines of http://127.0.0.1:9; pinned\n" in text
    assert re.search(r"ok   b: \S+ GiB on cpu for 2 replicas; context 1024 tokens; ", text)
    assert text.count("memory of") == 1 and "all fit together" in text


def test_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cpu = min(os.sched_getaffinity(0))
    code, text = check(tmp_path, capsys, FILE % cpu)
    assert code == 0
    drafters = "drafters grammar, prediction, suffix, draft"
    assert re.search(
        rf"^ok   demo: \d+\.\d MiB on cpu; context 1024 tokens; {drafters}; 1 thread on", text, re.M
    )
    assert "pinned; variants demo:creative\n" in text
    assert re.search(r"\n       draft model +[0-9.]+ KiB  bfloat16 ", text)
    assert f"1 thread on cores {cpu}; loaded at the start, stays until memory is needed\n" in text
    assert re.search(
        r"speculation off; up to 3 threads .*; unloaded after 300 s .*; also called other\n", text
    )
    assert text.endswith(
        "ok   memory of cpu: models may use 1.17 GiB; these fit together:\n"
        "       demo, vision\n       demo, third\n"
    )


@pytest.mark.full
def test_all_models_may_fit_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "memory_limit: 2GiB\nmodels: {demo: , demo-vision: }"
    assert "models may use 2.00 GiB; all fit together, in " in check(tmp_path, capsys, text)[1]
    text = check(tmp_path, capsys, text, "--max-loaded-models", "1")[1]
    assert text.endswith("at most 1 at a time; these fit together:\n       demo\n       demo-vision\n")


@pytest.mark.full
def test_models_that_never_fit_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "memory_limit: 600MiB\nmodels: {demo: {pinned: yes}, a: {model: demo}, b: {model: demo-vision}}"
    code, text = check(tmp_path, capsys, text)
    assert code == 1
    assert "no   memory: model a can never be loaded beside the pinned demo: 0.6" in text
    assert "\nmodel b can never be loaded beside the pinned demo: 0." in text
    assert "models may use 0.59 GiB" in text


@pytest.mark.full
def test_a_broken_model_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(MODEL, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    code, text = check(tmp_path, capsys, f"models: {{demo: , broken: {{model: {broken}}}}}")
    assert code == 1
    assert "no   broken: model: " in text and "no   memory: model broken: " in text


def test_typos_end_with_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = check(tmp_path, capsys, "models:\n  demo: {pined: yes}")
    assert code == 2
    assert "line 2: unknown option 'pined'; did you mean pinned?" in text


def plan(name: str, size: int, pinned: bool = False) -> ModelPlan:
    entry = ModelEntry(name, Config(), pinned=pinned)
    return ModelPlan(entry, "cpu", (MemoryPart("weights", size),), None)  # type: ignore[arg-type]


def test_sets_that_fit() -> None:
    plans = [plan("a", 4), plan("b", 3, pinned=True), plan("c", 3), plan("d", 2)]
    assert sets_that_fit(plans, 10) == [("a", "b", "c"), ("a", "b", "d"), ("b", "c", "d")]
    assert sets_that_fit(plans, 9) == [("a", "b", "d"), ("b", "c", "d")]
    assert sets_that_fit(plans, 10, max_loaded=2) == [("a", "b"), ("b", "c"), ("b", "d")]
    assert sets_that_fit(plans, 3) == [("b",)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 30))
def test_sets_are_maximal(sizes: list[int], limit: int) -> None:
    plans = {str(index): plan(str(index), size) for index, size in enumerate(sizes)}
    sets = [{*names} for names in sets_that_fit(list(plans.values()), limit)]
    for names in sets:
        total = sum(plans[name].num_bytes for name in names)
        assert total <= limit
        assert all(total + plans[name].num_bytes > limit for name in plans.keys() - names)
    assert not any(names < larger for names in sets for larger in sets)
