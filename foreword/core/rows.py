"""What the sampler must know of one row of logits."""

from __future__ import annotations

from dataclasses import dataclass

from foreword.core.grammar import RequestGrammar
from foreword.core.ledger import Floats, Ids, Ledger
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

    @property
    def ledger(self) -> Ledger:
        """What is kept of the request between steps; one for all its rows."""
        if self.state.ledger is None:
            self.state.ledger = Ledger(self.state.request)
        return self.state.ledger

    def seen(self) -> Ids:
        """Every id of the history, once."""
        return self.ledger.seen(self.state.tokens, self.draft)

    def counts(self) -> tuple[Ids, Ids]:
        """Ids of the output and the drafted tokens, and how often each stands there."""
        return self.ledger.counts(self.state.tokens, self.draft)

    def dry(self) -> tuple[Ids, Floats]:
        """Ids that would go on with a repeat in the history, and what that takes off their logits."""
        return self.ledger.dry(self.state.tokens, self.draft)
