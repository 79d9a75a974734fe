"""A guess, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Draft", "DraftUse"]


@dataclass(frozen=True, slots=True)
class Draft:
    """A guessed continuation of one request.

    token_ids   guessed ids, first to be verified first
    drafter     name of the drafter, as in `--speculate`
    confidence  probability that the drafter gives each guess; empty if it has none
    """

    token_ids: tuple[int, ...]
    drafter: str
    confidence: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftUse:
    """A draft that was verified: `accepted` of `drafted` tokens were emitted, 0 <= accepted <= drafted."""

    drafter: str
    drafted: int
    accepted: int
