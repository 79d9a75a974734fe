"""Share of the suite that runs: all tests with `pytest --full`; five times as many generated examples."""

import os
from collections.abc import Iterable
from typing import Final, TypeVar

from hypothesis import HealthCheck

Case = TypeVar("Case")
VARIABLE = "FOREWORD_TEST_FULL"
SHARE, FULL_SHARE = 15, 3  # divisors of the number of examples, without and with --full
SHARED_FIXTURES: Final = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]  # shared by examples


def set_full(is_full: bool) -> None:
    """Called before any test module is imported; workers of pytest-xdist call it too."""
    if is_full:
        os.environ[VARIABLE] = "1"


def is_full() -> bool:
    return VARIABLE in os.environ


def some_of(cases: Iterable[Case], step: int) -> tuple[Case, ...]:
    """All cases with --full, else each `step`-th."""
    return tuple(cases)[:: 1 if is_full() else step]


def examples(count: int) -> int:
    """Examples of a hypothesis test or iterations of a random one. `count` is a long search."""
    return max(count // (FULL_SHARE if is_full() else SHARE), 3)
