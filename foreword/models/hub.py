"""Resolves a model name to a directory, a GGUF file, or a hub download. Imports no torch."""

from __future__ import annotations

import importlib
from pathlib import Path

from foreword.errors import CheckpointError
from foreword.models.gguf.header import is_gguf

__all__ = ["resolve_path"]

DOWNLOAD_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")


def resolve_path(name_or_path: str) -> Path:
    """The directory or file itself, or the hub's cache directory of a model id. Raises CheckpointError."""
    path = Path(name_or_path).expanduser()
    if path.is_dir() or is_gguf(path):
        return path
    if path.exists():
        problem = "is a file, but not in GGUF format; other checkpoints are directories"
        raise CheckpointError(f"{name_or_path} {problem}")
    if name_or_path.count("/") != 1 or name_or_path.startswith((".", "/", "~")) or name_or_path.endswith("/"):
        raise CheckpointError(f"there is no directory or file {name_or_path}")
    return _download(name_or_path)


def _download(model_id: str) -> Path:
    hub = importlib.import_module("huggingface_hub")  # slow to import, and rarely needed
    try:
        return Path(hub.snapshot_download(model_id, allow_patterns=list(DOWNLOAD_PATTERNS)))
    except Exception as error:  # the client raises errors of several libraries
        lines = str(error).splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{model_id} is neither a directory nor available from the hub ({lines[0]}). Without a network, "
            f"download it elsewhere with `hf download {model_id} --local-dir DIR` and use the directory"
        ) from error
