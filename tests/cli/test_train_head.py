"""`foreword train-head`: from prompts to a head, and what it refuses."""

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from foreword.cli.main import main
from tests.support.checkpoints import write_checkpoint

PROMPTS = [{"messages": [{"role": "user", "content": f"the {i}"}]} for i in range(6)]
PROMPTS += [{"prompt": "the cat"}, {"text": "the dog and the cat"}]
FLAGS = ["--device", "cpu", "--threads", "1", "--kv-cache-memory", "2000tokens", "--max-tokens", "8"]
FLAGS += ["--epochs", "2", "--draft-vocab-size", "64", "--batch-tokens", "64", "--train-dtype", "float32"]


def write_prompts(path: Path) -> Path:
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return path


def test_a_head_is_trained_and_the_command_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, output = write_checkpoint(tmp_path / "model", "llama", seed=5), tmp_path / "head"
    words = ["train-head", str(model), str(write_prompts(tmp_path / "data")), "-o", str(output), *FLAGS]
    assert main(words) == 0
    said = capsys.readouterr().err
    assert "answered 8 of 8 prompts" in said
    assert "training a head of" in said and "on 7 answers" in said and "1 held out" in said
    assert "held out: accept length" in said
    assert f"foreword serve {model} --draft-model {output}" in said
    config = json.loads((output / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    tensors = load_file(output / "model.safetensors")
    assert tensors["fc.weight"].shape == (64, 192) and tensors["fc.weight"].dtype == torch.bfloat16
    assert tensors["lm_head.weight"].shape == (64, 64) and tensors["t2d"].sum() == 64
    assert all(value.isfinite().all() for value in tensors.values())

    monkeypatch.setattr("foreword.cli.train_head.LLM", None)  # all answers are there
    (output / "model.safetensors").unlink()
    assert main(words) == 0
    again = load_file(output / "model.safetensors")
    assert all(torch.equal(value, again[name]) for name, value in tensors.items())
    assert "step 8 of 8" in capsys.readouterr().err

    with monkeypatch.context() as patch:
        patch.setattr("foreword.cli.train_head.Trainer.train", interrupt)
        (output / "model.safetensors").unlink()
        assert main(words) == 130
        assert "stopped at step 8 of 8" in capsys.readouterr().err
        assert load_file(output / "model.safetensors").keys() == tensors.keys()

    assert main([*words, "--epochs", "3"]) == 2
    assert "was made with epochs 2: choose another --output or remove it" in capsys.readouterr().err
    assert main([*words, "--temperature", "0.5"]) == 2
    assert "was made with temperature 0.0" in capsys.readouterr().err
    for flags, problem in (
        (["--aux-layers", "0,1,3"], "--aux-layers must be 3 different numbers from 0 to 2, got '0,1,3'"),
        (["--aux-layers", "1,1,2"], "--aux-layers must be 3 different numbers"),
        (["--num-key-value-heads", "3"], "--num-key-value-heads 3 must divide the number of attention heads"),
    ):
        assert main([*words, *flags]) == 2
        assert problem in capsys.readouterr().err
    with (output / "training" / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main(words) == 2
    assert "is in use by another run" in capsys.readouterr().err


def test_skipped_prompts_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only three are named."""
    monkeypatch.setattr("foreword.cli.train_head._train", lambda *_: None)
    model, data = write_checkpoint(tmp_path / "model", "llama", seed=5), tmp_path / "data"
    prompts = [{"prompt": "the cat " * 2000}] * 5 + [{"prompt": "the cat"}]
    data.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    assert main(["train-head", str(model), str(data), "-o", str(tmp_path / "head"), *FLAGS]) == 0
    said = capsys.readouterr().err
    assert said.count("skipped line ") == 3 and "skipped 5 of 6 prompts in all" in said


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--epochs", "0"], "--epochs must be between 1 and 1000, got 0"),
        (["--temperature", "nan"], "--temperature must be between 0 and 100, got nan"),
        (["--ttt-steps", "8"], "--ttt-steps must be between 1 and 7, got 8"),
        (["--loss-decay", "0"], "--loss-decay must be between 0.01 and 1, got 0"),
        (["--train-dtype", "int8"], "--train-dtype must be one of auto, float32, bfloat16, got 'int8'"),
        (["--head-dtype", "auto"], "--head-dtype must be one of float32, bfloat16, got 'auto'"),
        (["--epochs", "many"], "--epochs must be a whole number, got 'many'"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_loaded(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    problem: str,
) -> None:
    monkeypatch.setattr("foreword.cli.train_head.LLM", None)
    words = ["train-head", "demo", str(write_prompts(tmp_path / "data")), "-o", str(tmp_path / "head")]
    assert run(words + flags) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "head").exists()


def test_a_wrong_line_is_named_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foreword.cli.train_head.LLM", None)
    data = write_prompts(tmp_path / "data")
    with data.open("a") as file:
        file.write('{"question": "why"}\n')
    assert main(["train-head", "demo", str(data), "-o", str(tmp_path / "head")]) == 2
    assert f"{data}, line 9: must have one of messages, prompt, text" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["train-head", "demo", str(write_prompts(data)), "-o", str(tmp_path / "file")]) == 2
    assert f"--output {tmp_path / 'file'}: Not a directory" in capsys.readouterr().err


def run(words: list[Any]) -> int:
    """The exit code, also of an error of argparse."""
    try:
        return main(words)
    except SystemExit as error:
        return int(error.code or 0)
