"""`foreword generate`: one answer on stdout."""

import io
import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from foreword.cli import generate
from foreword.cli.client import ChatResult
from foreword.cli.main import main
from foreword.core.params import SamplingParams
from tests.cli.test_chat import Echo
from tests.support.images import data_url, png


@pytest.fixture(autouse=True)
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "open_backend", lambda args: nullcontext(Echo()))


def test_prints_only_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hello"]) == 0
    assert capsys.readouterr().out == "1 hello\n"


def test_ended_repetition_is_reported_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "loop"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "1 loop\n"
    assert (
        printed.err
        == "foreword generate: the answer repeated itself and was ended; --on-runaway warn lets it go on\n"
    )


def test_note_of_an_early_end_begins_its_line_in_a_pipe_of_both_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writing = os.pipe()
    with os.fdopen(os.dup(writing), "w") as out, os.fdopen(writing, "w", buffering=1) as err:
        monkeypatch.setattr("sys.stdout", out)
        monkeypatch.setattr("sys.stderr", err)
        assert main(["generate", "cut", "--max-tokens", "7"]) == 0
    with os.fdopen(reading) as merged:
        lines = merged.read().splitlines()
    note = "foreword generate: the answer was cut off at --max-tokens 7 or the end of the context"
    assert lines == ["1 cut", note]


def test_prompt_from_stdin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("piped"))
    assert main(["generate", "-"]) == 0
    assert capsys.readouterr().out == "1 piped\n"


def test_images_come_before_the_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    received: list[Any] = []
    monkeypatch.setattr(
        Echo,
        "answer",
        lambda self, prompt, params: received.append(prompt) or ChatResult("", "stop", None, None),
    )
    first, second = tmp_path / "a.png", tmp_path / "b.jpg"
    first.write_bytes(png("red"))
    second.write_bytes(b"no picture; the server will say so")
    assert main(["generate", "what is it?", "--json", "--image", str(first), "--image", str(second)]) == 0
    ((message,),) = received
    assert [part["type"] for part in message["content"]] == ["image_url", "image_url", "text"]
    assert message["content"][0]["image_url"]["url"] == data_url(png("red"))
    assert message["content"][1]["image_url"]["url"].startswith("data:image/jpeg;base64,")
    capsys.readouterr()
    assert main(["generate", "x", "--image", str(tmp_path / "nowhere")]) == 2
    assert "--image" in capsys.readouterr().err
    assert main(["generate", "x", "--raw", "--image", str(first)]) == 2
    assert "--raw" in capsys.readouterr().err


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hello", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "text": "1 hello", "finish_reason": "stop", "token_ids": None, "metrics": None,
    }  # fmt: skip


def test_prediction_is_read_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    received: list[SamplingParams] = []
    monkeypatch.setattr(
        Echo,
        "answer",
        lambda self, prompt, params: received.append(params) or ChatResult("", "stop", None, None),
    )
    (tmp_path / "old.txt").write_text("old text\n")
    assert main(["generate", "hello", "--json", "--prediction", str(tmp_path / "old.txt")]) == 0
    assert received[0].prediction == "old text\n"
    assert main(["generate", "hello", "--prediction", str(tmp_path / "nowhere")]) == 2
    assert "--prediction" in capsys.readouterr().err


def test_invalid_parameter_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hello", "--temperature=-1"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("foreword generate: temperature must be between 0 and 100")
    assert printed.count("\n") == 1
