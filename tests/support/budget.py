"""How much of the suite runs: all of it with `pytest --full`, else a tenth of the generated examples."""

import os
from typing import Final

from hypothesis import HealthCheck

VARIABLE = "FOREWORD_TEST_FULL"
SHARE = 10  # of the examples, without --full
SHARED_FIXTURES: Final = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]  # shared by examples


def set_full(is_full: bool) -> None:
    """Called before any test module is imported; workers of pytest-xdist call it too."""
    if is_full:
        os.environ[VARIABLE] = "1"


def is_full() -> bool:
    return VARIABLE in os.environ


def examples(count: int) -> int:
    """Examples of a hypothesis test or iterations of a random one: all of them with --full."""
    return count if is_full() else max(count // SHARE, 3)
