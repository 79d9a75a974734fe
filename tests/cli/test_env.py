"""`foreword env`."""

import json

import pytest

from foreword.cli.main import main


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"versions", "hardware", "backends"}
    assert found["versions"]["torch"][0].isdigit()
    assert any(text.startswith("available") for text in found["backends"].values())


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    assert capsys.readouterr().out.startswith("versions:\n  python")
