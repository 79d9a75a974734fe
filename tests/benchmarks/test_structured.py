"""benchmarks/structured.py with few schemas."""

import json

import pytest

from benchmarks import structured


def test_structured_answers_conform(capsys: pytest.CaptureFixture[str]) -> None:
    """The number of finished answers depends on the demo and on the instruction set."""
    code = structured.main(["--schemas", "4", "--tokens", "600"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    on, off = ((tally["finished"], tally["conforming"]) for tally in figures["tallies"])
    assert figures["same"] == 4 and on == off and on[0] == on[1] > 0
    assert code == (0 if on[0] == 4 else 1)


def test_nonconforming_answer_fails(capsys: pytest.CaptureFixture[str]) -> None:
    schema = {"title": "t", "type": "integer", "maximum": 5}
    assert structured.conforms(schema, "5")
    assert not structured.conforms(schema, "6") and not structured.conforms(schema, "5.")
    assert "maximum" in capsys.readouterr().err
