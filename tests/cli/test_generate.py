"""One answer on stdout."""

import io
import json
from contextlib import nullcontext

import pytest

from foreword.cli import generate
from foreword.cli.main import main
from tests.cli.test_chat import Echo


@pytest.fixture(autouse=True)
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "open_source", lambda args: nullcontext(Echo()))


def test_the_answer_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hello"]) == 0
    assert capsys.readouterr().out == "1 hello\n"


def test_a_prompt_from_stdin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("piped"))
    assert main(["generate", "-"]) == 0
    assert capsys.readouterr().out == "1 piped\n"


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hello", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "text": "1 hello", "finish_reason": "stop", "token_ids": None, "metrics": None,
    }  # fmt: skip


def test_an_impossible_parameter_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hello", "--temperature=-1"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("foreword generate: temperature must be between 0 and 100")
    assert printed.count("\n") == 1
