"""Model names resolve to local paths, or to errors with instructions."""

from pathlib import Path

import huggingface_hub
import pytest

from foreword.errors import CheckpointError
from foreword.models.hub import resolve_path


def test_directory_resolves_to_itself(tmp_path: Path):
    assert resolve_path(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./missing", "missing", "a/b/c", "missing/"])
def test_missing_directory_is_not_downloaded(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError, match="there is no directory or file"):
        resolve_path(name)


def test_other_file_is_refused(tmp_path: Path):
    (tmp_path / "model.bin").touch()
    with pytest.raises(CheckpointError, match="is a file, but not in GGUF format"):
        resolve_path(str(tmp_path / "model.bin"))


def test_gguf_file_resolves_to_itself(tmp_path: Path):
    (tmp_path / "model.gguf").touch()
    (tmp_path / "blob").write_bytes(b"GGUF")
    assert resolve_path(str(tmp_path / "model.gguf")) == tmp_path / "model.gguf"
    assert resolve_path(str(tmp_path / "blob")) == tmp_path / "blob"


def test_model_id_is_downloaded_without_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[str, list[str]]] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_path("someone/some-model") == tmp_path
    assert asked[0][0] == "someone/some-model" and not any("bin" in pattern for pattern in asked[0][1])


def test_offline_error_names_the_download_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="hf download someone/some-model --local-dir DIR"):
        resolve_path("someone/some-model")
