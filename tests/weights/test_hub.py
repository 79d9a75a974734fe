"""Model names resolve to local paths, or to errors with instructions."""

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from foreword.errors import CheckpointError
from foreword.weights import hub
from foreword.weights.hub import find_local, resolve_path


def test_directory_resolves_to_itself(tmp_path: Path):
    (tmp_path / "config.json").touch()
    assert resolve_path(str(tmp_path)) == tmp_path


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with models; the hub must not be asked."""
    monkeypatch.setattr(hub, "fetch", lambda *_: pytest.fail("asked the hub"))
    monkeypatch.chdir(tmp_path)
    for name in (
        "models/qwen2/config.json",
        "weights/model.safetensors",
        "weights/tokenizer.json",
        "quantized/a-Q4_K_M.gguf",
        "lora/adapter_config.json",
        "lora/adapter_model.safetensors",
        "mistral/params.json",
        "mistral/consolidated.safetensors",
        "model.bin",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    return tmp_path


def test_name_that_is_no_hub_id_is_answered(models: Path) -> None:
    for name, answer in [
        ("/nowhere/at/all", "there is no directory or file /nowhere/at/all: / has no nowhere; it has "),
        ("", "the model's name is empty"),
        ("./missing", "there is no directory or file ./missing: this directory has no missing; a model is"),
        ("models/qwen", "there is no directory or file models/qwen: models has no qwen; did you mean qwen2?"),
        ("./models/llama", "models has no llama; it has qwen2"),
        ("empty/model", "empty has no model; it is empty"),
        ("models/deep/er", "models has no deep; it has qwen2"),
        ("modles/qwen2/", "this directory has no modles; did you mean models?"),
        ("other/x.gguf", "there is no directory or file other/x.gguf"),
        ("a/b/c", "there is no directory or file a/b/c"),
        ("missing", "there is no model missing; a model is a directory with config.json"),
        ("model", "there is no model model; did you mean models?"),
        ("llama3:8b", "there is no model llama3:8b (names of ollama's library are not known)"),
        ("models/qwen2:Q4_K_M", "no directory or file models/qwen2:Q4_K_M: models has no qwen2:Q4_K_M"),
        ("models/deep/x.gguf", "models has no deep; it has qwen2"),
        ("some/name:", "there is no model some/name: (names of ollama's library"),
        ("https://hub.example/some/name", "is a URL: download the model and pass its path"),
        ("model.bin", "holds weights alone: pass the directory"),
        ("weights/model.safetensors", "holds weights alone: pass the directory"),
        ("weights", "the missing files of the checkpoint beside its weights: config.json, tokenizer_config"),
        ("lora", "lora has no config.json; it is an adapter: foreword serve BASE --lora-modules lora=lora"),
        ("mistral", "it has Mistral's own format: pass the checkpoint in Hugging Face's format"),
        ("quantized", "pass one of its GGUF files: quantized/a-Q4_K_M.gguf"),
        (
            "models",
            "serve all its models with --models models, or pass one of the checkpoints in it: ",
        ),
        ("empty", "empty has no config.json; a checkpoint is a directory with config.json"),
        ("some name/x", "there is no directory or file some name/x"),
    ]:
        with pytest.raises(CheckpointError) as caught:
            resolve_path(name)
        assert answer in str(caught.value) and "\n" not in str(caught.value)


def test_adapter_names_its_base(tmp_path: Path) -> None:
    config = {"base_model_name_or_path": "some/base"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="foreword serve some/base --lora-modules"):
        resolve_path(str(tmp_path))


def test_names_that_the_caller_knows_are_suggested(models: Path) -> None:
    with pytest.raises(CheckpointError, match="did you mean demo"):
        find_local("demoo", ("demo",))


def test_other_file_is_refused(tmp_path: Path):
    (tmp_path / "model.txt").touch()
    with pytest.raises(CheckpointError, match="is a file, but not in GGUF format"):
        resolve_path(str(tmp_path / "model.txt"))


def test_gguf_file_resolves_to_itself(tmp_path: Path):
    (tmp_path / "model.gguf").touch()
    (tmp_path / "blob").write_bytes(b"GGUF")
    assert resolve_path(str(tmp_path / "model.gguf")) == tmp_path / "model.gguf"
    assert resolve_path(str(tmp_path / "blob")) == tmp_path / "blob"


def test_offline_error_names_the_download_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="hf download someone/some-model --local-dir DIR"):
        resolve_path("someone/some-model")
