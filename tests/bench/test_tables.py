"""Tables fit the terminal, and their legends what is shown."""

import pytest

from foreword.bench.tables import print_table, ratio_text


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


def test_legend_explains_the_columns_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    rows, legend = [["a", "0.5", "x" * 30]], ("speed: of b", "last: of c", "a: a mode")
    print_table("t", ("name", "speed [95 %]", "last"), rows, legend)
    text = capsys.readouterr().out
    assert "speed: of b" in text and "a: a mode" in text and "last: of c" not in text


def test_huge_bound_is_cut() -> None:
    assert ratio_text({"ratio": 1.0, "low": 0.5, "high": 1000.0}) == "1.00 [0.50, >99]"
