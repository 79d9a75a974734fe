"""Speculation stops where it loses, and trying has a budget."""

import random

import pytest

from foreword.drafting.control.watchdog import WINDOW, Budget, Watchdog


def window(dog: Watchdog, gain: float, speed: float = 1.0) -> None:
    for _ in range(WINDOW):
        dog.speculated(realised=speed, needed=gain)


def anchored(speed: float = 1.0) -> Watchdog:
    dog = Watchdog()
    dog.plain(speed)
    return dog


def rest(dog: Watchdog) -> int:
    """Sit a rest out in plain steps."""
    steps = dog.resting
    for _ in range(steps):
        dog.plain(1.0)
    assert not dog.resting
    return steps


def test_nothing_is_judged_before_a_plain_step() -> None:
    assert Watchdog().wants_plain
    assert not anchored().wants_plain


def test_rests_double_while_it_loses_and_begin_anew_when_it_wins() -> None:
    dog = anchored()
    rests = []
    for _ in range(9):
        window(dog, gain=0.9)
        rests.append(rest(dog))
    assert rests == [16, 32, 64, 128, 256, 512, 1024, 1024, 1024]
    window(dog, gain=1.5)
    assert not dog.resting
    window(dog, gain=0.9)
    assert dog.wants_plain and not dog.resting, "one that won has the benefit of the doubt"
    dog.plain(1.0)
    window(dog, gain=0.9)
    assert dog.resting == 16


def test_a_machine_that_slows_down_is_not_mistaken_for_a_loss() -> None:
    dog = anchored()
    window(dog, gain=1.5)
    window(dog, gain=1.5, speed=2.0)
    assert dog.wants_plain and not dog.resting
    dog.plain(2.0)
    window(dog, gain=1.5, speed=2.0)
    assert not dog.wants_plain and not dog.resting


def test_noise_is_no_loss() -> None:
    dog, luck = anchored(), random.Random(3)
    window(dog, gain=1.2)
    for _ in range(50 * WINDOW):
        dog.speculated(realised=luck.gauss(1.0, 0.05), needed=1.05)
    assert not dog.resting and not dog.wants_plain


def test_it_tells_when_plain_steps_are_long_ago() -> None:
    dog = anchored()
    for _ in range(255):
        dog.speculated(1.0, 2.0)
    assert not dog.stale
    dog.speculated(1.0, 2.0)
    assert dog.stale
    dog.plain(1.0)
    assert not dog.stale


def test_steps_that_were_not_measured_count_as_rest() -> None:
    dog = anchored()
    window(dog, gain=0.5)
    dog.rested(14)
    assert dog.resting == 2


def test_a_budget_is_a_share_of_the_time_and_what_pays_is_given_back() -> None:
    budget = Budget()
    for _ in range(999):
        budget.earn(1.0)
    assert not budget.take(3.0)
    assert budget.take(2.9) and budget.spent == pytest.approx(2.9)
    assert not budget.take(0.2)
    budget.refund(2.9)
    assert budget.take(2.9) and budget.spent == pytest.approx(2.9)


def test_a_budget_is_not_saved_up_forever() -> None:
    budget = Budget()
    for _ in range(100_000):
        budget.earn(1.0)
    assert not budget.take(6.5)
