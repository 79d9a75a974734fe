"""What the sampler must know of one row of logits."""

from __future__ import annotations

from dataclasses import dataclass

from foreword.core.grammar import RequestGrammar
from foreword.core.ledger import Floats, Ids, PenaltyState
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

    def last_tokens(self, count: int) -> tuple[int, ...]:
        """The last `count` tokens of the history, fewer at its beginning."""
        kept = max(count - len(self.draft), 0)
        older = self.state.tokens[max(len(self.state.tokens) - kept, 0) :]
        return (*older, *self.draft[max(len(self.draft) - count, 0) :])

    @property
    def penalty_state(self) -> PenaltyState:
        """What is kept of the request between steps; one for all its rows."""
        if self.state.penalty_state is None:
            self.state.penalty_state = PenaltyState(self.state.request)
        return self.state.penalty_state

    def seen_ids(self) -> Ids:
        """Every id of the history, once."""
        return self.penalty_state.seen_ids(self.state.tokens, self.draft)

    def output_counts(self) -> tuple[Ids, Ids]:
        """Ids of the output and the drafted tokens, and how often each stands there."""
        return self.penalty_state.output_counts(self.state.tokens, self.draft)

    def dry_penalties(self) -> tuple[Ids, Floats]:
        """Ids that would go on with a repeat in the history, and what that takes off their logits."""
        return self.penalty_state.dry_penalties(self.state.tokens, self.draft)
