"""What must be known before an engine can start: the checkpoints, the tokenizer, the ids that no token has."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from foreword.config.options import Config
from foreword.demo import BUNDLED
from foreword.errors import CheckpointError, ConfigError
from foreword.models.gguf.reader import is_gguf, open_gguf
from foreword.models.hub import resolve_path
from foreword.multimodal.processor import ImageProcessor, read_placeholder_ids, read_processor
from foreword.tokenizer.gguf import build_gguf_tokenizer
from foreword.tokenizer.tokenizer import Tokenizer

__all__ = ["CheckpointInfo", "prepare_checkpoint", "read_tokenizer", "resolve_paths"]

EMBEDDING_TENSOR = "token_embd.weight"  # as GGUF files call it
DEFAULT_MODEL = "demo"  # what is served if no model is named


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """config has local directories or files for `model` and `draft_model`.

    unused_ids  never sampled: rows that no token has, and the placeholder of pictures
    processor   makes pictures ready for the model; None: it takes none
    """

    config: Config
    path: Path
    tokenizer: Tokenizer
    never_sampled_ids: tuple[int, ...]
    processor: ImageProcessor | None = None


def resolve_paths(config: Config) -> Config:
    """`config` with local directories or files as `model` and `draft_model`; no model means the bundled demo;
    the names of bundled models stand for their drafters as `draft_model`.

    vLLM's `speculative_config` is spread over the fields that it stands for.
    """
    config = config.with_speculative_config()
    name = str(config.model or DEFAULT_MODEL)
    path = BUNDLED[name][0] if name in BUNDLED else resolve_path(name)
    if not config.runs_draft_model:
        return replace(config, model=str(path))
    name = str(config.draft_model)
    drafter = BUNDLED[name][1] if name in BUNDLED else resolve_path(name)
    return replace(config, model=str(path), draft_model=str(drafter))


def prepare_checkpoint(config: Config) -> CheckpointInfo:
    """Find the checkpoints and read the tokenizer. Imports no torch.

    Raises CheckpointError for a checkpoint that cannot be served, ConfigError for a draft model
    whose tokenizer differs; the first difference is named.
    """
    config = resolve_paths(config)
    path = Path(str(config.model))
    tokenizer, rows = read_tokenizer(path)
    processor = read_processor(path)
    if config.runs_draft_model:
        check_draft_model(tokenizer, processor, Path(str(config.draft_model)))
    placeholders = () if processor is None else read_placeholder_ids(path)
    unused_ids = tuple(sorted({*tokenizer.unassigned_ids(rows), *placeholders}))
    return CheckpointInfo(config, path, tokenizer, unused_ids, processor)


def read_tokenizer(path: Path) -> tuple[Tokenizer, int]:
    """The tokenizer of a checkpoint, and the rows of its model's vocabulary. Raises CheckpointError."""
    if not is_gguf(path):
        return Tokenizer.from_directory(path), read_vocab_size(path)
    gguf = open_gguf(path)
    if EMBEDDING_TENSOR not in gguf.tensors:
        raise CheckpointError(f"{path}: tensor `{EMBEDDING_TENSOR}` is missing", "model")
    return build_gguf_tokenizer(gguf.metadata, str(path)), gguf.tensors[EMBEDDING_TENSOR].shape[0]


def check_draft_model(tokenizer: Tokenizer, processor: ImageProcessor | None, path: Path) -> None:
    """Whether the model in `path` can guess for one with this tokenizer and this processor.

    A model that sees has special tokens for it, which a draft model that reads need not have. A draft model that sees must
    want pictures as they are made for the model: what it would see otherwise is worth nothing.
    Raises ConfigError.
    """
    drafter, rows = read_tokenizer(path)
    difference = tokenizer.diff(drafter, allow_extra_special=processor is not None)
    if difference is not None:
        raise ConfigError(
            f"the draft model's tokenizer differs from the model's: {difference}", "draft_model"
        )
    if rows < drafter.vocab_size:
        raise ConfigError(
            f"the draft model's vocabulary has {rows} ids; the model's tokens go up to id {drafter.vocab_size - 1}",
            "draft_model",
        )
    theirs = read_processor(path)
    if processor is not None and theirs is not None and theirs != processor:
        raise ConfigError(
            f"the draft model wants other pictures than the model: {theirs} instead of {processor}",
            "draft_model",
        )


def read_vocab_size(path: Path) -> int:
    """Rows of the model's vocabulary, as its config.json says."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        return int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: config.json does not name a vocab_size ({type(error).__name__})", "model"
        ) from None
