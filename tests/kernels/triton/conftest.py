"""The interpreter prepares Triton's language for each call between kernels' functions; here it does so once for a launch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import triton.language as tl
from triton.runtime import interpreter


class _Once:
    """Replaces the interpreter's `_patch_lang`: within a launch, what is prepared stays so until its end."""

    def __init__(self, prepare: Callable[[Any], Any]) -> None:
        self._prepare = prepare
        self._prepared: set[str] | None = None  # None outside of a launch

    def __call__(self, function: Any) -> Any:
        wanted = {name for name, value in vars_of(function) if value in (tl, tl.core)}
        if self._prepared is None:
            return self._prepare(function)
        if not wanted <= self._prepared:
            self._prepared |= wanted
            self._prepare(function)
        return self

    def restore(self) -> None:
        """What a launch prepared itself is all that is put back, as without this."""

    def launching(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        def launched(executor: Any, *arguments: Any, **options: Any) -> Any:
            scope = self._prepare(executor.fn)
            self._prepared = {name for name, value in vars_of(executor.fn) if value in (tl, tl.core)}
            try:
                return launch(executor, *arguments, **options)
            finally:
                self._prepared = None
                scope.restore()

        return launched


def vars_of(function: Any) -> list[tuple[str, Any]]:
    """(name, module) of the modules that a function sees."""
    return [(value.__name__, value) for value in function.__globals__.values() if inspect.ismodule(value)]


@pytest.fixture(autouse=True, scope="session")
def prepared_once_for_a_launch() -> Iterator[None]:
    once = _Once(interpreter._patch_lang)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", once)
        patch.setattr(interpreter.GridExecutor, "__call__", once.launching(interpreter.GridExecutor.__call__))
        yield
