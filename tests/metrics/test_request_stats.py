"""SpecDecodeStats: exact values, and bounds for any sequence of drafts."""

from hypothesis import given
from hypothesis import strategies as st

from foreword.metrics.request_stats import SpecDecodeStats


def test_ratios_are_none_before_a_draft() -> None:
    tally = SpecDecodeStats()
    assert (
        tally.acceptance_rate,
        tally.mean_acceptance_len,
        tally.system_efficiency,
        tally.acceptance_per_position,
    ) == (None, None, None, ())


def test_acceptance_per_position_has_own_base() -> None:
    tally = SpecDecodeStats()
    tally.add(num_drafted=4, num_accepted=2, num_emitted=3)
    tally.add(num_drafted=1, num_accepted=1, num_emitted=2)
    assert tally.drafted_per_position == [2, 1, 1, 1]
    assert tally.accepted_per_position == [2, 1]
    assert tally.acceptance_per_position == (1.0, 1.0, 0.0, 0.0)
    assert tally.acceptance_rate == 3 / 5
    assert tally.mean_acceptance_len == 5 / 2
    assert tally.system_efficiency == 5 / 7


def test_merge_adds_sums() -> None:
    one, other, both = SpecDecodeStats(), SpecDecodeStats(), SpecDecodeStats()
    one.add(num_drafted=4, num_accepted=2, num_emitted=3)
    other.add(num_drafted=1, num_accepted=1, num_emitted=2)
    other.add(num_drafted=6, num_accepted=0, num_emitted=1)
    for tally in (one, other):
        both.merge(tally)
    assert (both.num_verify_steps, both.num_drafted, both.num_accepted, both.num_emitted) == (3, 11, 3, 6)
    assert both.drafted_per_position == [3, 2, 2, 2, 1, 1] and both.accepted_per_position == [2, 1]
    assert one.drafted_per_position == [1, 1, 1, 1], "merge() changed its argument"


@st.composite
def drafts(draw: st.DrawFn) -> tuple[int, int, int]:
    drafted = draw(st.integers(1, 16))
    accepted = draw(st.integers(0, drafted))
    return drafted, accepted, draw(st.integers(max(accepted, 1), accepted + 1))


@given(st.lists(drafts(), min_size=1, max_size=30))
def test_ratios_are_within_bounds(runs: list[tuple[int, int, int]]) -> None:
    tally = SpecDecodeStats()
    for run in runs:
        tally.add(*run)
    assert (
        tally.acceptance_rate is not None
        and tally.system_efficiency is not None
        and tally.mean_acceptance_len is not None
    )
    assert 0 <= tally.acceptance_rate <= 1
    assert 0 < tally.system_efficiency <= 1
    assert 1 <= tally.mean_acceptance_len <= 17
    assert sum(tally.drafted_per_position) == tally.num_drafted
    assert sum(tally.accepted_per_position) == tally.num_accepted
    assert all(0 <= rate <= 1 for rate in tally.acceptance_per_position)
