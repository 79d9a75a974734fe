"""The cut: what was never delivered is not counted."""

import pickle

import pytest

from foreword.core.events import DraftUse, TokenLogprob, Tokens, cut
from foreword.errors import ContextLengthExceeded

EVENT = Tokens(
    "a",
    index=4,
    token_ids=(5, 6, 7, 8),
    logprobs=tuple(TokenLogprob(token_id, -1.0, 1, ()) for token_id in (5, 6, 7, 8)),
    draft=DraftUse("ngram", drafted=6, accepted=3),
    finish_reason="length",
    stop_id=8,
    hashes=(1, 2, 3, 4),
)


@pytest.mark.parametrize(("kept", "accepted"), [(0, 0), (2, 2), (3, 3), (4, 3)])
def test_accepted_tokens_behind_the_cut_do_not_count(kept: int, accepted: int) -> None:
    event = cut(EVENT, kept, "stop")
    assert event.draft == DraftUse("ngram", 6, accepted)
    assert len(event.token_ids) == len(event.logprobs) == len(event.hashes) == kept
    assert (event.finish_reason, event.stop_id, event.index) == ("stop", None, 4)


def test_events_and_errors_cross_a_process_boundary() -> None:
    assert pickle.loads(pickle.dumps(EVENT)) == EVENT
    error = pickle.loads(pickle.dumps(ContextLengthExceeded("too long", "prompt")))
    assert (error.message, error.param, error.status) == ("too long", "prompt", 400)
