"""Kernels run in Triton's interpreter, in less time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.triton_interpreter import fast_interpreter


@pytest.fixture(autouse=True, scope="session")
def prepared_interpreter() -> Iterator[None]:
    with fast_interpreter():
        yield
