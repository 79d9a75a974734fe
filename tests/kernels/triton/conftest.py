"""The interpreter prepares Triton's language for each call between kernels' functions; here it does so once for a launch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.triton.interpreted import prepared_once


@pytest.fixture(autouse=True, scope="session")
def prepared_once_for_a_launch() -> Iterator[None]:
    with prepared_once():
        yield
