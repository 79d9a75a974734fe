"""What must be known before an engine can start: the checkpoints, the tokenizer, the ids that no token has."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from foreword.config import Config
from foreword.demo import DRAFTER, MODEL
from foreword.errors import CheckpointError, ConfigError
from foreword.models.gguf.reader import is_gguf, open_gguf
from foreword.models.hub import resolve_path
from foreword.text.gguf import tokenizer_of
from foreword.text.tokenizer import Tokenizer

__all__ = ["Prepared", "directories", "prepare", "read_vocabulary"]

EMBEDDING = "token_embd.weight"  # as GGUF files call it
DEMO = "demo"  # names the bundled model, and its drafter as --draft-model


@dataclass(frozen=True, slots=True)
class Prepared:
    """config has local directories or files for `model` and `draft_model`."""

    config: Config
    path: Path
    tokenizer: Tokenizer
    unused_ids: tuple[int, ...]


def directories(config: Config) -> Config:
    """`config` with local directories or files as `model` and `draft_model`; no model means the bundled demo.

    vLLM's `speculative_config` is spread over the fields that it stands for.
    """
    config = config.with_speculative_config()
    path = MODEL if config.model in (None, DEMO) else resolve_path(str(config.model))
    if not config.runs_draft_model:
        return replace(config, model=str(path))
    drafter = DRAFTER if config.draft_model == DEMO else resolve_path(str(config.draft_model))
    return replace(config, model=str(path), draft_model=str(drafter))


def prepare(config: Config) -> Prepared:
    """Find the checkpoints and read the tokenizer. Imports no torch.

    Raises CheckpointError for a checkpoint that cannot be served, ConfigError for a draft model
    whose tokenizer differs; the first difference is named.
    """
    config = directories(config)
    path = Path(str(config.model))
    tokenizer, rows = read_vocabulary(path)
    if config.runs_draft_model:
        check_same_tokenizer(tokenizer, read_vocabulary(Path(str(config.draft_model)))[0])
    return Prepared(config, path, tokenizer, tokenizer.unused_ids(rows))


def read_vocabulary(path: Path) -> tuple[Tokenizer, int]:
    """The tokenizer of a checkpoint, and the rows of its model's vocabulary. Raises CheckpointError."""
    if not is_gguf(path):
        return Tokenizer.from_directory(path), vocab_size(path)
    gguf = open_gguf(path)
    if EMBEDDING not in gguf.tensors:
        raise CheckpointError(f"{path}: tensor `{EMBEDDING}` is missing", "model")
    return tokenizer_of(gguf.metadata, str(path)), gguf.tensors[EMBEDDING].shape[0]


def check_same_tokenizer(tokenizer: Tokenizer, drafter: Tokenizer) -> None:
    difference = tokenizer.first_difference(drafter)
    if difference is not None:
        raise ConfigError(f"the draft model's tokenizer differs from the model's: {difference}", "draft_model")


def vocab_size(path: Path) -> int:
    """Rows of the model's vocabulary, as its config.json says."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        return int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: config.json does not name a vocab_size ({type(error).__name__})", "model") from None
