"""Kernels run in Triton's interpreter, in less time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.device import DEVICE
from tests.support.triton_interpreter import fast_interpreter


@pytest.fixture(autouse=True, scope="session")
def prepared_interpreter() -> Iterator[None]:
    with fast_interpreter():
        yield


@pytest.fixture(scope="module")
def on_device() -> Iterator[None]:
    """New tensors are on the GPU, if there is one."""
    with torch.device(DEVICE):
        yield
