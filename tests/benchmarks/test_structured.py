"""The bench of conforming answers, in small."""

import json

import pytest

from benchmarks import structured


def test_a_few_schemas(capsys: pytest.CaptureFixture[str]) -> None:
    assert structured.main(["--schemas", "4", "--tokens", "600"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["same"] == 4
    assert [(tally["finished"], tally["conforming"]) for tally in figures["tallies"]] == [(4, 4), (4, 4)]


def test_what_does_not_conform_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    schema = {"title": "t", "type": "integer", "maximum": 5}
    assert structured.conforms(schema, "5")
    assert not structured.conforms(schema, "6") and not structured.conforms(schema, "5.")
    assert "maximum" in capsys.readouterr().err
