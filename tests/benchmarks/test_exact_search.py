"""benchmarks/exact_search.py: a few cases, and a control that it must find."""

import json
from typing import Any

import pytest

from benchmarks import exact_search

pytestmark = pytest.mark.full


def test_no_answer_differs(capsys: pytest.CaptureFixture[str]) -> None:
    assert exact_search.main(["--cases", "3", "--seconds", "600", "--heads", "0.5", "--tiers", "1"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["cases"] == 3 and figures["differing"] == [] and figures["tokens"] > 100
    assert figures["adopted_tokens"] + figures["disk_hit_tokens"] > 0


def test_rounding_in_the_crowded_engine_alone_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output names each seed, so that it can be repeated."""
    open_engine = exact_search.open_engine

    def round_kv(model: Any, drafter: Any, setting: Any, **options: Any) -> Any:
        rounded = {} if setting is exact_search.PLAIN else {"kv_cache_dtype": "int8"}
        return open_engine(model, drafter, setting, **options | rounded)

    monkeypatch.setattr(exact_search, "open_engine", round_kv)
    assert exact_search.main(["--cases", "2", "--seconds", "600"]) == 1
    lines = capsys.readouterr().out.splitlines()
    differing = json.loads(lines[-1])["differing"]
    assert differing and all(
        any(line.startswith(f"seed {seed} differs") for line in lines) for seed in differing
    )
