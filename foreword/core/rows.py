"""What the sampler must know of one row of logits."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from foreword.core.grammar import RequestGrammar
from foreword.core.request import RequestState

__all__ = ["SampleRow"]


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A row that samples the token after `state.tokens + draft`.

    draft  the drafted tokens before the row; its history is prompt, output and these
    """

    state: RequestState
    draft: tuple[int, ...] = ()

    @property
    def grammar(self) -> RequestGrammar | None:
        return self.state.grammar

    @property
    def position(self) -> int:
        """Absolute index of the token that the row samples: the counter of its noise."""
        return len(self.state.tokens) + len(self.draft)

    @property
    def num_output(self) -> int:
        """Output tokens before the one that the row samples."""
        return self.state.num_output + len(self.draft)

    def recent(self, count: int) -> tuple[int, ...]:
        """The last `count` tokens of the history, fewer at its beginning."""
        kept = max(count - len(self.draft), 0)
        older = self.state.tokens[max(len(self.state.tokens) - kept, 0) :]
        return (*older, *self.draft[max(len(self.draft) - count, 0) :])

    def seen(self) -> set[int]:
        """Every id of the history."""
        if self.state.prompt_counts is None:
            self.state.prompt_counts = Counter(self.state.request.prompt_ids)
        return {*self.state.prompt_counts, *self.state.output_counts, *self.draft}
