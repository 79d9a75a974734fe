"""Forced text is drafted, and all drafts are legal."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foreword.core.outputs import Draft
from foreword.core.params import SamplingParams, Speculation
from foreword.core.request import Request, RequestState
from foreword.speculation.draft_length.policy import FixedLength
from foreword.speculation.drafters.grammar import GrammarDrafter
from foreword.speculation.engine_drafter import DraftRequest
from foreword.speculation.proposer import Proposer
from tests.speculation.test_proposer import Scripted


class Rising:
    """A grammar in which each token is followed by its successor, and 7 by the end."""

    error: str | None = None

    def __init__(self, last: int) -> None:
        self._last = last

    def accept(self, token_ids: Sequence[int]) -> None:
        self._last = [self._last, *token_ids][-1]

    def num_legal(self, draft: Sequence[int]) -> int:
        expected = range(self._last + 1, 8)
        return next(
            (i for i, token_id in enumerate(draft) if i >= len(expected) or token_id != expected[i]),
            len(draft),
        )

    def forced(self, max_tokens: int) -> tuple[int, ...]:
        return tuple(range(self._last + 1, 8))[:max_tokens]

    def mask(self, draft: tuple[int, ...]) -> Tensor | None:
        return None

    def is_open(self, draft: Sequence[int]) -> bool:
        return True

    def must_end(self, draft: tuple[int, ...]) -> bool:
        return False


def state_of(last: int | None, method: str = "auto") -> RequestState:
    request = Request("a", (1, 2, 3), SamplingParams(speculation=Speculation(method)), 0)
    return RequestState(request, 0, 100, None if last is None else Rising(last))


def drafts(state: RequestState, *others: Scripted, length: int = 4) -> tuple[Draft | None, ...]:
    proposer = Proposer((GrammarDrafter(), *others), 10, FixedLength(length))
    proposer.start(state)
    found = proposer.propose([state])
    proposer.check()
    return found


def test_forced_text_is_drafted_up_to_the_bound() -> None:
    assert GrammarDrafter().propose([DraftRequest(state_of(3), 2), DraftRequest(state_of(5), 9)]) == [
        Draft((4, 5), "grammar"),
        Draft((6, 7), "grammar"),
    ]


def test_nothing_forced_without_grammar_or_at_its_end() -> None:
    assert GrammarDrafter().propose([DraftRequest(state_of(None), 4), DraftRequest(state_of(7), 4)]) == [
        None,
        None,
    ]


def test_draft_ends_before_an_illegal_token() -> None:
    assert drafts(state_of(3, "other"), Scripted("other", (4, 5, 9, 6))) == (Draft((4, 5), "other"),)
    assert drafts(state_of(3, "other"), Scripted("other", (9, 4))) == (None,)
    assert drafts(state_of(None, "other"), Scripted("other", (9, 4))) == (Draft((9, 4), "other"),)


def test_forced_text_comes_before_other_drafts() -> None:
    assert drafts(state_of(5), Scripted("other", (6,))) == (Draft((6, 7), "grammar"),)
