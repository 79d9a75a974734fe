"""Patch Triton's language once per launch instead of once per device function call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.triton_interpreter import patch_once_per_launch


@pytest.fixture(autouse=True, scope="session")
def prepared_once_for_a_launch() -> Iterator[None]:
    with patch_once_per_launch():
        yield
