"""Every script in benchmarks/ can be imported: a name that the package removes fails here. Some start."""

import importlib
import os
from pathlib import Path
from unittest import mock

import pytest

import benchmarks

FOLDER = Path(benchmarks.__path__[0])
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))
PEERS = ("llama_cpp", "nncf", "openvino")  # in the environments of the peers alone


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_can_be_imported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))  # as for `python benchmarks/NAME.py`
    try:
        with mock.patch.dict(os.environ):  # some set variables of a peer
            importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in PEERS:
            raise
        pytest.skip(f"{error.name} is not installed")


@pytest.mark.parametrize("name", ["peers", "soak", "speculate_peers"])
def test_script_starts(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr("sys.argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(f"benchmarks.{name}").main()
    assert "usage:" in capsys.readouterr().out
