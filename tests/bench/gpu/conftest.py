"""Kernels run in Triton's interpreter, in less time, also in the processes of jobs, which are forks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.triton_interpreter import fast_interpreter


@pytest.fixture(autouse=True, scope="package")
def prepared_interpreter() -> Iterator[None]:
    with fast_interpreter():
        yield
