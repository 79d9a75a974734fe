"""Truncating, splitting and merging events."""

import pickle

import pytest

from foreword.core.finish import Repetition
from foreword.core.outputs import DraftResult, TokenEvent, TokenLogprob, drop_prefix, merge, truncate
from foreword.errors import ContextLengthExceeded

CONFIDENCE = (0.9, 0.8, 0.7)
EVENT = TokenEvent(
    "a",
    index=4,
    token_ids=(5, 6, 7, 8),
    logprobs=tuple(TokenLogprob(token_id, -1.0, 1, ()) for token_id in (5, 6, 7, 8)),
    draft=DraftResult("ngram", num_drafted=6, num_accepted=3, confidence=CONFIDENCE),
    finish_reason="length",
    stop_id=8,
    logits_hashes=(1, 2, 3, 4),
)


@pytest.mark.parametrize(("kept", "accepted"), [(0, 0), (2, 2), (3, 3), (4, 3)])
def test_truncate_drops_accepted_tokens_after_the_cut(kept: int, accepted: int) -> None:
    event = truncate(EVENT, kept, "stop")
    assert event.draft == DraftResult("ngram", 6, accepted, CONFIDENCE[:accepted])
    assert len(event.token_ids) == len(event.logprobs) == len(event.logits_hashes) == kept
    assert (event.finish_reason, event.stop_id, event.index) == ("stop", None, 4)


def test_events_and_errors_cross_a_process_boundary() -> None:
    assert pickle.loads(pickle.dumps(EVENT)) == EVENT
    error = pickle.loads(pickle.dumps(ContextLengthExceeded("too long", "prompt")))
    assert (error.message, error.param, error.status) == ("too long", "prompt", 400)


@pytest.mark.parametrize(
    ("count", "draft"),
    [
        (0, DraftResult("ngram", 6, 3, CONFIDENCE)),
        (2, DraftResult("ngram", 4, 1, CONFIDENCE[2:])),
        (4, DraftResult("ngram", 2, 0)),
    ],
)
def test_drop_prefix_leaves_out_delivered_tokens(count: int, draft: DraftResult) -> None:
    event = drop_prefix(EVENT, count)
    assert (event.index, event.token_ids, event.logits_hashes) == (
        4 + count,
        (5, 6, 7, 8)[count:],
        (1, 2, 3, 4)[count:],
    )
    assert [one.token_id for one in event.logprobs] == list(event.token_ids)
    assert (event.draft, event.finish_reason, event.stop_id) == (draft, "length", 8)


def test_drop_prefix_drops_a_delivered_draft() -> None:
    event = EVENT._replace(draft=DraftResult("ngram", num_drafted=3, num_accepted=3))
    assert drop_prefix(event, 2).draft == DraftResult("ngram", 1, 1)
    assert drop_prefix(event, 3).draft is None


@pytest.mark.parametrize(
    ("found_with", "kept", "reported"), [(1, 2, 1), (2, 2, 2), (3, 2, None), (None, 2, None)]
)
def test_truncate_keeps_only_a_delivered_repetition(
    found_with: int | None, kept: int, reported: int | None
) -> None:
    event = EVENT._replace(repetition=found_with and Repetition(found_with, 7))
    assert truncate(event, kept, "stop").repetition == (reported and Repetition(reported, 7))


@pytest.mark.parametrize(
    ("found_with", "before", "reported"), [(1, 2, None), (2, 2, None), (3, 2, 1), (3, 0, 3), (None, 2, None)]
)
def test_drop_prefix_drops_a_delivered_repetition(
    found_with: int | None, before: int, reported: int | None
) -> None:
    event = EVENT._replace(repetition=found_with and Repetition(found_with, 7))
    assert drop_prefix(event, before).repetition == (reported and Repetition(reported, 7))


def test_merge_joins_consecutive_events() -> None:
    first = EVENT._replace(finish_reason=None, stop_id=None, repetition=Repetition(2, 3))
    plain = first._replace(index=8, draft=None, num_cached=3, repetition=None)
    whole = merge([first, plain, EVENT._replace(index=12)])
    assert (whole.index, whole.token_ids, whole.logits_hashes) == (
        4,
        EVENT.token_ids * 3,
        EVENT.logits_hashes * 3,
    )
    assert whole.logprobs == EVENT.logprobs * 3
    assert whole.draft == DraftResult("ngram", num_drafted=12, num_accepted=6, confidence=CONFIDENCE * 2)
    assert (whole.finish_reason, whole.stop_id, whole.num_cached, whole.repetition) == (
        "length",
        8,
        3,
        Repetition(2, 3),
    )
    assert merge([EVENT]) == EVENT


def test_merged_confidence_is_that_of_every_accepted_token() -> None:
    """Or none: of a part alone, probabilities would be read at the wrong tokens."""
    sure = EVENT._replace(token_ids=(1, 2), logprobs=(), draft=DraftResult("draft", 2, 1, (0.9,)))
    unsure = EVENT._replace(index=12, token_ids=(3, 4), logprobs=(), draft=DraftResult("suffix", 1, 1, ()))
    for events, confidence in (([sure, sure], (0.9, 0.9)), ([sure, unsure], ())):
        draft = merge(events).draft
        assert draft is not None and draft.confidence == confidence
