"""Silences that the kills benchmark reports."""

from benchmarks.kills import longest_pauses, longest_silences


def test_silence_is_of_one_stream_and_pause_of_all() -> None:
    heard = [[0.0, 1.0, 4.0, 4.5], [0.5, 2.0, 3.5]]
    times = [time_s for each in heard for time_s in each]
    assert longest_silences([1.5, 4.2], heard) == [3.0, 0.5]
    assert longest_pauses([1.5], times) == [1.5]


def test_kill_after_the_last_token_has_no_silence() -> None:
    assert longest_silences([9.0], [[0.0, 1.0]]) == []
