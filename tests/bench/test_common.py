"""Helpers of all benchmarks."""

import json

import pytest

from foreword.bench.common import (
    expected_weight,
    modes,
    print_json,
    print_table,
    seconds_per_token,
    with_all_drafters,
)
from foreword.config.options import Config


def test_modes_omit_drafters_without_input() -> None:
    assert modes(()) == ("off",)
    assert modes(("ngram",)) == modes(("prediction", "suffix")) == ("off", "auto")
    assert modes(("prediction", "suffix", "draft")) == ("off", "suffix", "draft", "auto")


def test_demo_gets_its_draft_model() -> None:
    assert with_all_drafters(Config()).drafter_names() == ("grammar", "prediction", "suffix", "draft")
    assert with_all_drafters(Config(model="other")).drafter_names() == ("grammar", "prediction", "suffix")
    assert with_all_drafters(Config(speculate="off")).drafter_names() == ()


def test_expected_weight_counts_steps() -> None:
    assert expected_weight(100, 1) == 100
    assert expected_weight(100, 1, prompt_tokens=160) == 110
    assert 25 < expected_weight(100, 4) < 100, "four at once share steps, which take longer"


def test_seconds_per_token_ignores_the_first_answer() -> None:
    counts = iter((0, 5))
    assert seconds_per_token(lambda: next(counts)) >= 0
    assert next(counts, None) is None, "two answers"


def test_table_is_followed_by_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("title", ("a", "b"), [["1", "2"]])
    print_json({"bench": "x"})
    lines = capsys.readouterr().out.split()
    assert lines[0] == "title"
    assert json.loads(" ".join(lines[lines.index('{"machine":') :]))["bench"] == "x"
    with pytest.raises(ValueError, match="not JSON compliant"):
        print_json({"ratio": float("nan")})


def test_table_leaves_out_columns_that_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    columns = ("name", *(f"column {number}" for number in range(12)))
    print_table("wide", columns, [["x", *("0.5 [0.4, 0.6]" for _ in range(12))]], ("a legend",))
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    assert "column 3" in text.split("left out")[0]
    assert "column 11" in text.split("left out")[1]
    assert text.endswith("a legend\n")


def test_table_fits_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    print_table("t", ("name", "first", "second", "third"), [["a", "0.5 [0.4, 0.6]", "0.5 [0.4, 0.6]", "x"]])
    text = capsys.readouterr().out
    assert "0.5 [0.4, 0.6]" in text
    assert "second, third" in text
