"""Flags that the model's files refuse, before torch is imported."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from foreword.checkpoint import check_context
from foreword.cli import client
from foreword.cli.main import main
from foreword.config.options import Config
from foreword.demo import MODEL
from foreword.errors import ConfigError
from tests.support.checkpoints import write_checkpoint, write_json
from tests.support.vision_checkpoints import write_vision_checkpoint

REFUSED = [
    (["generate", "x", "--max-model-len", "99999"], "99999 is above the checkpoint's 1024 positions"),
    (["chat", "--max-model-len", "1"], "max_model_len 1 leaves no room for an answer"),
    (["generate", "x", "--image", str(MODEL / "config.json")], "--image: the model demo is text only"),
    (["generate", "x", "--speculation", "sufix"], "--speculation must be one of auto, off, grammar"),
    (["chat", "--speculation", "draft"], "got 'draft'"),
]


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    real = client.importlib.import_module
    monkeypatch.setattr(
        client.importlib,
        "import_module",
        lambda name: pytest.fail("loads") if name.endswith("local_backend") else real(name),
    )


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    return printed


@pytest.mark.parametrize(("words", "reason"), REFUSED)
def test_mistakes_are_found_before_the_model_is_loaded(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reason in refusal(words, capsys)


def test_missing_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_checkpoint(tmp_path / "model")
    config = json.loads((path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    write_json(path / "tokenizer_config.json", config)
    said = refusal(["generate", "x", "--model", str(path)], capsys)
    assert "has no chat template: give one with --chat-template FILE, or continue a text with --raw" in said
    assert "--raw" not in refusal(["chat", str(path)], capsys)


def test_unreadable_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_vision_checkpoint(tmp_path / "model")
    (tmp_path / "notes.png").write_text("no picture")
    said = refusal(["generate", "x", "--model", str(path), "--image", str(tmp_path / "notes.png")], capsys)
    assert f"--image {tmp_path}/notes.png: it is in another format, or broken; PNG, JPEG" in said


def test_positions_that_rope_extends_are_left_to_the_engine(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    for rope, is_refused in (({}, True), ({"rope_type": "yarn", "factor": 4.0}, False)):
        write_json(path / "config.json", config | {"rope_parameters": rope, "max_position_embeddings": 64})
        with pytest.raises(ConfigError) if is_refused else nullcontext():
            check_context(Config(max_model_len=65), path)
