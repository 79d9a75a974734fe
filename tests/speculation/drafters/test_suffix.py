"""The suffix drafter, on the index in Python and on the native one: what it guesses, for whom, and what it forgets."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.kernels.cpu.library import load_library
from foreword.speculation.base import DraftRequest
from foreword.speculation.drafters.suffix import SuffixDrafter, _Namespaces
from foreword.speculation.drafters.suffix_index import BYTES_PER_SLOT, MAX_CHAIN, MIN_PREFIX_PROB
from tests.support.fakes import extended

CORPUS_BYTES = 1000 * BYTES_PER_SLOT


@pytest.fixture(params=["python", "native"])
def library(request: pytest.FixtureRequest) -> ctypes.CDLL | None:
    if request.param == "python":
        return None
    built, reason = load_library()
    return built or pytest.skip(reason)


def state_of(tokens: Sequence[int], name: str = "a", tenant: str = "") -> RequestState:
    return RequestState(Request(name, tuple(tokens), SamplingParams(), 0, cache_salt=tenant), 0, 10_000)


def guess(
    drafter: SuffixDrafter, state: RequestState, run: Sequence[int] = (), max_tokens: int = 4
) -> tuple[int, ...]:
    (draft,) = drafter.propose([DraftRequest(extended(state, run), max_tokens)])
    if draft is None:
        return ()
    assert draft.drafter == "suffix"
    assert len(draft.confidence) == len(draft.token_ids) <= max_tokens
    assert all(0.0 < confidence < 1.0 for confidence in draft.confidence)
    return draft.token_ids


def started(drafter: SuffixDrafter, state: RequestState) -> RequestState:
    drafter.start(state)
    return state


def learn(drafter: SuffixDrafter, output: Sequence[int], tenant: str = "") -> None:
    """Somebody was answered so."""
    drafter.start(state_of([999], "teacher", tenant))
    drafter.finish("teacher", output)


def test_drafts_what_followed_in_its_own_text(library: ctypes.CDLL | None) -> None:
    drafter = SuffixDrafter(0, (), library)
    state = started(drafter, state_of([1, 2, 3, 4, 5, 6, 7, 1, 2, 3]))
    assert guess(drafter, state) == (4, 5, 6, 7)
    state.append([4, 5])
    assert guess(drafter, state, run=[6], max_tokens=1) == (7,)


def test_nothing_is_drafted_where_nothing_matches(library: ctypes.CDLL | None) -> None:
    drafter = SuffixDrafter(CORPUS_BYTES, (), library)
    assert guess(drafter, started(drafter, state_of(range(1, 100)))) == ()
    assert guess(drafter, started(drafter, state_of([5], "b"))) == ()


def test_a_text_is_read_once(library: ctypes.CDLL | None) -> None:
    drafter = SuffixDrafter(0, (), library)
    state = started(drafter, state_of([1, 2, 3]))
    for token in (4, 5, 6):
        assert guess(drafter, state, run=[token]) == (), "nothing in it stands twice"
    assert guess(drafter, state) == ()


def test_the_longer_match_outweighs_the_more_recent(library: ctypes.CDLL | None) -> None:
    drafter = SuffixDrafter(0, (), library)
    text = [1, 2, 3, 4, 50, 90, 3, 4, 60, 91, 3, 4, 60, 92, 1, 2, 3, 4]
    assert guess(drafter, started(drafter, state_of(text)), max_tokens=1) == (50,)


def test_the_more_frequent_continuation_wins(library: ctypes.CDLL | None) -> None:
    drafter = SuffixDrafter(0, (), library)
    text = [1, 2, 50, 91, 1, 2, 60, 92, 1, 2, 50, 93, 1, 2, 70, 94, 1, 2]
    state = started(drafter, state_of(text))
    (draft,) = drafter.propose([DraftRequest(state, 1)])
    assert draft is not None and draft.token_ids == (50,)
    assert draft.confidence[0] < 0.5, "two of four, and something new may come"


def test_confidence_grows_with_the_match_and_with_agreement(library: ctypes.CDLL | None) -> None:
    drafter = SuffixDrafter(0, (), library)

    def confidence(name: str, text: Sequence[int]) -> float:
        (draft,) = drafter.propose([DraftRequest(started(drafter, state_of(text, name)), 1)])
        assert draft is not None
        return draft.confidence[0]

    short = confidence("short", [1, 50, 90, 1])
    long = confidence("long", [1, 2, 3, 4, 5, 50, 90, 1, 2, 3, 4, 5])
    often = confidence("often", [1, 50, 90, 1, 50, 91, 1, 50, 92, 1])
    assert short < often < long


def test_a_period_is_continued_beyond_the_known_text(library: ctypes.CDLL | None) -> None:
    drafter = SuffixDrafter(0, (), library)
    state = started(drafter, state_of([7, *[1, 2, 3] * 4, 1, 2]))
    assert guess(drafter, state, max_tokens=32) == tuple([3, 1, 2] * 11)[:32]


def test_a_draft_ends_before_what_is_unlikely(library: ctypes.CDLL | None) -> None:
    drafter = SuffixDrafter(0, (), library)
    branches = [token for branch in range(MAX_CHAIN) for token in (1, 2, 100 + branch, 200 + branch)]
    (draft,) = drafter.propose([DraftRequest(started(drafter, state_of([*branches, 1, 2])), 32)])
    assert draft is not None and len(draft.token_ids) == 1, "sixteen ways to go on, each as likely"
    assert MIN_PREFIX_PROB <= draft.confidence[0] < 1 / MAX_CHAIN


def test_a_request_skipped_for_steps_catches_up(library: ctypes.CDLL | None) -> None:
    drafter = SuffixDrafter(0, (), library)
    state = started(drafter, state_of([1, 2, 3]))
    assert guess(drafter, state) == ()
    for token in (40, 41, 42, 43, 44, 40):
        state.append([token])
    assert guess(drafter, state, run=[41]) == (42, 43, 44, 40)


def test_one_call_drafts_for_all(library: ctypes.CDLL | None) -> None:
    drafter = SuffixDrafter(0, (), library)
    states = [
        started(drafter, state_of([i, i + 1, i + 2, i + 3, i, i + 1], str(i))) for i in range(10, 100, 5)
    ]
    drafts = drafter.propose([DraftRequest(state, 1 + i % 3) for i, state in enumerate(states)])
    expected = [(first + 2, first + 3, first)[: 1 + i % 3] for i, first in enumerate(range(10, 100, 5))]
    assert [draft.token_ids if draft else None for draft in drafts] == expected
    assert drafter.propose([]) == []


def test_finished_outputs_are_drafted_from(library: ctypes.CDLL | None) -> None:
    drafter = SuffixDrafter(CORPUS_BYTES, (), library)
    learn(drafter, range(1, 31))
    assert guess(drafter, started(drafter, state_of([50, *range(2, 20)]))) == (20, 21, 22, 23)


def test_a_draft_does_not_run_from_one_output_into_the_next(library: ctypes.CDLL | None) -> None:
    drafter = SuffixDrafter(CORPUS_BYTES, (), library)
    learn(drafter, [1, 2, 3, 4])
    learn(drafter, [5, 6, 7, 8])
    assert guess(drafter, started(drafter, state_of([50, 1, 2, 3]))) == (4,)
    assert guess(drafter, started(drafter, state_of([1, 2, 3, 4, 5], "b")), max_tokens=1) == (6,), (
        "the match is of one token"
    )


def test_what_was_not_delivered_is_not_learnt(library: ctypes.CDLL | None) -> None:
    drafter = SuffixDrafter(CORPUS_BYTES, (), library)
    drafter.start(state_of([1, 2, 3, 4, 5]))
    drafter.propose([DraftRequest(state_of([1, 2, 3, 4, 5, 6, 7, 8]), 4)])
    drafter.finish("a")
    assert guess(drafter, started(drafter, state_of([2, 3, 4], "b"))) == ()


def test_tenants_do_not_see_each_other(library: ctypes.CDLL | None) -> None:
    drafter = SuffixDrafter(CORPUS_BYTES, (), library)
    learn(drafter, range(1, 31), "alice")
    assert guess(drafter, started(drafter, state_of(range(1, 20), "bob", tenant="bob"))) == ()
    assert guess(drafter, started(drafter, state_of(range(1, 20), "nobody"))) == ()
    assert guess(drafter, started(drafter, state_of(range(1, 20), "alice", tenant="alice"))) == (
        20,
        21,
        22,
        23,
    )


def test_tenants_whose_hashes_collide_do_not_see_each_other_either(library: ctypes.CDLL | None) -> None:
    drafter = SuffixDrafter(64 * BYTES_PER_SLOT, (), library)
    learn(drafter, [1, *range(1, 50)], "alice")
    for i in range(300):
        assert guess(drafter, started(drafter, state_of([5, 2, 3, 4], f"{i}", tenant=f"{i}"))) == ()
    assert guess(drafter, started(drafter, state_of(range(1, 20), tenant="alice"))) != ()


def test_another_tenants_text_changes_no_guess(library: ctypes.CDLL | None) -> None:
    """Neither its tokens nor its number show in the draft, as long as nothing is evicted."""
    alone, shared = SuffixDrafter(CORPUS_BYTES, (), library), SuffixDrafter(CORPUS_BYTES, (), library)
    for drafter in (alone, shared):
        learn(drafter, [1, 2, 3, 4, 5, 6], "alice")
    for _ in range(MAX_CHAIN):
        learn(shared, [1, 2, 3, 9], "bob")
    drafts = [
        drafter.propose([DraftRequest(started(drafter, state_of([1, 2, 3], tenant="alice")), 4)])
        for drafter in (alone, shared)
    ]
    assert drafts[0] == drafts[1] != [None]


def test_the_oldest_output_is_forgotten_first(library: ctypes.CDLL | None) -> None:
    drafter = SuffixDrafter(100 * BYTES_PER_SLOT, (), library)
    learn(drafter, range(1, 41))
    learn(drafter, range(101, 141))
    learn(drafter, range(201, 241))
    assert guess(drafter, started(drafter, state_of([1, 2], "old"))) == ()
    assert guess(drafter, started(drafter, state_of(range(101, 110), "kept"))) == (110, 111, 112, 113)
    learn(drafter, range(1000, 3000))
    assert guess(drafter, started(drafter, state_of(range(2950, 2998), "end"))) == (2998, 2999)


@pytest.mark.parametrize("corpus_bytes", [0, 5, 63 * BYTES_PER_SLOT])
def test_no_memory_means_no_corpus(library: ctypes.CDLL | None, corpus_bytes: int) -> None:
    drafter = SuffixDrafter(corpus_bytes, (), library)
    learn(drafter, [1, 2, 3, 4])
    assert guess(drafter, started(drafter, state_of([1, 2, 3]))) == ()


def test_some_ids_are_never_drafted_nor_matched(library: ctypes.CDLL | None) -> None:
    drafter = SuffixDrafter(CORPUS_BYTES, (7, 300), library)
    learn(drafter, [11, 12, 7, 13, 14])
    assert guess(drafter, started(drafter, state_of([11], "a"))) == (12,)
    assert guess(drafter, started(drafter, state_of([1, 2, 7, 3, 4, 90, 1], "b"))) == (2,)
    assert guess(drafter, started(drafter, state_of([7, 3, 90, 7], "c"))) == ()
    assert guess(drafter, started(drafter, state_of([300, 301, 302, 300], "d"))) == ()


@given(
    runs=st.lists(st.lists(st.sampled_from([0, 1, 2, 7, 7]), min_size=1, max_size=6), min_size=1, max_size=8),
    learnt=st.lists(st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=6), max_size=3),
)
def test_no_guess_holds_what_is_never_drafted(runs: list[list[int]], learnt: list[list[int]]) -> None:
    """On both indexes, which say the same; and what is matched lies behind it."""
    built, _ = load_library()
    drafters = [SuffixDrafter(CORPUS_BYTES, (7,), one) for one in (None, built)]
    states = [started(drafter, state_of(runs[0])) for drafter in drafters]
    for output in learnt:
        for drafter in drafters:
            learn(drafter, output)
    for run in runs[1:]:
        found = {guess(drafter, state, run) for drafter, state in zip(drafters, states, strict=True)}
        assert len(found) == 1
        assert 7 not in found.pop()
        assert run[-1] != 7 or guess(drafters[0], states[0]) == ()


def test_a_run_of_placeholders_makes_no_chain() -> None:
    """Nothing is walked through, however long it is: nothing of it stands in a chain."""
    drafter = SuffixDrafter(0, (7,), None)
    state = started(drafter, state_of([1, 2, *[7] * 2000, 3, 1]))
    assert guess(drafter, state) == (2,)
    (text,) = drafter._index._texts.values()
    assert sum(map(bool, text.slots.links[0])) + sum(map(bool, text.slots.heads[0])) <= 3


def test_nothing_leaks(library: ctypes.CDLL | None) -> None:
    drafter = SuffixDrafter(CORPUS_BYTES, (), library)
    for name in ("a", "b", "c"):
        started(drafter, state_of([1, 2], name))
    drafter.check({"a", "b", "c"})
    with pytest.raises(AssertionError):
        drafter.check({"a", "b"})
    drafter.finish("b", [3, 4])
    drafter.check({"a", "c"})
    drafter.finish("a")
    drafter.finish("c")
    drafter.check(())
    drafter.finish("never started")
    drafter._index.start(0)
    with pytest.raises(AssertionError):
        drafter.check(())


def test_tenants_keep_their_number_while_they_are_remembered() -> None:
    namespaces = _Namespaces(2)
    assert [namespaces.get_id(tenant) for tenant in ("a", "b", "a", "c", "a", "b")] == [1, 2, 1, 3, 1, 4]
