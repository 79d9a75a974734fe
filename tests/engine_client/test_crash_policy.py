"""Which request a crash is blamed on, and when the client gives up on the engine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foreword.engine_client.crash_policy import (
    CRASHES_TO_PROBE,
    HEALTHY_S,
    MAX_IDLE_CRASHES,
    MAX_START_ATTEMPTS,
    CrashSuspects,
    RestartPolicy,
)

NAMES = "abcd"


def test_two_crashes_in_a_row_make_a_suspect() -> None:
    suspects = CrashSuspects()
    assert suspects.on_crash(["a", "b"]) is None and suspects.quarantined is None
    assert suspects.on_crash(["b", "c"]) is None and suspects.quarantined == "b"


def test_token_between_two_crashes_clears() -> None:
    suspects = CrashSuspects()
    suspects.on_crash(["a", "b"])
    suspects.clear("b")
    suspects.on_crash(["a", "b"])
    assert suspects.quarantined == "a"
    suspects.clear("a")
    assert suspects.quarantined is None
    suspects.on_crash(["b"])
    assert suspects.quarantined == "b", "its second crash in a row"


def test_request_absent_from_one_crash_is_no_suspect() -> None:
    suspects = CrashSuspects()
    for busy_ids, idle_ids in (("a", "b"), ("b", "a"), ("a", "b"), ("b", "a")):
        suspects.on_crash(busy_ids, idle_ids)
    assert suspects.quarantined is None


def test_crash_of_a_replica_clears_no_request_of_others() -> None:
    suspects = CrashSuspects()
    for busy_ids in ("a", "b", "a"):
        suspects.on_crash(busy_ids)
    assert suspects.quarantined == "a" and "b" not in suspects


def test_crashes_of_other_replicas_are_counted_beside_a_suspect() -> None:
    suspects = CrashSuspects()
    for busy_ids in ("a", "a", "b", "b"):
        assert suspects.on_crash(busy_ids) is None
    assert suspects.quarantined == "a" and "b" in suspects
    suspects.clear("a")
    assert suspects.quarantined == "b"


def test_idle_crashes_blame_nobody() -> None:
    suspects = CrashSuspects()
    for busy_ids in (["a"], [], [], ["a"]):
        suspects.on_crash(busy_ids)
    assert suspects.quarantined == "a"
    assert suspects.on_crash([]) is None and suspects.quarantined == "a"


def test_suspects_run_alone_in_turn_and_crash_twice() -> None:
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


def test_cleared_suspect_starts_anew() -> None:
    suspects = CrashSuspects()
    for _ in range(3):
        suspects.on_crash(["a"])
    suspects.clear("a")
    assert suspects.on_crash(["a"]) is None and suspects.quarantined is None


@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.lists(st.sampled_from(NAMES), unique=True)), max_size=60)
)
def test_request_with_progress_is_never_refused(crashes: list[tuple[str, list[str]]]) -> None:
    """Before each crash one request gains a token; "a" always does."""
    suspects = CrashSuspects()
    for gained, busy_ids in crashes:
        for name in {gained, "a"}:
            suspects.clear(name)
        alone = suspects.quarantined
        refused = suspects.on_crash([name for name in busy_ids if alone in (None, name)])
        assert refused in (None, alone) and refused not in (gained, "a")


@given(st.lists(st.lists(st.sampled_from(NAMES[1:]), unique=True), min_size=4, max_size=4))
def test_poison_is_refused_within_four_crashes(batches: list[list[str]]) -> None:
    """All other requests gain tokens."""
    suspects = CrashSuspects()
    refused = None
    for others in batches:
        while suspects.quarantined not in (None, "a"):
            suspects.clear(suspects.quarantined)
        refused = suspects.on_crash(["a"] if suspects.quarantined == "a" else [*others, "a"])
        if refused is not None:
            break
    assert refused == "a"


def test_idle_crashes_end_in_giving_up() -> None:
    policy = RestartPolicy()
    restarts = [policy.on_crash(1.0, had_requests=False) for _ in range(MAX_IDLE_CRASHES)]
    assert restarts == [True] * (MAX_IDLE_CRASHES - 1) + [False]


def test_crashes_with_requests_do_not_count() -> None:
    policy = RestartPolicy()
    assert all(policy.on_crash(1.0, had_requests=True) for _ in range(100))
    restarts = [policy.on_crash(1.0, had) for had in [False, True, True] * MAX_IDLE_CRASHES]
    assert restarts.index(False) == 3 * (MAX_IDLE_CRASHES - 1)


def test_token_or_long_uptime_resets_the_count() -> None:
    policy = RestartPolicy()
    for reset in (policy.record_progress, lambda: policy.on_crash(HEALTHY_S, had_requests=True)):
        for _ in range(MAX_IDLE_CRASHES - 1):
            assert policy.on_crash(1.0, had_requests=False)
        reset()
    assert policy.on_crash(1.0, had_requests=False)


def test_probe_is_needed_until_a_token_comes() -> None:
    policy = RestartPolicy()
    for _ in range(CRASHES_TO_PROBE):
        assert not policy.needs_probe
        policy.on_crash(HEALTHY_S, had_requests=True)
    assert policy.needs_probe
    policy.record_progress()
    assert not policy.needs_probe


def test_failed_starts_end_in_giving_up() -> None:
    policy = RestartPolicy()
    assert policy.on_start_failed()
    policy.on_started()
    retries = [policy.on_start_failed() for _ in range(MAX_START_ATTEMPTS)]
    assert retries == [True] * (MAX_START_ATTEMPTS - 1) + [False]
