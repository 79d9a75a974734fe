"""Share of the suite that runs: all tests with `pytest --full`; three times as many generated examples."""

import os
from typing import Final

from hypothesis import HealthCheck

VARIABLE = "FOREWORD_TEST_FULL"
SHARE, FULL_SHARE = 10, 3  # divisors of the number of examples, without and with --full
SHARED_FIXTURES: Final = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]  # shared by examples


def set_full(is_full: bool) -> None:
    """Called before any test module is imported; workers of pytest-xdist call it too."""
    if is_full:
        os.environ[VARIABLE] = "1"


def is_full() -> bool:
    return VARIABLE in os.environ


def examples(count: int) -> int:
    """Examples of a hypothesis test or iterations of a random one. `count` is a long search."""
    return max(count // (FULL_SHARE if is_full() else SHARE), 3)
