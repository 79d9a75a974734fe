"""Addresses that interpreted kernels write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder


class WriteTracker:
    """Written addresses in order."""

    def __init__(self) -> None:
        self.addresses: list[np.ndarray] = []

    def each_written_once(self, values: Tensor) -> bool:
        """Whether each value of a contiguous tensor was written exactly once."""
        offsets = np.concatenate(self.addresses) - np.uint64(values.data_ptr())  # lower addresses wrap around
        places = offsets // np.uint64(values.itemsize)
        inside = places[places < values.numel()].astype(np.int64)
        return bool((np.bincount(inside, minlength=values.numel()) == 1).all())


@contextmanager
def track_writes() -> Iterator[WriteTracker]:
    writes, store = WriteTracker(), InterpreterBuilder.create_masked_store

    def record_store(self: Any, pointers: Any, values: Any, mask: Any, *options: Any) -> Any:
        writes.addresses.append(pointers.data[mask.data].astype(np.uint64).ravel())
        return store(self, pointers, values, mask, *options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_store", record_store)
        yield writes
