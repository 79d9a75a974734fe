"""The bench of fixed draft lengths, run small: its regime holds, and is checked."""

import json

import pytest

from benchmarks import draft_lengths
from benchmarks.script import run_script

SMALL = ["--cells", "chat x2", "--rounds", "1", "--max-tokens", "12"]


@pytest.mark.full
def test_all_modes_answer_and_fixed_lengths_draft(capsys: pytest.CaptureFixture[str]) -> None:
    assert draft_lengths.main(SMALL) == 0
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    (cell,) = result["cells"]
    assert set(cell["modes"]) == {"off again", "auto"} | {
        f"{drafter} {length}" for drafter in ("suffix", "draft") for length in (1, 2, 4, 8)
    }
    assert cell["modes"]["off again"].get("drafted", 0) == 0
    assert (
        cell["modes"]["draft 8"]["mean_draft_length"] > cell["modes"]["draft 1"]["mean_draft_length"] == 1.0
    )


@pytest.mark.full
def test_unequal_answers_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = draft_lengths.mode_figures
    monkeypatch.setattr(draft_lengths, "mode_figures", lambda pairs: figures(pairs) | {"equal": False})
    assert run_script(lambda: draft_lengths.main(SMALL)) == 1
    assert "modes with equal answers: 0, not 10" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["chat", "x8", "chat x", "chat xmany"])
def test_wrong_cells_are_refused(text: str) -> None:
    with pytest.raises(SystemExit):
        draft_lengths.main(["--cells", text])
