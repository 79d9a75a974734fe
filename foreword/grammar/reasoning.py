"""Finds the end of the reasoning in an output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["ReasoningDetector", "reasoning_ended_in_prompt"]

PROMPT_TAIL_TOKENS: Final = 4  # length of the template's text after an end sequence; user text is longer


def reasoning_ended_in_prompt(prompt_ids: Sequence[int], end_ids: Sequence[Sequence[int]]) -> bool:
    """Whether the chat template ends the reasoning: an end sequence is near the end of the prompt."""
    return any(
        _find_subsequence(tuple(prompt_ids[-PROMPT_TAIL_TOKENS - len(end) :]), tuple(end)) is not None
        for end in end_ids
    )


class ReasoningDetector:
    """Finds the first end sequence in a growing output."""

    __slots__ = ("_end_sequences", "_tail")

    def __init__(self, end_ids: Sequence[Sequence[int]]) -> None:
        self._end_sequences = tuple(tuple(end) for end in end_ids)
        self._tail: tuple[int, ...] = ()

    def find_end(self, token_ids: Sequence[int]) -> int | None:
        """Number of these next tokens that belong to the reasoning; None: it continues after them."""
        text = (*self._tail, *token_ids)
        starts = ((_find_subsequence(text, end), len(end)) for end in self._end_sequences)
        ends = [start + length for start, length in starts if start is not None]
        return min(ends) - len(self._tail) if ends else None

    def accept(self, token_ids: Sequence[int]) -> None:
        """Append tokens without an end of the reasoning."""
        keep = max(map(len, self._end_sequences)) - 1
        text = (*self._tail, *token_ids)
        self._tail = text[len(text) - keep :] if keep < len(text) else text


def _find_subsequence(token_ids: tuple[int, ...], part: tuple[int, ...]) -> int | None:
    for index in range(len(token_ids) - len(part) + 1):
        if token_ids[index : index + len(part)] == part:
            return index
    return None
