"""The suffix drafter: drafts, namespaces, and eviction."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.core.structured_output import Vocabulary
from foreword.speculation.drafters.suffix import BYTES_PER_SLOT, SuffixDrafter, SuffixIndex, _Namespaces
from foreword.speculation.drafters.text import TextIndex
from foreword.speculation.engine_drafter import DraftRequest
from tests.support.budget import SHARED_FIXTURES
from tests.support.fakes import extended
from tests.support.suffix_index import MAX_CHAIN, MIN_PREFIX_PROB, ORDERS, PythonSuffixIndex

CORPUS_BYTES = 1000 * BYTES_PER_SLOT


def state_of(tokens: Sequence[int], name: str = "a", tenant: str = "") -> RequestState:
    return RequestState(Request(name, tuple(tokens), SamplingParams(), 0, cache_salt=tenant), 0, 10_000)


def draft_ids(
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
    """Finish a request with this output."""
    drafter.start(state_of([999], "teacher", tenant))
    drafter.finish("teacher", output)


def test_drafts_from_the_own_text(library: ctypes.CDLL) -> None:
    drafter = SuffixDrafter(0, (), library)
    state = started(drafter, state_of([1, 2, 3, 4, 5, 6, 7, 1, 2, 3]))
    assert draft_ids(drafter, state) == (4, 5, 6, 7)
    state.append([4, 5])
    assert draft_ids(drafter, state, run=[6], max_tokens=1) == (7,)


@pytest.mark.parametrize(
    "make",
    [
        lambda library: SuffixIndex(library, 0, ()),
        lambda library: TextIndex(library, Vocabulary((b"a",), (), (0,))),
    ],
    ids=["suffix", "text"],
)
def test_index_is_not_deleted_at_exit(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, make: Callable[[ctypes.CDLL], object]
) -> None:
    """A daemon thread may still be in a call, which does not hold the interpreter's lock."""
    finalizers: list[weakref.finalize] = []

    class Recorded(weakref.finalize):  # type: ignore[type-arg]
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            finalizers.append(self)

    monkeypatch.setattr(weakref, "finalize", Recorded)
    index = make(library)
    assert [finalizer.atexit for finalizer in finalizers] == [False] and finalizers[0].alive
    del index
    assert not finalizers[0].alive


def test_text_is_indexed_once(library: ctypes.CDLL) -> None:
    drafter = SuffixDrafter(0, (), library)
    state = started(drafter, state_of([1, 2, 3]))
    for token in (4, 5, 6):
        assert draft_ids(drafter, state, run=[token]) == (), "no token repeats"
    assert draft_ids(drafter, state) == ()


@pytest.mark.parametrize(
    ("text", "max_tokens", "expected"),
    [
        ([1, 2, 3, 4, 50, 90, 3, 4, 60, 91, 3, 4, 60, 92, 1, 2, 3, 4], 1, [50]),  # a longer match wins
        ([7, *[1, 2, 3] * 4, 1, 2], 32, ([3, 1, 2] * 11)[:32]),  # a period continues after the text
        (range(1, 100), 4, []),
        ([5], 4, []),
    ],
)
def test_continuation_of_the_own_text(
    library: ctypes.CDLL, text: Sequence[int], max_tokens: int, expected: list[int]
) -> None:
    drafter = SuffixDrafter(CORPUS_BYTES, (), library)
    assert list(draft_ids(drafter, started(drafter, state_of(text)), max_tokens=max_tokens)) == expected


def test_more_frequent_continuation_wins(library: ctypes.CDLL) -> None:
    drafter = SuffixDrafter(0, (), library)
    text = [1, 2, 50, 91, 1, 2, 60, 92, 1, 2, 50, 93, 1, 2, 70, 94, 1, 2]
    state = started(drafter, state_of(text))
    (draft,) = drafter.propose([DraftRequest(state, 1)])
    assert draft is not None and draft.token_ids == (50,)
    assert draft.confidence[0] < 0.5, "two of four matches, and an unseen token is possible"


def test_confidence_grows_with_the_match_and_with_agreement(library: ctypes.CDLL) -> None:
    drafter = SuffixDrafter(0, (), library)

    def confidence(name: str, text: Sequence[int]) -> float:
        (draft,) = drafter.propose([DraftRequest(started(drafter, state_of(text, name)), 1)])
        assert draft is not None
        return draft.confidence[0]

    short = confidence("short", [1, 50, 90, 1])
    long = confidence("long", [1, 2, 3, 4, 5, 50, 90, 1, 2, 3, 4, 5])
    often = confidence("often", [1, 50, 90, 1, 50, 91, 1, 50, 92, 1])
    assert short < often < long


def test_draft_ends_before_unlikely_tokens(library: ctypes.CDLL) -> None:
    drafter = SuffixDrafter(0, (), library)
    branches = [token for branch in range(MAX_CHAIN) for token in (1, 2, 100 + branch, 200 + branch)]
    (draft,) = drafter.propose([DraftRequest(started(drafter, state_of([*branches, 1, 2])), 32)])
    assert draft is not None and len(draft.token_ids) == 1, "sixteen equally likely continuations"
    assert MIN_PREFIX_PROB <= draft.confidence[0] < 1 / MAX_CHAIN


def test_skipped_request_catches_up(library: ctypes.CDLL) -> None:
    drafter = SuffixDrafter(0, (), library)
    state = started(drafter, state_of([1, 2, 3]))
    assert draft_ids(drafter, state) == ()
    for token in (40, 41, 42, 43, 44, 40):
        state.append([token])
    assert draft_ids(drafter, state, run=[41]) == (42, 43, 44, 40)


def test_one_call_serves_all_requests(library: ctypes.CDLL) -> None:
    drafter = SuffixDrafter(0, (), library)
    states = [
        started(drafter, state_of([i, i + 1, i + 2, i + 3, i, i + 1], str(i))) for i in range(10, 100, 5)
    ]
    drafts = drafter.propose([DraftRequest(state, 1 + i % 3) for i, state in enumerate(states)])
    expected = [(first + 2, first + 3, first)[: 1 + i % 3] for i, first in enumerate(range(10, 100, 5))]
    assert [draft.token_ids if draft else None for draft in drafts] == expected
    assert drafter.propose([]) == []


def test_drafts_from_finished_outputs(library: ctypes.CDLL) -> None:
    drafter = SuffixDrafter(CORPUS_BYTES, (), library)
    learn(drafter, range(1, 31))
    assert draft_ids(drafter, started(drafter, state_of([50, *range(2, 20)]))) == (20, 21, 22, 23)


def test_draft_does_not_cross_outputs(library: ctypes.CDLL) -> None:
    drafter = SuffixDrafter(CORPUS_BYTES, (), library)
    learn(drafter, [1, 2, 3, 4])
    learn(drafter, [5, 6, 7, 8])
    assert draft_ids(drafter, started(drafter, state_of([50, 1, 2, 3]))) == (4,)
    assert draft_ids(drafter, started(drafter, state_of([1, 2, 3, 4, 5], "b")), max_tokens=1) == (6,), (
        "one token matches"
    )


def test_undelivered_output_is_not_learned(library: ctypes.CDLL) -> None:
    drafter = SuffixDrafter(CORPUS_BYTES, (), library)
    drafter.start(state_of([1, 2, 3, 4, 5]))
    drafter.propose([DraftRequest(state_of([1, 2, 3, 4, 5, 6, 7, 8]), 4)])
    drafter.finish("a")
    assert draft_ids(drafter, started(drafter, state_of([2, 3, 4], "b"))) == ()


def test_cache_salts_are_isolated(library: ctypes.CDLL) -> None:
    drafter = SuffixDrafter(CORPUS_BYTES, (), library)
    learn(drafter, range(1, 31), "alice")
    drafts = {
        tenant: draft_ids(drafter, started(drafter, state_of(range(1, 20), tenant, tenant)))
        for tenant in ("bob", "", "alice")
    }
    assert drafts == {"bob": (), "": (), "alice": (20, 21, 22, 23)}


def test_hash_collisions_keep_cache_salts_isolated(library: ctypes.CDLL) -> None:
    drafter = SuffixDrafter(64 * BYTES_PER_SLOT, (), library)
    learn(drafter, [1, *range(1, 50)], "alice")
    for i in range(300):
        assert draft_ids(drafter, started(drafter, state_of([5, 2, 3, 4], f"{i}", tenant=f"{i}"))) == ()
    assert draft_ids(drafter, started(drafter, state_of(range(1, 20), tenant="alice"))) != ()


def test_output_of_another_salt_changes_no_draft(library: ctypes.CDLL) -> None:
    """Neither tokens nor confidence change, as long as nothing is evicted."""
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


def test_oldest_output_is_evicted_first(library: ctypes.CDLL) -> None:
    drafter = SuffixDrafter(100 * BYTES_PER_SLOT, (), library)
    learn(drafter, range(1, 41))
    learn(drafter, range(101, 141))
    learn(drafter, range(201, 241))
    assert draft_ids(drafter, started(drafter, state_of([1, 2], "old"))) == ()
    assert draft_ids(drafter, started(drafter, state_of(range(101, 110), "kept"))) == (110, 111, 112, 113)
    learn(drafter, range(1000, 3000))
    assert draft_ids(drafter, started(drafter, state_of(range(2950, 2998), "end"))) == (2998, 2999)


@pytest.mark.parametrize("corpus_bytes", [0, 5, 63 * BYTES_PER_SLOT])
def test_small_memory_means_no_corpus(library: ctypes.CDLL, corpus_bytes: int) -> None:
    drafter = SuffixDrafter(corpus_bytes, (), library)
    learn(drafter, [1, 2, 3, 4])
    assert draft_ids(drafter, started(drafter, state_of([1, 2, 3]))) == ()


def test_never_sampled_ids_are_not_matched(library: ctypes.CDLL) -> None:
    drafter = SuffixDrafter(CORPUS_BYTES, (7, 300), library)
    learn(drafter, [11, 12, 7, 13, 14])
    assert draft_ids(drafter, started(drafter, state_of([11], "a"))) == (12,)
    assert draft_ids(drafter, started(drafter, state_of([1, 2, 7, 3, 4, 90, 1], "b"))) == (2,)
    assert draft_ids(drafter, started(drafter, state_of([7, 3, 90, 7], "c"))) == ()
    assert draft_ids(drafter, started(drafter, state_of([300, 301, 302, 300], "d"))) == ()


@given(
    runs=st.lists(st.lists(st.sampled_from([0, 1, 2, 7, 7]), min_size=1, max_size=6), min_size=1, max_size=8),
    learned=st.lists(st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=6), max_size=3),
)
@settings(suppress_health_check=SHARED_FIXTURES)
def test_never_sampled_ids_are_not_drafted_at_any_time(
    library: ctypes.CDLL, runs: list[list[int]], learned: list[list[int]]
) -> None:
    drafter = SuffixDrafter(CORPUS_BYTES, (7,), library)
    state = started(drafter, state_of(runs[0]))
    for output in learned:
        learn(drafter, output)
    for run in runs[1:]:
        assert 7 not in draft_ids(drafter, state, run)
        assert run[-1] != 7 or draft_ids(drafter, state) == ()


def test_slot_size_matches_the_index() -> None:
    assert 4 * (2 + 2 * len(ORDERS)) == BYTES_PER_SLOT


def test_never_sampled_ids_enter_no_chain() -> None:
    """A long run of image placeholders costs no chain walk."""
    index = PythonSuffixIndex(0, (7,))
    text_id = index.start(0)
    ((token_ids, _),) = index.propose([(text_id, 4, [1, 2, *[7] * 2000, 3, 1])])
    ring = index._texts[text_id].ring
    assert token_ids == (2,)
    assert sum(map(bool, ring.links[0])) + sum(map(bool, ring.heads[0])) <= 3


def test_check_finds_leaks(library: ctypes.CDLL) -> None:
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


def test_namespace_ids_are_stable_and_unique() -> None:
    namespaces = _Namespaces(2)
    assert [namespaces.get_id(tenant) for tenant in ("a", "b", "a", "c", "a", "b")] == [1, 2, 1, 3, 1, 4]
