"""The public interface of drafters: `from foreword import Drafter`. docs/drafters.md shows how to write one.

A drafter sees read-only views, so that the engine behind them may change. Imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from foreword.core.outputs import Draft


class TokenSequence(Sequence[int]):
    """The tokens of a request, read-only and not copied: prompt, then output. It grows with the request.

    A slice is a list. The cost of `tokens[seen:]` does not depend on the length of the text.
    """

    __slots__ = ("_tokens",)

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._tokens[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens)

    def __repr__(self) -> str:
        return f"<{len(self)} tokens>"  # logs have no text of users


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request as a drafter sees it."""

    id: str  # unique among live requests
    tokens: TokenSequence  # known so far; a draft continues them
    num_prompt_tokens: int
    max_tokens: int = 0  # longest useful draft of this call of propose(); a longer one is cut
    cache_salt: str = ""  # text of one salt must not speed up requests of another: their timing would tell it


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """The engine that a drafter is made for."""

    model: Path  # checkpoint directory or GGUF file, with the tokenizer
    vocab_size: int  # rows of the model's logits: ids are 0..vocab_size - 1
    never_sampled_ids: frozenset[int]  # ids without a token, and image placeholders; a draft ends before one
    max_model_len: int  # tokens
    num_speculative_tokens: int  # maximum of RequestView.max_tokens
    device: str  # device of the model: "cpu" or "cuda"


class Drafter(ABC):
    """Proposes continuations. A draft may be wrong, short or missing: it never changes the output.

    All calls come from one thread, between two steps: their time delays every request. An exception drops
    the drafts of that step and is counted. start() and finish() enclose each request; propose() may skip it
    for any number of steps.
    """

    def __init__(self, context: DrafterContext) -> None:
        """Called when the engine starts, before the weights are loaded, and again when it restarts."""
        self.context = context

    def start(self, request: RequestView) -> None:  # noqa: B027 (optional)
        """A request begins."""

    @abstractmethod
    def propose(self, requests: Sequence[RequestView]) -> Sequence[Draft | Sequence[int] | None]:
        """One draft for each request: token ids, or None. A `Draft` has the probability of each token too."""

    def finish(self, request: RequestView, output: Sequence[int]) -> None:  # noqa: B027 (optional)
        """A request ends. `output`: delivered tokens of a completed one, to learn from; empty if aborted."""
