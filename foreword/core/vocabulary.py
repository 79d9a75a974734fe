"""What the tokens of a model spell: all that a grammar must know of a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Vocabulary"]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as plain values (picklable).

    tokens         bytes of each id below the tokenizer's size; empty where no token has the id
    special_ids    ids of special tokens, ascending
    eos_ids        ids that end an answer
    """

    tokens: tuple[bytes, ...]
    special_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
