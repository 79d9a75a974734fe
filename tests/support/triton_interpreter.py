"""Triton's interpreter with exact products, to test bits without a GPU.

`exact_dot()` gives `tl.dot` one order of summation for every tile shape, as tensor cores have, and correct
bfloat16 products. `program_order()` runs the programs of a launch in another order.
`patch_once_per_launch()` saves time. They do not affect compiled kernels.
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

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
AS_TORCH = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


@contextmanager
def exact_dot() -> Iterator[None]:
    """`tl.dot` in float64 in order of k, rounded once per block; integers become bfloat16 by value."""
    with _replace_method("create_dot", _dot), _replace_method("create_si_to_fp", _cast_by_value):
        yield


@contextmanager
def program_order(order: Callable[[list[int]], list[int]]) -> Iterator[None]:
    """Run programs in the order `order(numbers)`; x is slowest, as in the interpreter."""
    original = InterpreterBuilder.set_grid_idx

    def reordered(self: Any, x: int, y: int, z: int) -> None:
        _, height, depth = self.grid_dim
        number = order(list(range(int(np.prod(self.grid_dim)))))[(x * height + y) * depth + z]
        original(self, number // (height * depth), number // depth % height, number % depth)

    with _replace_method("set_grid_idx", reordered):
        yield


@contextmanager
def patch_once_per_launch() -> Iterator[None]:
    """Patch Triton's language once per launch, not for each device function call."""
    once = _PatchOnce(interpreter._patch_lang)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", once)
        patch.setattr(
            interpreter.GridExecutor, "__call__", once.run_launch(interpreter.GridExecutor.__call__)
        )
        yield


class _PatchOnce:
    """Replaces the interpreter's `_patch_lang`: patches stay until the end of a launch."""

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
        """Nothing: the launch restores its own patches."""

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
    """(name, module) of the modules in a function's globals."""
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
    """Convert integers to bfloat16 by value: the interpreter would reuse their bits."""
    if kind.scalar == tl.bfloat16:
        source = self.cast_impl(
            source, source.dtype.with_element_ty(tl.float32) if source.dtype.is_block() else tl.float32
        )
    return self.cast_impl(source, kind)


def _to_float64(operand: Any) -> Any:
    """The operand as float64; the interpreter stores types that numpy lacks as unsigned integers."""
    stored = AS_TORCH.get(operand.dtype.scalar)
    if stored is None:
        return operand.data.astype(np.float64)
    integers = torch.uint16 if stored.itemsize == 2 else torch.uint8
    return torch.from_numpy(operand.data.copy()).view(integers).view(stored).double().numpy()
