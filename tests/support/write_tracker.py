"""Which addresses the kernels of the interpreter write, and how often."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

__all__ = ["WriteTracker", "track_writes"]


class WriteTracker:
    """Addresses in the order in which they were written."""

    def __init__(self) -> None:
        self.addresses: list[np.ndarray] = []

    def each_written_once(self, values: Tensor) -> bool:
        """Whether each value of a contiguous tensor was written exactly once."""
        every = np.concatenate(self.addresses)
        places = (every - np.uint64(values.data_ptr())) // np.uint64(
            values.itemsize
        )  # of addresses below it: far above
        return bool(
            (
                np.bincount(places[places < values.numel()].astype(np.int64), minlength=values.numel()) == 1
            ).all()
        )


@contextmanager
def track_writes() -> Iterator[WriteTracker]:
    writes, store = WriteTracker(), InterpreterBuilder.create_masked_store

    def noted(self: Any, pointers: Any, values: Any, mask: Any, *options: Any) -> Any:
        writes.addresses.append(pointers.data[mask.data].astype(np.uint64).ravel())
        return store(self, pointers, values, mask, *options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_store", noted)
        yield writes
