"""Whose fault a death may be: who was there twice without gaining anything, and nobody else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foreword.engine.suspects import DOUBTS, MAX_DEATHS, MAX_STARTS, STEADY_S, Patience, Suspects

NAMES = "abcd"


def test_two_deaths_in_a_row_make_suspect() -> None:
    suspects = Suspects()
    assert suspects.died(["a", "b"]) is None and suspects.alone is None
    assert suspects.died(["b", "c"]) is None and suspects.alone == "b"


def test_a_token_between_two_deaths_clears() -> None:
    suspects = Suspects()
    suspects.died(["a", "b"])
    suspects.clear("b")
    suspects.died(["a", "b"])
    assert suspects.alone == "a"
    suspects.clear("a")
    assert suspects.alone is None
    suspects.died(["b"])
    assert suspects.alone == "b", "it was there twice by now"


def test_who_was_not_there_at_one_death_is_no_suspect() -> None:
    suspects = Suspects()
    for at_work in (["a"], ["b"], ["a"], ["b"]):
        suspects.died(at_work)
        assert suspects.alone is None


def test_deaths_of_engines_that_did_nothing_say_nothing() -> None:
    suspects = Suspects()
    for at_work in (["a"], [], [], ["a"]):
        suspects.died(at_work)
    assert suspects.alone == "a"
    assert suspects.died([]) is None and suspects.alone == "a"


def test_suspects_take_turns_and_die_alone_twice() -> None:
    suspects = Suspects()
    suspects.died(["a", "b", "c"])
    suspects.died(["a", "b", "c"])
    assert suspects.alone == "a"
    assert suspects.died(["a"]) is None and suspects.alone == "a"
    assert suspects.died(["a"]) == "a" and suspects.alone == "b"
    suspects.clear("b")
    assert suspects.alone == "c"
    suspects.clear("c")
    assert suspects.alone is None


def test_who_is_cleared_alone_begins_anew() -> None:
    suspects = Suspects()
    for _ in range(3):
        suspects.died(["a"])
    suspects.clear("a")
    assert suspects.died(["a"]) is None and suspects.alone is None


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.lists(st.sampled_from(NAMES), unique=True)), max_size=60))
def test_nobody_is_condemned_who_gains_something_between_deaths(deaths: list[tuple[str, list[str]]]) -> None:
    """Before each death one request gains a token; "a" always does."""
    suspects = Suspects()
    for gained, at_work in deaths:
        for name in {gained, "a"}:
            suspects.clear(name)
        alone = suspects.alone
        condemned = suspects.died([name for name in at_work if alone in (None, name)])
        assert condemned in (None, alone) and condemned not in (gained, "a")


@given(st.lists(st.lists(st.sampled_from(NAMES[1:]), unique=True), min_size=4, max_size=4))
def test_who_always_kills_is_found_within_four_deaths(beside: list[list[str]]) -> None:
    """Others that run beside it gain their tokens."""
    suspects = Suspects()
    condemned = None
    for others in beside:
        while suspects.alone not in (None, "a"):
            suspects.clear(suspects.alone)
        at_work = ["a"] if suspects.alone == "a" else [*others, "a"]
        condemned = suspects.died(at_work)
        if condemned is not None:
            break
    assert condemned == "a"


def test_patience_ends_after_deaths_of_nothing() -> None:
    patience = Patience()
    assert [patience.died(1.0, blamed=False) for _ in range(MAX_DEATHS)] == [True] * (MAX_DEATHS - 1) + [False]


def test_deaths_in_the_midst_of_work_end_no_patience_and_restore_none() -> None:
    patience = Patience()
    assert all(patience.died(1.0, blamed=True) for _ in range(100))
    deaths = [patience.died(1.0, blamed) for blamed in [False, True, True] * MAX_DEATHS]
    assert deaths.index(False) == 3 * (MAX_DEATHS - 1)


def test_patience_is_restored_by_a_token_and_by_a_long_life() -> None:
    patience = Patience()
    for restore in (patience.delivered, lambda: patience.died(STEADY_S, blamed=True)):
        for _ in range(MAX_DEATHS - 1):
            assert patience.died(1.0, blamed=False)
        restore()
    assert patience.died(1.0, blamed=False)


def test_an_engine_is_in_doubt_until_somebody_gains_a_token() -> None:
    patience = Patience()
    for _ in range(DOUBTS):
        assert not patience.in_doubt
        patience.died(STEADY_S, blamed=True)
    assert patience.in_doubt
    patience.delivered()
    assert not patience.in_doubt


def test_three_starts_that_fail_are_enough() -> None:
    patience = Patience()
    assert patience.failed_to_start()
    patience.started()
    assert [patience.failed_to_start() for _ in range(MAX_STARTS)] == [True] * (MAX_STARTS - 1) + [False]
