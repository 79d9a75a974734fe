"""Triton's interpreter made exact where its numpy is not: for proofs about bits on a machine without a GPU.

`exact_dots()` gives `tl.dot` one order of summation whatever the shape of a tile, and right products of bfloat16. It stands for
a tensor core whose rounding does not depend on the tile either. `programs_in()` runs the programs of a launch in another
order. `prepared_once()` saves time. On kernels that are compiled they do nothing.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

__all__ = ["IS_INTERPRETED", "exact_dot", "patch_once_per_launch", "program_order"]

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
AS_TORCH = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


@contextmanager
def exact_dot() -> Iterator[None]:
    """`tl.dot` in float64, k = 0, 1, ... added to the accumulator in this order, rounded once for each block. Whole numbers
    become bfloat16 by their value."""
    with _replace_method("create_dot", _dot), _replace_method("create_si_to_fp", _cast_by_value):
        yield


@contextmanager
def program_order(order: Callable[[list[int]], list[int]]) -> Iterator[None]:
    """Programs in the order that `order` makes of their numbers, x slowest, as the interpreter counts them."""
    place = InterpreterBuilder.set_grid_idx

    def elsewhere(self: Any, x: int, y: int, z: int) -> None:
        _, height, depth = self.grid_dim
        number = order(list(range(int(np.prod(self.grid_dim)))))[(x * height + y) * depth + z]
        place(self, number // (height * depth), number // depth % height, number % depth)

    with _replace_method("set_grid_idx", elsewhere):
        yield


@contextmanager
def patch_once_per_launch() -> Iterator[None]:
    """Triton's language is prepared once for a launch, not for each call between kernels' functions."""
    once = _PatchOnce(interpreter._patch_lang)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", once)
        patch.setattr(
            interpreter.GridExecutor, "__call__", once.run_launch(interpreter.GridExecutor.__call__)
        )
        yield


class _PatchOnce:
    """Replaces the interpreter's `_patch_lang`: within a launch, what is prepared stays so until its end."""

    def __init__(self, prepare: Callable[[Any], Any]) -> None:
        self._prepare = prepare
        self._prepared: set[str] | None = None  # None outside of a launch

    def __call__(self, function: Any) -> Any:
        wanted = {name for name, value in _modules_of(function) if value in (tl, tl.core)}
        if self._prepared is None:
            return self._prepare(function)
        if not wanted <= self._prepared:
            self._prepared |= wanted
            self._prepare(function)
        return self

    def restore(self) -> None:
        """What a launch prepared itself is all that is put back, as without this."""

    def run_launch(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        def launched(executor: Any, *arguments: Any, **options: Any) -> Any:
            scope = self._prepare(executor.fn)
            self._prepared = {name for name, value in _modules_of(executor.fn) if value in (tl, tl.core)}
            try:
                return launch(executor, *arguments, **options)
            finally:
                self._prepared = None
                scope.restore()

        return launched


def _modules_of(function: Any) -> list[tuple[str, Any]]:
    """(name, module) of the modules that a function sees."""
    return [(value.__name__, value) for value in function.__globals__.values() if inspect.ismodule(value)]


@contextmanager
def _replace_method(name: str, method: Callable[..., Any]) -> Iterator[None]:
    original = getattr(InterpreterBuilder, name)
    setattr(InterpreterBuilder, name, method)
    try:
        yield
    finally:
        setattr(InterpreterBuilder, name, original)


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    left, right = _to_float64(a), _to_float64(b)
    total = d.data.astype(np.float64)
    product = np.empty_like(total)
    for k in range(left.shape[-1]):
        total += np.multiply(left[..., :, k, None], right[..., None, k, :], out=product)
    return TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)


def _cast_by_value(self: Any, source: Any, kind: Any) -> Any:
    """The interpreter would take the bits of a whole number for those of bfloat16."""
    if kind.scalar == tl.bfloat16:
        source = self.cast_impl(
            source, source.dtype.with_element_ty(tl.float32) if source.dtype.is_block() else tl.float32
        )
    return self.cast_impl(source, kind)


def _to_float64(operand: Any) -> Any:
    """float64; the interpreter keeps types that numpy lacks as unsigned integers."""
    stored = AS_TORCH.get(operand.dtype.scalar)
    if stored is None:
        return operand.data.astype(np.float64)
    integers = torch.uint16 if stored.itemsize == 2 else torch.uint8
    return torch.from_numpy(operand.data.copy()).view(integers).view(stored).double().numpy()
