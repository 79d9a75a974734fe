"""Incremental counts against full counts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.core.params import MAX_REPEAT_LEN, SamplingParams
from foreword.core.request import Request
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


def continued(repeats: SuffixRepeats, draft: list[int], allowed: int, window: int) -> dict[int, int]:
    ids, lengths = repeats.find_continuations(tuple(draft), allowed, window)
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
    repeats, text = SuffixRepeats(breakers), []
    for run in runs:
        text += run
        repeats.update(text)
        for draft in ([], *drafts, *(drafts[-1][:n] for n in range(5) if drafts)):
            assert continued(repeats, draft, allowed, window) == searched(
                [*text, *draft], breakers, allowed, window
            )


@pytest.mark.parametrize("size", [MAX_REPEAT_LEN, 3 * MAX_REPEAT_LEN, 5000])
def test_repeat_lengths_do_not_depend_on_update_sizes(size: int) -> None:
    at_once, one_by_one = SuffixRepeats(), SuffixRepeats()
    text = [3] * size
    at_once.update(text)
    for n in range(0, size, 7):
        one_by_one.update(text[: n + 1])
    one_by_one.update(text)
    assert (
        continued(at_once, [], 2, -1)
        == continued(one_by_one, [], 2, -1)
        == {3: min(size - 1, MAX_REPEAT_LEN)}
    )
