"""Triton's interpreter with exact products, to test bits without a GPU.

`exact_dot()` gives `tl.dot` one order of summation for every tile shape, as tensor cores have, and correct
bfloat16 products. `program_order()` runs the programs of a launch in another order.
`fast_interpreter()` saves time. They do not affect compiled kernels.
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
def fast_interpreter() -> Iterator[None]:
    """Patch Triton's language once, not in each launch and call, and derive each type's properties once."""
    once = _PatchOnce(interpreter._patch_lang)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", once)
        patch.setattr(interpreter, "_get_np_dtype", _call_once(interpreter._get_np_dtype))
        patch.setattr(tl.core.dtype, "__eq__", _identical_or(tl.core.dtype.__eq__))
        patch.setattr(tl.core.block_type, "__init__", _init_type_once(tl.core.block_type.__init__))
        patch.setattr(tl.core.tensor, "__init__", _init_tensor_once(tl.core.tensor.__init__))
        try:
            yield
        finally:
            once.restore_all()


class _PatchOnce:
    """Replaces the interpreter's `_patch_lang`: patches stay until restore_all()."""

    def __init__(self, prepare: Callable[[Any], Any]) -> None:
        self._prepare = prepare
        self._prepared: set[str] = set()
        self._functions: set[Any] = set()
        self._scopes: list[Any] = []

    def __call__(self, function: Any) -> Any:
        if function not in self._functions:
            self._functions.add(function)
            wanted = {name for name, value in _modules_of(function) if value in (tl, tl.core)}
            if not wanted <= self._prepared:
                self._prepared |= wanted
                self._scopes.append(self._prepare(function))
        return self

    def restore(self) -> None:
        """Nothing at the end of a launch."""

    def restore_all(self) -> None:
        for scope in reversed(self._scopes):
            scope.restore()


def _call_once(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of a type, by the type's name."""
    known: dict[str, Any] = {}

    def call_once(type: Any) -> Any:
        if type.name not in known:
            known[type.name] = function(type)
        return known[type.name]

    return call_once


def _identical_or(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda self, other: self is other or equal(self, other)


def _init_type_once(init: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """block_type.__init__(): the fields of a type by its element and shape."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(size if isinstance(size, int) else size.value for size in shape))
        if key not in known:
            init(self, element_ty, shape)
            known[key] = dict(self.__dict__)
        self.__dict__.update(known[key])

    return init_once


def _init_tensor_once(init: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """tensor.__init__(): the fields of tensors by the name of their type."""
    known: dict[str, dict[str, Any]] = {}

    def init_once(self: Any, handle: Any, type: Any) -> None:
        if type.name not in known:
            init(self, handle, type)
            known[type.name] = {**self.__dict__, "handle": None, "type": None}
        self.__dict__.update(known[type.name], handle=handle, type=type)

    return init_once


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
