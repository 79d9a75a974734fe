"""What must be known before an engine can start: the checkpoints, the tokenizer, the ids that no token has."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from foreword.config import Config
from foreword.demo import BUNDLED
from foreword.errors import CheckpointError, ConfigError
from foreword.media.processor import Processor, read_placeholders, read_processor
from foreword.models.gguf.reader import is_gguf, open_gguf
from foreword.models.hub import resolve_path
from foreword.text.gguf import tokenizer_of
from foreword.text.tokenizer import Tokenizer

__all__ = ["Prepared", "directories", "prepare", "read_vocabulary"]

EMBEDDING = "token_embd.weight"  # as GGUF files call it
DEMO = "demo"  # what is served if no model is named


@dataclass(frozen=True, slots=True)
class Prepared:
    """config has local directories or files for `model` and `draft_model`.

    unused_ids  never sampled: rows that no token has, and the placeholder of pictures
    processor   makes pictures ready for the model; None: it takes none
    """

    config: Config
    path: Path
    tokenizer: Tokenizer
    unused_ids: tuple[int, ...]
    processor: Processor | None = None


def directories(config: Config) -> Config:
    """`config` with local directories or files as `model` and `draft_model`; no model means the bundled demo;
    the names of bundled models stand for their drafters as `draft_model`.

    vLLM's `speculative_config` is spread over the fields that it stands for.
    """
    config = config.with_speculative_config()
    name = str(config.model or DEMO)
    path = BUNDLED[name][0] if name in BUNDLED else resolve_path(name)
    if not config.runs_draft_model:
        return replace(config, model=str(path))
    name = str(config.draft_model)
    drafter = BUNDLED[name][1] if name in BUNDLED else resolve_path(name)
    return replace(config, model=str(path), draft_model=str(drafter))


def prepare(config: Config) -> Prepared:
    """Find the checkpoints and read the tokenizer. Imports no torch.

    Raises CheckpointError for a checkpoint that cannot be served, ConfigError for a draft model
    whose tokenizer differs; the first difference is named.
    """
    config = directories(config)
    path = Path(str(config.model))
    tokenizer, rows = read_vocabulary(path)
    processor = read_processor(path)
    if config.runs_draft_model:
        check_drafter(tokenizer, processor, Path(str(config.draft_model)))
    placeholders = () if processor is None else read_placeholders(path)
    unused_ids = tuple(sorted({*tokenizer.unused_ids(rows), *placeholders}))
    return Prepared(config, path, tokenizer, unused_ids, processor)


def read_vocabulary(path: Path) -> tuple[Tokenizer, int]:
    """The tokenizer of a checkpoint, and the rows of its model's vocabulary. Raises CheckpointError."""
    if not is_gguf(path):
        return Tokenizer.from_directory(path), vocab_size(path)
    gguf = open_gguf(path)
    if EMBEDDING not in gguf.tensors:
        raise CheckpointError(f"{path}: tensor `{EMBEDDING}` is missing", "model")
    return tokenizer_of(gguf.metadata, str(path)), gguf.tensors[EMBEDDING].shape[0]


def check_drafter(tokenizer: Tokenizer, processor: Processor | None, path: Path) -> None:
    """Whether the model in `path` can guess for one with this tokenizer and this processor.

    A model that sees has special tokens for it, which a draft model that reads need not have. A draft model that sees must
    want pictures as they are made for the model: what it would see otherwise is worth nothing.
    Raises ConfigError.
    """
    drafter, rows = read_vocabulary(path)
    difference = tokenizer.first_difference(drafter, extra_special=processor is not None)
    if difference is not None:
        raise ConfigError(f"the draft model's tokenizer differs from the model's: {difference}", "draft_model")
    if rows < drafter.vocab_size:
        raise ConfigError(
            f"the draft model's vocabulary has {rows} ids; the model's tokens go up to id {drafter.vocab_size - 1}", "draft_model"
        )
    theirs = read_processor(path)
    if processor is not None and theirs is not None and theirs != processor:
        raise ConfigError(f"the draft model wants other pictures than the model: {theirs} instead of {processor}", "draft_model")


def vocab_size(path: Path) -> int:
    """Rows of the model's vocabulary, as its config.json says."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        return int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: config.json does not name a vocab_size ({type(error).__name__})", "model") from None
