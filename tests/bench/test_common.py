"""Helpers of all benchmarks."""

import math

import pytest

from foreword.bench.common import (
    expected_weight,
    geometric_mean_ratio,
    modes,
    print_table,
    ratio_text,
    seconds_per_token,
    speed_ratio,
    verdict,
    with_all_drafters,
)
from foreword.config.options import Config


def test_modes_omit_drafters_without_input() -> None:
    assert modes(()) == ("off",)
    assert modes(("prediction", "suffix")) == ("off", "auto")
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


def test_interval_is_students_t() -> None:
    ratio = geometric_mean_ratio([math.exp(x) for x in (0.0, 0.1, 0.2)])
    assert ratio is not None and ratio.low is not None and ratio.high is not None
    assert ratio.value == pytest.approx(math.exp(0.1))
    reach = 4.303 * 0.1 / math.sqrt(3)  # two degrees of freedom
    assert (math.log(ratio.low), math.log(ratio.high)) == pytest.approx((0.1 - reach, 0.1 + reach))


def test_one_round_has_no_interval() -> None:
    one = geometric_mean_ratio([2.0])
    assert one is not None and one.as_dict() == {"ratio": pytest.approx(2.0)}
    assert geometric_mean_ratio([]) is None


def test_verdict_needs_an_interval_without_one() -> None:
    assert verdict(speed_ratio([2.0, 2.2], [1.0, 1.1])) == "faster"
    assert verdict(speed_ratio([1.0, 1.1], [2.0, 2.2])) == "slower"
    assert verdict(speed_ratio([2.0, 1.0], [1.0, 2.0])) == "unclear"
    assert verdict(speed_ratio([2.0], [1.0])) == verdict(speed_ratio([], [])) == "unclear"
    assert ratio_text({"ratio": 1.0, "low": 0.5, "high": 1000.0}) == "1.00 [0.50, >99]"


def test_legend_explains_the_columns_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    rows, legend = [["a", "0.5", "x" * 30]], ("speed: of b", "last: of c", "a: a mode")
    print_table("t", ("name", "speed [95 %]", "last"), rows, legend)
    text = capsys.readouterr().out
    assert "speed: of b" in text and "a: a mode" in text and "last: of c" not in text


def test_single_drafter_is_a_mode_by_its_name() -> None:
    assert modes(("trigram",)) == ("off", "trigram")
    assert modes(("grammar", "prediction", "suffix")) == ("off", "auto")
    assert modes(("suffix", "trigram")) == ("off", "suffix", "trigram", "auto")
