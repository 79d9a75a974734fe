"""The regression watchdog and the exploration budget."""

import random

import pytest

from foreword.speculation.draft_length.exploration import ExplorationBudget
from foreword.speculation.draft_length.regression_watchdog import WINDOW_STEPS, RegressionWatchdog


def window(dog: RegressionWatchdog, gain: float, speed: float = 1.0) -> None:
    for _ in range(WINDOW_STEPS):
        dog.record_speculative(actual_s=speed, plain_cost=gain)


def anchored(speed: float = 1.0) -> RegressionWatchdog:
    dog = RegressionWatchdog()
    dog.record_plain(speed)
    return dog


def rest(dog: RegressionWatchdog) -> int:
    """Spend the pause in plain steps."""
    steps = dog.pause_steps
    for _ in range(steps):
        dog.record_plain(1.0)
    assert not dog.pause_steps
    return steps


def test_baseline_is_needed_first() -> None:
    assert RegressionWatchdog().wants_baseline
    assert not anchored().wants_baseline


def test_pauses_double_until_a_win() -> None:
    dog = anchored()
    rests = []
    for _ in range(9):
        window(dog, gain=0.9)
        rests.append(rest(dog))
    assert rests == [16, 32, 64, 128, 256, 512, 1024, 1024, 1024]
    window(dog, gain=1.5)
    assert not dog.pause_steps
    window(dog, gain=0.9)
    assert dog.wants_baseline and not dog.pause_steps, "after a win, one losing window must not pause"
    dog.record_plain(1.0)
    window(dog, gain=0.9)
    assert dog.pause_steps == 16


def test_machine_slowdown_is_no_loss() -> None:
    dog = anchored()
    window(dog, gain=1.5)
    window(dog, gain=1.5, speed=2.0)
    assert dog.wants_baseline and not dog.pause_steps
    dog.record_plain(2.0)
    window(dog, gain=1.5, speed=2.0)
    assert not dog.wants_baseline and not dog.pause_steps


def test_noise_is_no_loss() -> None:
    dog, rng = anchored(), random.Random(3)
    window(dog, gain=1.2)
    for _ in range(50 * WINDOW_STEPS):
        dog.record_speculative(actual_s=rng.gauss(1.0, 0.05), plain_cost=1.05)
    assert not dog.pause_steps and not dog.wants_baseline


def test_baseline_becomes_stale() -> None:
    dog = anchored()
    for _ in range(127):
        dog.record_speculative(1.0, 2.0)
    assert not dog.is_baseline_stale
    dog.record_speculative(1.0, 2.0)
    assert dog.is_baseline_stale
    dog.record_plain(1.0)
    assert dog.is_baseline_stale, "it proposed too: its caches may be cold"
    dog.record_sample()
    assert not dog.is_baseline_stale


def test_skipped_steps_count_as_pause() -> None:
    dog = anchored()
    window(dog, gain=0.5)
    dog.record_skipped(14)
    assert dog.pause_steps == 2


def test_exploration_budget_earns_and_refunds() -> None:
    """What was spent never falls: a metric counts it. Only explorations that did not pay are in it."""
    budget = ExplorationBudget()
    for _ in range(999):
        budget.earn(1.0)
    assert not budget.take(3.0)
    assert budget.reserve(2.9) and not budget.take(0.2) and budget.spent == 0.0
    budget.settle(2.9, has_paid=True)
    assert budget.reserve(2.9) and budget.spent == 0.0
    budget.settle(2.9, has_paid=False)
    assert not budget.take(0.2) and budget.spent == pytest.approx(2.9)


def test_exploration_budget_is_capped() -> None:
    budget = ExplorationBudget()
    for _ in range(100_000):
        budget.earn(1.0)
    assert not budget.take(6.5)
