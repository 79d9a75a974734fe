"""Resolves a model name to a directory, a GGUF file, or a hub download. Imports no torch."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection
from pathlib import Path

from foreword.errors import CheckpointError, did_you_mean
from foreword.weights.gguf.header import is_gguf
from foreword.weights.hub_download import OnBytes, fetch

# organisation/name, with ":" and the end of a GGUF file's name, or with ":" or "/" and its name
HUB_ID = re.compile(
    r"(?:hf\.co/|huggingface\.co/)?([\w.-]+/[\w.-]+)(?::([\w./-]+)|/([\w./-]+\.gguf))?", re.ASCII | re.I
)
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".onnx")
MODEL_FILES = (".gguf", *WEIGHT_FILES)
MAX_NAMES = 5  # that an error lists
DIRECTORY = "a directory with config.json, tokenizer.json and *.safetensors"
KINDS = (
    f"a model is {DIRECTORY}, a GGUF file, or a hub id such as organisation/name or organisation/name:Q4_K_M"
)


def resolve_path(name_or_path: str, on_bytes: OnBytes | None = None) -> Path:
    """The directory or file itself, or the model of a hub id in the hub's cache, downloaded if it lacks it.

    on_bytes  of a download: bytes done and in total
    Raises CheckpointError.
    """
    path = find_local(name_or_path)
    if path is not None:
        return path
    match = HUB_ID.fullmatch(name_or_path)
    assert match is not None, "find_local() refuses other names"
    return fetch(match[1], match[2] or match[3] or "", on_bytes)


def find_local(name: str, bundled: Collection[str] = ()) -> Path | None:
    """The directory or file, or None for a hub id, also with a GGUF file of it.

    A path that exists in part, a URL, or a name of another form is no hub id.

    bundled  names that the caller knows, for the error's suggestion
    Raises CheckpointError, which says what would work.
    """
    if not name:
        raise CheckpointError(f"the model's name is empty; {KINDS}", "model")
    path = Path(name).expanduser()
    if path.is_dir():
        return _check_directory(path)
    if is_gguf(path):
        return path
    if path.exists():
        raise CheckpointError(f"{name} {_describe_file(path)}", "model")
    if re.match(r"\w+://", name):
        raise CheckpointError(
            f"{name} is a URL: download the model and pass its path, or pass its hub id (organisation/name)",
            "model",
        )
    hub_id = HUB_ID.fullmatch(name)
    has_file = hub_id is not None and bool(hub_id[2] or hub_id[3])
    if name.startswith((".", "/", "~")) or _is_partly_there(path):
        raise CheckpointError(_describe_missing(path, name), "model")
    if not has_file and name.endswith(("/", *MODEL_FILES)):
        raise CheckpointError(_describe_missing(path, name), "model")
    if hub_id is not None:
        return None
    is_tagged = ":" in name
    if is_tagged or "/" not in name:
        library = " (names of ollama's library are not known)" if is_tagged else ""
        hint = did_you_mean(name, [*bundled, *_names(Path())])
        raise CheckpointError(f"there is no model {name}{library}{hint or f'; {KINDS}'}", "model")
    raise CheckpointError(_describe_missing(path, name), "model")


def _check_directory(path: Path) -> Path:
    """The directory, if it has a configuration. Raises CheckpointError."""
    if (path / "config.json").is_file():
        return path
    names = _names(path)
    gguf = [name for name in names if name.endswith(".gguf")]
    checkpoints = [name for name in names if (path / name / "config.json").is_file()]
    if gguf:
        hint = f"pass one of its GGUF files: {_list([str(path / name) for name in gguf])}"
    elif checkpoints:
        hint = (
            f"serve all its models with --models {path}, or pass one of the checkpoints in it: "
            f"{_list([str(path / name) for name in checkpoints])}"
        )
    elif "adapter_config.json" in names:
        hint = f"it is an adapter: foreword serve {_base_of(path)} --lora-modules {path.name}={path}"
    elif "params.json" in names:
        hint = "it has Mistral's own format: pass the checkpoint in Hugging Face's format"
    elif any(name.endswith(WEIGHT_FILES) for name in names):
        needed = ("config.json", "tokenizer.json", "tokenizer_config.json")
        missing = [name for name in needed if name not in names]
        hint = f"copy the missing files of the checkpoint beside its weights: {', '.join(missing)}"
    else:
        hint = f"a checkpoint is {DIRECTORY}"
    raise CheckpointError(f"{path} has no config.json; {hint}", "model")


def _base_of(adapter: Path) -> str:
    """The base that an adapter names, or BASE."""
    try:
        base = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
        return shlex.quote(base["base_model_name_or_path"][:200])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return "BASE"


def _describe_file(path: Path) -> str:
    if path.name.endswith(WEIGHT_FILES):
        return (
            "holds weights alone: pass the directory with config.json, tokenizer.json and *.safetensors "
            "instead of the file"
        )
    return "is a file, but not in GGUF format; other checkpoints are directories"


def _is_partly_there(path: Path) -> bool:
    """Whether the first of several parts is a directory."""
    return len(path.parts) > 1 and Path(path.parts[0]).is_dir()


def _describe_missing(path: Path, name: str) -> str:
    """Which part of a path is missing, and what is there instead."""
    parent = path.parent
    missing = path.name
    while not parent.is_dir() and parent != parent.parent:
        parent, missing = parent.parent, parent.name
    names = _names(parent)
    problem = f"there is no directory or file {name}"
    if parent == Path():
        return f"{problem}: this directory has no {missing}{did_you_mean(missing, names) or f'; {KINDS}'}"
    listed = f"; it has {_list(names)}" if names else "; it is empty"
    return f"{problem}: {parent} has no {missing}{did_you_mean(missing, names) or listed}"


def _names(directory: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in directory.iterdir() if not entry.name.startswith("."))
    except OSError:
        return []


def _list(names: list[str]) -> str:
    return ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")
