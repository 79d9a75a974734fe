"""Whose fault a death may be: who was there twice without gaining anything, and nobody else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foreword.engine_client.inflight import (
    CRASHES_TO_PROBE,
    HEALTHY_S,
    MAX_IDLE_CRASHES,
    MAX_START_ATTEMPTS,
    CrashSuspects,
    RestartPolicy,
)

NAMES = "abcd"


def test_two_deaths_in_a_row_make_suspect() -> None:
    suspects = CrashSuspects()
    assert suspects.on_crash(["a", "b"]) is None and suspects.quarantined is None
    assert suspects.on_crash(["b", "c"]) is None and suspects.quarantined == "b"


def test_a_token_between_two_deaths_clears() -> None:
    suspects = CrashSuspects()
    suspects.on_crash(["a", "b"])
    suspects.clear("b")
    suspects.on_crash(["a", "b"])
    assert suspects.quarantined == "a"
    suspects.clear("a")
    assert suspects.quarantined is None
    suspects.on_crash(["b"])
    assert suspects.quarantined == "b", "it was there twice by now"


def test_who_was_not_there_at_one_death_is_no_suspect() -> None:
    suspects = CrashSuspects()
    for at_work in (["a"], ["b"], ["a"], ["b"]):
        suspects.on_crash(at_work)
        assert suspects.quarantined is None


def test_deaths_of_engines_that_did_nothing_say_nothing() -> None:
    suspects = CrashSuspects()
    for at_work in (["a"], [], [], ["a"]):
        suspects.on_crash(at_work)
    assert suspects.quarantined == "a"
    assert suspects.on_crash([]) is None and suspects.quarantined == "a"


def test_suspects_take_turns_and_die_alone_twice() -> None:
    suspects = CrashSuspects()
    suspects.on_crash(["a", "b", "c"])
    suspects.on_crash(["a", "b", "c"])
    assert suspects.quarantined == "a"
    assert suspects.on_crash(["a"]) is None and suspects.quarantined == "a"
    assert suspects.on_crash(["a"]) == "a" and suspects.quarantined == "b"
    suspects.clear("b")
    assert suspects.quarantined == "c"
    suspects.clear("c")
    assert suspects.quarantined is None


def test_who_is_cleared_alone_begins_anew() -> None:
    suspects = CrashSuspects()
    for _ in range(3):
        suspects.on_crash(["a"])
    suspects.clear("a")
    assert suspects.on_crash(["a"]) is None and suspects.quarantined is None


@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.lists(st.sampled_from(NAMES), unique=True)), max_size=60)
)
def test_nobody_is_condemned_who_gains_something_between_deaths(deaths: list[tuple[str, list[str]]]) -> None:
    """Before each death one request gains a token; "a" always does."""
    suspects = CrashSuspects()
    for gained, at_work in deaths:
        for name in {gained, "a"}:
            suspects.clear(name)
        alone = suspects.quarantined
        condemned = suspects.on_crash([name for name in at_work if alone in (None, name)])
        assert condemned in (None, alone) and condemned not in (gained, "a")


@given(st.lists(st.lists(st.sampled_from(NAMES[1:]), unique=True), min_size=4, max_size=4))
def test_who_always_kills_is_found_within_four_deaths(beside: list[list[str]]) -> None:
    """Others that run beside it gain their tokens."""
    suspects = CrashSuspects()
    condemned = None
    for others in beside:
        while suspects.quarantined not in (None, "a"):
            suspects.clear(suspects.quarantined)
        at_work = ["a"] if suspects.quarantined == "a" else [*others, "a"]
        condemned = suspects.on_crash(at_work)
        if condemned is not None:
            break
    assert condemned == "a"


def test_patience_ends_after_deaths_of_nothing() -> None:
    patience = RestartPolicy()
    assert [patience.on_crash(1.0, had_requests=False) for _ in range(MAX_IDLE_CRASHES)] == [True] * (
        MAX_IDLE_CRASHES - 1
    ) + [False]


def test_deaths_in_the_midst_of_work_end_no_patience_and_restore_none() -> None:
    patience = RestartPolicy()
    assert all(patience.on_crash(1.0, had_requests=True) for _ in range(100))
    deaths = [patience.on_crash(1.0, blamed) for blamed in [False, True, True] * MAX_IDLE_CRASHES]
    assert deaths.index(False) == 3 * (MAX_IDLE_CRASHES - 1)


def test_patience_is_restored_by_a_token_and_by_a_long_life() -> None:
    patience = RestartPolicy()
    for restore in (patience.record_progress, lambda: patience.on_crash(HEALTHY_S, had_requests=True)):
        for _ in range(MAX_IDLE_CRASHES - 1):
            assert patience.on_crash(1.0, had_requests=False)
        restore()
    assert patience.on_crash(1.0, had_requests=False)


def test_an_engine_is_in_doubt_until_somebody_gains_a_token() -> None:
    patience = RestartPolicy()
    for _ in range(CRASHES_TO_PROBE):
        assert not patience.needs_probe
        patience.on_crash(HEALTHY_S, had_requests=True)
    assert patience.needs_probe
    patience.record_progress()
    assert not patience.needs_probe


def test_three_starts_that_fail_are_enough() -> None:
    patience = RestartPolicy()
    assert patience.on_start_failed()
    patience.on_started()
    assert [patience.on_start_failed() for _ in range(MAX_START_ATTEMPTS)] == [True] * (
        MAX_START_ATTEMPTS - 1
    ) + [False]
