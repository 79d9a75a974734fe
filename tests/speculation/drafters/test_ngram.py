"""Prompt lookup."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.speculation.drafter import RequestView, TokenSequence
from foreword.speculation.drafters.ngram import NgramDrafter
from tests.support.fakes import extended


def state_of(tokens: Sequence[int], name: str = "a") -> RequestState:
    return RequestState(Request(name, tuple(tokens), SamplingParams(), 0), 0, 10_000)


def view(state: RequestState, max_tokens: int = 0) -> RequestView:
    return RequestView(state.id, TokenSequence(state.tokens), state.num_prompt, max_tokens)


def draft_ids(
    drafter: NgramDrafter, state: RequestState, run: Sequence[int] = (), max_tokens: int = 4
) -> tuple[int, ...]:
    (draft,) = drafter.propose([view(extended(state, run), max_tokens)])
    return draft.token_ids if draft else ()


def started(state: RequestState, low: int = 2, high: int = 4) -> NgramDrafter:
    drafter = NgramDrafter(low, high)
    drafter.start(view(state))
    return drafter


def test_drafts_the_last_continuation() -> None:
    state = state_of([1, 2, 3, 4, 5, 6, 7, 1, 2])
    assert draft_ids(started(state), state) == (3, 4, 5, 6)


def test_no_match_gives_no_draft() -> None:
    state = state_of([1, 2, 3, 4])
    assert draft_ids(started(state), state) == ()


def test_longest_ngram_wins_over_the_latest() -> None:
    state = state_of([9, 1, 2, 7, 8, 1, 2, 5, 5, 9, 1, 2])
    assert draft_ids(started(state), state, max_tokens=1) == (7,)
    assert draft_ids(started(state, 2, 2), state, max_tokens=1) == (5,)


def test_period_continues_after_the_text() -> None:
    state = state_of([7, 1, 2, 3, 1, 2, 3, 1, 2])
    assert draft_ids(started(state), state, max_tokens=7) == (3, 1, 2, 3, 1, 2, 3)


def test_newest_tokens_are_matched() -> None:
    state = state_of([1, 2, 3, 4])
    drafter = started(state)
    assert draft_ids(drafter, state, run=[1, 2]) == (3, 4, 1, 2)
    assert draft_ids(drafter, state, run=[3]) == (4, 1, 2, 3)


def test_requests_are_isolated() -> None:
    a, b = state_of([1, 2, 3, 1, 2], "a"), state_of([5, 6, 1, 2], "b")
    drafter = started(a)
    drafter.start(view(b))
    assert draft_ids(drafter, b) == ()
    drafter.finish(view(a), ())
    drafter.finish(view(b), ())
    assert not drafter._indexes


def by_definition(tokens: Sequence[int], low: int, high: int, max_tokens: int) -> tuple[int, ...]:
    """Search backwards for the longest n-gram."""
    for size in range(min(high, len(tokens) - 1), low - 1, -1):
        tail = tuple(tokens[-size:])
        for start in range(len(tokens) - 1, size - 1, -1):
            if tuple(tokens[start - size : start]) == tail:
                text = list(tokens)
                while len(text) < start + max_tokens:
                    text.append(text[start + len(text) - len(tokens)])
                return tuple(text[start : start + max_tokens])
    return ()


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(0, 2),
)
def test_index_equals_a_search(runs: list[list[int]], low: int, more: int) -> None:
    """The incremental index equals a scan of the complete text."""
    state = state_of(runs[0])
    drafter = started(state, low, low + more)
    for run in runs[1:]:
        assert draft_ids(drafter, state, run) == by_definition(state.tokens, low, low + more, 4)


def test_confidence_grows_with_the_match() -> None:
    """Confidence also grows along the draft, which extends the match."""
    drafter = NgramDrafter(1, 4)
    confidence = []
    for name, text in (("one", [4, 9, 8, 7, 6, 4]), ("four", [1, 2, 3, 4, 9, 8, 1, 2, 3, 4])):
        state = state_of(text, name)
        drafter.start(view(state))
        (draft,) = drafter.propose([view(state, 20)])
        assert draft is not None and len(draft.confidence) == len(draft.token_ids) == 20
        assert list(draft.confidence) == sorted(draft.confidence)
        confidence.append(draft.confidence[0])
    assert 0.0 < confidence[0] < confidence[1] < 1.0


PICTURE = 260  # an image placeholder: never sampled


@given(
    runs=st.lists(
        st.lists(st.sampled_from([0, 1, 2, PICTURE, PICTURE]), min_size=1, max_size=6), min_size=1, max_size=8
    ),
    low=st.integers(1, 3),
    more=st.integers(0, 2),
)
def test_never_sampled_ids_are_not_matched_or_drafted(runs: list[list[int]], low: int, more: int) -> None:
    """Equals a text in which each never-sampled id is unique."""
    state = state_of(runs[0])
    drafter = NgramDrafter(low, low + more, frozenset({PICTURE}))
    drafter.start(view(state))
    for run in runs[1:]:
        found = draft_ids(drafter, state, run)
        assert PICTURE not in found
        assert found == within(state.tokens, low, low + more)


def within(tokens: Sequence[int], low: int, high: int) -> tuple[int, ...]:
    """The continuation of the longest n-gram's latest match that continues with text."""
    ends = [index for index, token_id in enumerate(tokens) if token_id == PICTURE]
    for size in range(min(high, len(tokens) - 1 - max(ends, default=-1)), low - 1, -1):
        tail = list(tokens[-size:])
        for start in range(len(tokens) - 1, size - 1, -1):
            if list(tokens[start - size : start]) == tail and tokens[start] != PICTURE:
                text = list(tokens)
                while len(text) < start + 4:
                    text.append(text[start + len(text) - len(tokens)])
                found = text[start : start + 4]
                return tuple(found[: found.index(PICTURE)] if PICTURE in found else found)
    return ()


def test_placeholders_are_not_indexed() -> None:
    state = state_of([1, 2, *[PICTURE] * 2000, 3])
    drafter = NgramDrafter(2, 4, frozenset({PICTURE}))
    drafter.start(view(state))
    assert draft_ids(drafter, state) == ()
    assert not drafter._indexes["a"]._continued_at
    assert draft_ids(drafter, state, [1, 2]) == (), "the continuation is an image"
