"""Speculation stops where it loses, and trying has a budget."""

import random

import pytest

from foreword.speculation.control.watchdog import WINDOW_STEPS, ExplorationBudget, RegressionWatchdog


def window(dog: RegressionWatchdog, gain: float, speed: float = 1.0) -> None:
    for _ in range(WINDOW_STEPS):
        dog.record_speculative(actual_s=speed, plain_cost=gain)


def anchored(speed: float = 1.0) -> RegressionWatchdog:
    dog = RegressionWatchdog()
    dog.record_plain(speed)
    return dog


def rest(dog: RegressionWatchdog) -> int:
    """Sit a rest out in plain steps."""
    steps = dog.pause_steps
    for _ in range(steps):
        dog.record_plain(1.0)
    assert not dog.pause_steps
    return steps


def test_nothing_is_judged_before_a_plain_step() -> None:
    assert RegressionWatchdog().wants_baseline
    assert not anchored().wants_baseline


def test_rests_double_while_it_loses_and_begin_anew_when_it_wins() -> None:
    dog = anchored()
    rests = []
    for _ in range(9):
        window(dog, gain=0.9)
        rests.append(rest(dog))
    assert rests == [16, 32, 64, 128, 256, 512, 1024, 1024, 1024]
    window(dog, gain=1.5)
    assert not dog.pause_steps
    window(dog, gain=0.9)
    assert dog.wants_baseline and not dog.pause_steps, "one that won has the benefit of the doubt"
    dog.record_plain(1.0)
    window(dog, gain=0.9)
    assert dog.pause_steps == 16


def test_a_machine_that_slows_down_is_not_mistaken_for_a_loss() -> None:
    dog = anchored()
    window(dog, gain=1.5)
    window(dog, gain=1.5, speed=2.0)
    assert dog.wants_baseline and not dog.pause_steps
    dog.record_plain(2.0)
    window(dog, gain=1.5, speed=2.0)
    assert not dog.wants_baseline and not dog.pause_steps


def test_noise_is_no_loss() -> None:
    dog, luck = anchored(), random.Random(3)
    window(dog, gain=1.2)
    for _ in range(50 * WINDOW_STEPS):
        dog.record_speculative(actual_s=luck.gauss(1.0, 0.05), plain_cost=1.05)
    assert not dog.pause_steps and not dog.wants_baseline


def test_it_tells_when_plain_steps_are_long_ago() -> None:
    dog = anchored()
    for _ in range(255):
        dog.record_speculative(1.0, 2.0)
    assert not dog.is_baseline_stale
    dog.record_speculative(1.0, 2.0)
    assert dog.is_baseline_stale
    dog.record_plain(1.0)
    assert not dog.is_baseline_stale


def test_steps_that_were_not_measured_count_as_rest() -> None:
    dog = anchored()
    window(dog, gain=0.5)
    dog.record_skipped(14)
    assert dog.pause_steps == 2


def test_a_budget_is_a_share_of_the_time_and_what_pays_is_given_back() -> None:
    budget = ExplorationBudget()
    for _ in range(999):
        budget.earn(1.0)
    assert not budget.take(3.0)
    assert budget.take(2.9) and budget.spent == pytest.approx(2.9)
    assert not budget.take(0.2)
    budget.refund(2.9)
    assert budget.take(2.9) and budget.spent == pytest.approx(2.9)


def test_a_budget_is_not_saved_up_forever() -> None:
    budget = ExplorationBudget()
    for _ in range(100_000):
        budget.earn(1.0)
    assert not budget.take(6.5)
