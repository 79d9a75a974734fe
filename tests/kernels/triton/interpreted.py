"""Triton's interpreter made exact where its numpy is not: for proofs about bits on a machine without a GPU.

`exact_dots()` gives `tl.dot` one order of summation whatever the shape of a tile, and right products of bfloat16. It stands for
a tensor core whose rounding does not depend on the tile either. `programs_in()` runs the programs of a launch in another
order. On kernels that are compiled both do nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

__all__ = ["INTERPRETED", "exact_dots", "programs_in"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
AS_TORCH = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


@contextmanager
def exact_dots() -> Iterator[None]:
    """`tl.dot` in float64, k = 0, 1, ... added to the accumulator in this order, rounded once for each block."""
    with _replaced("create_dot", _dot):
        yield


@contextmanager
def programs_in(order: Callable[[list[int]], list[int]]) -> Iterator[None]:
    """Programs in the order that `order` makes of their numbers, x slowest, as the interpreter counts them."""
    place = InterpreterBuilder.set_grid_idx

    def elsewhere(self: Any, x: int, y: int, z: int) -> None:
        _, height, depth = self.grid_dim
        number = order(list(range(int(np.prod(self.grid_dim)))))[(x * height + y) * depth + z]
        place(self, number // (height * depth), number // depth % height, number % depth)

    with _replaced("set_grid_idx", elsewhere):
        yield


@contextmanager
def _replaced(name: str, method: Callable[..., Any]) -> Iterator[None]:
    original = getattr(InterpreterBuilder, name)
    setattr(InterpreterBuilder, name, method)
    try:
        yield
    finally:
        setattr(InterpreterBuilder, name, original)


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    left, right = _wide(a), _wide(b)
    total = d.data.astype(np.float64)
    product = np.empty_like(total)
    for k in range(left.shape[-1]):
        total += np.multiply(left[..., :, k, None], right[..., None, k, :], out=product)
    return TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)


def _wide(operand: Any) -> Any:
    """float64; the interpreter keeps types that numpy lacks as unsigned integers."""
    stored = AS_TORCH.get(operand.dtype.scalar)
    if stored is None:
        return operand.data.astype(np.float64)
    integers = torch.uint16 if stored.itemsize == 2 else torch.uint8
    return torch.from_numpy(operand.data.copy()).view(integers).view(stored).double().numpy()
