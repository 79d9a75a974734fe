"""Sums of speculation: exact figures, and bounds that hold for any sequence of drafts."""

from hypothesis import given
from hypothesis import strategies as st

from foreword.metrics.tally import DraftTally


def test_ratios_do_not_exist_before_a_draft() -> None:
    tally = DraftTally()
    assert (tally.acceptance, tally.mean_length, tally.efficiency, tally.acceptance_at) == (None, None, None, ())


def test_positions_have_bases_of_their_own() -> None:
    tally = DraftTally()
    tally.add(drafted=4, accepted=2, emitted=3)
    tally.add(drafted=1, accepted=1, emitted=2)
    assert tally.drafted_at == [2, 1, 1, 1]
    assert tally.accepted_at == [2, 1]
    assert tally.acceptance_at == (1.0, 1.0, 0.0, 0.0)
    assert tally.acceptance == 3 / 5
    assert tally.mean_length == 5 / 2
    assert tally.efficiency == 5 / 7


def test_tallies_add_up() -> None:
    one, other, both = DraftTally(), DraftTally(), DraftTally()
    one.add(drafted=4, accepted=2, emitted=3)
    other.add(drafted=1, accepted=1, emitted=2)
    other.add(drafted=6, accepted=0, emitted=1)
    for tally in (one, other):
        both.include(tally)
    assert (both.verify_steps, both.drafted, both.accepted, both.emitted) == (3, 11, 3, 6)
    assert both.drafted_at == [3, 2, 2, 2, 1, 1] and both.accepted_at == [2, 1]
    assert one.drafted_at == [1, 1, 1, 1], "what is added stays as it was"


@st.composite
def drafts(draw: st.DrawFn) -> tuple[int, int, int]:
    drafted = draw(st.integers(1, 16))
    accepted = draw(st.integers(0, drafted))
    return drafted, accepted, draw(st.integers(max(accepted, 1), accepted + 1))


@given(st.lists(drafts(), min_size=1, max_size=30))
def test_every_ratio_lies_in_its_bounds(runs: list[tuple[int, int, int]]) -> None:
    tally = DraftTally()
    for run in runs:
        tally.add(*run)
    assert tally.acceptance is not None and tally.efficiency is not None and tally.mean_length is not None
    assert 0 <= tally.acceptance <= 1
    assert 0 < tally.efficiency <= 1
    assert 1 <= tally.mean_length <= 17
    assert sum(tally.drafted_at) == tally.drafted
    assert sum(tally.accepted_at) == tally.accepted
    assert all(0 <= rate <= 1 for rate in tally.acceptance_at)
