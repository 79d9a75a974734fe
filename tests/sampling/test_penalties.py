"""Incremental counts against full counts."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.sampling.penalties import PenaltyState, TokenCounts
from tests.support.budget import examples

IDS = st.integers(0, 9) | st.integers(0, 2000)


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
