"""Where the reasoning of an answer ends, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["ReasoningDetector", "reasoning_ended_in_prompt"]

PROMPT_TAIL_TOKENS: Final = (
    4  # tokens behind the end of reasoning that a template itself closes: line ends; a user's text is longer
)


def reasoning_ended_in_prompt(prompt_ids: Sequence[int], end_ids: Sequence[Sequence[int]]) -> bool:
    """Whether the reasoning is over before the answer begins: hardly anything stands behind an end sequence in the prompt."""
    return any(
        _find_subsequence(tuple(prompt_ids[-PROMPT_TAIL_TOKENS - len(end) :]), tuple(end)) is not None
        for end in end_ids
    )


class ReasoningDetector:
    """Finds the end of the first end sequence in an output that grows."""

    __slots__ = ("_end_sequences", "_tail")

    def __init__(self, end_ids: Sequence[Sequence[int]]) -> None:
        self._end_sequences = tuple(tuple(end) for end in end_ids)
        self._tail: tuple[int, ...] = ()

    def find_end(self, token_ids: Sequence[int]) -> int | None:
        """How many of these tokens, put behind the output, still belong to the reasoning; None: all, and it goes on."""
        text = (*self._tail, *token_ids)
        found = [
            index + len(end)
            for end in self._end_sequences
            if (index := _find_subsequence(text, end)) is not None
        ]
        return min(found) - len(self._tail) if found else None

    def accept(self, token_ids: Sequence[int]) -> None:
        """The output has grown by tokens in which the reasoning goes on."""
        keep = max(map(len, self._end_sequences)) - 1
        text = (*self._tail, *token_ids)
        self._tail = text[len(text) - keep :] if keep < len(text) else text


def _find_subsequence(token_ids: tuple[int, ...], part: tuple[int, ...]) -> int | None:
    for index in range(len(token_ids) - len(part) + 1):
        if token_ids[index : index + len(part)] == part:
            return index
    return None
