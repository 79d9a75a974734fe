"""Incremental counts against full counts."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.core.params import MAX_REPEAT_LEN, SamplingParams
from foreword.core.request import Request
from foreword.sampling import penalties
from foreword.sampling.penalties import PenaltyState, SuffixRepeats, TokenCounts
from tests.support.budget import examples

IDS = st.integers(0, 9) | st.integers(0, 2000)
FEW_IDS = st.integers(0, 7) | st.integers(0, 2)

BREAKERS = ((7,), (5, 6), (4, 4, 6))


@given(
    runs=st.lists(st.lists(IDS, max_size=300), min_size=1, max_size=5),
    drafts=st.lists(st.lists(IDS, max_size=4), max_size=3),
    begin=st.integers(0, 5),
)
@settings(max_examples=examples(100))
def test_counts_match_a_full_count(runs: list[list[int]], drafts: list[list[int]], begin: int) -> None:
    summary, text = TokenCounts(begin), [0] * begin
    for run in runs:
        text += run
        summary.update(text)
        for draft in ([], *drafts):
            ids, counts = summary.counts(draft)
            assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == Counter([*text[begin:], *draft])
            assert len(set(ids.tolist())) == len(ids)


def test_output_counts_exclude_the_prompt() -> None:
    ledger = PenaltyState(Request("r", (1, 2, 2), SamplingParams(), seed=0))
    assert set(ledger.seen_ids([1, 2, 2, 3], (9,)).tolist()) == {1, 2, 3, 9}
    ids, counts = ledger.output_counts([1, 2, 2, 3, 2], (3, 9))
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {3: 2, 2: 1, 9: 1}


def test_allowed_mask_for_each_vocabulary_size() -> None:
    ledger = PenaltyState(
        Request("r", (1,), SamplingParams(allowed_token_ids=(0, 31, 31, 33, 10**9)), seed=0)
    )
    assert ledger.allowed_mask(64).tolist() == [1 - 2**31, 2]
    assert ledger.allowed_mask(33).tolist() == [1 - 2**31, 0]
    assert ledger.allowed_mask(64) is ledger.allowed_mask(64)


def searched(
    text: list[int], breakers: tuple[tuple[int, ...], ...], allowed: int, window: int
) -> dict[int, int]:
    """Brute force: the longest repeat that each id would continue."""
    reach = min(end_of_breaker(text, breakers), MAX_REPEAT_LEN)
    text = text if window < 0 else text[max(len(text) - window, 0) :]
    whole = len(text)
    found: dict[int, int] = {}
    for place in range(1, whole):
        length = 0
        while length < min(reach, place) and text[place - 1 - length] == text[whole - 1 - length]:
            length += 1
        if length >= allowed and (text[place],) not in breakers:
            found[text[place]] = max(found.get(text[place], 0), length)
    return found


def end_of_breaker(text: list[int], breakers: tuple[tuple[int, ...], ...]) -> int:
    """Number of tokens after the last breaker."""
    for after in range(len(text)):
        end = len(text) - after
        if any(tuple(text[max(end - len(breaker), 0) : end]) == breaker for breaker in breakers):
            return after
    return len(text)


def dense(
    text: list[int], breakers: tuple[tuple[int, ...], ...], allowed: int, window: int
) -> tuple[list[int], list[int]]:
    """The plain algorithm, with a length for each token of the text: ids and longest repeats."""
    cap = vars(penalties)["MAX_REPEAT_LEN"]
    ids, lengths = np.array(text), np.zeros(len(text) + 1, np.int32)
    for end in range(len(text)):
        longer = np.minimum(lengths[:end] + 1, cap)
        lengths[1 : end + 1] = np.where(ids[:end] == ids[end], longer, 0)
        if any(tuple(text[: end + 1][-len(breaker) :]) == breaker for breaker in breakers):
            lengths[:] = 0
    start = 0 if window < 0 else max(len(text) - window, 0)
    longest: dict[int, int] = {}
    for index in range(start + 1, len(text)):
        length = min(int(lengths[index]), index - start)
        if length >= allowed and (text[index],) not in breakers:
            longest[text[index]] = max(longest.get(text[index], 0), length)
    return sorted(longest), [longest[token_id] for token_id in sorted(longest)]


def continued(repeats: SuffixRepeats, draft: list[int]) -> dict[int, int]:
    ids, lengths = repeats.find_continuations(tuple(draft))
    return dict(zip(ids.tolist(), lengths.tolist(), strict=True))


@given(
    runs=st.lists(st.lists(FEW_IDS, max_size=40), min_size=1, max_size=6),
    drafts=st.lists(st.lists(FEW_IDS, max_size=5), max_size=4),
    breakers=st.lists(st.sampled_from(BREAKERS), unique=True).map(tuple),
    allowed=st.integers(0, 4),
    window=st.sampled_from([-1, 0, 1, 5, 30, 10**6]),
)
@settings(max_examples=examples(300))
def test_continuations_match_a_search(
    runs: list[list[int]],
    drafts: list[list[int]],
    breakers: tuple[tuple[int, ...], ...],
    allowed: int,
    window: int,
) -> None:
    repeats, text = SuffixRepeats(allowed, window, breakers), []
    for run in runs:
        text += run
        repeats.update(text)
        for draft in ([], *drafts, *(drafts[-1][:n] for n in range(5) if drafts)):
            assert continued(repeats, draft) == searched([*text, *draft], breakers, allowed, window)


@given(
    runs=st.lists(st.lists(st.integers(0, 2) | FEW_IDS, max_size=70), min_size=1, max_size=8),
    drafts=st.lists(st.lists(FEW_IDS, max_size=5), max_size=4),
    breakers=st.lists(st.sampled_from(BREAKERS), unique=True, max_size=2).map(tuple),
    allowed=st.integers(0, 4),
    window=st.sampled_from([-1, 0, 1, 5, 30, 10**6]),
)
@settings(max_examples=examples(300))
def test_sorted_places_match_a_length_for_each_token(
    runs: list[list[int]],
    drafts: list[list[int]],
    breakers: tuple[tuple[int, ...], ...],
    allowed: int,
    window: int,
) -> None:
    """Short tails and caps, as long texts have them; accepted drafts, rejected drafts, resumed requests."""
    with patch.multiple(penalties, MAX_TAIL=12, MAX_REPEAT_LEN=9):
        repeats, text = SuffixRepeats(allowed, window, breakers), []
        for run in runs:
            text += run
            repeats.update(text)
            resumed = SuffixRepeats(allowed, window, breakers)
            resumed.update(text)
            for draft in ([], *drafts, run[:4], [], *(run[:n] for n in range(5))):
                expected = dense([*text, *draft], breakers, allowed, window)
                for each in (repeats, resumed):
                    ids, lengths = each.find_continuations(tuple(draft))
                    assert (ids.tolist(), lengths.tolist()) == expected
                    assert ids.dtype == np.int64 and lengths.dtype == np.int32
            text += run[:3]  # an accepted draft
            repeats.update(text)


def test_token_is_searched_for_in_few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a row does not grow with the context: only the tail and the equal n-grams are visited."""
    visited: list[int] = []
    find = np.flatnonzero

    def visit(values: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        visited.append(len(values))
        return find(values)

    monkeypatch.setattr(np, "flatnonzero", visit)
    text = [*range(20_000), 5, 6]
    repeats = SuffixRepeats(2)
    repeats.update(text)
    for token_id in (7, 8):
        text.append(token_id)
        repeats.update(text)
        for draft in ((), (token_id + 1,), (token_id + 1, token_id + 2)):
            ids, _ = repeats.find_continuations(draft)
            assert ids.tolist() == [(*text, *draft)[-1] + 1]
            assert len(repeats._matches_after(draft).indices) == 1
    assert max(visited) <= penalties.MAX_TAIL


@pytest.mark.parametrize("size", [MAX_REPEAT_LEN, 3 * MAX_REPEAT_LEN, 5000])
def test_repeat_lengths_do_not_depend_on_update_sizes(size: int) -> None:
    at_once, one_by_one = SuffixRepeats(2), SuffixRepeats(2)
    text = [3] * size
    at_once.update(text)
    for n in range(0, size, 7):
        one_by_one.update(text[: n + 1])
    one_by_one.update(text)
    assert continued(at_once, []) == continued(one_by_one, []) == {3: min(size - 1, MAX_REPEAT_LEN)}
