"""Compilation of Triton kernels in threads, before their first launch.

Triton compiles a kernel when it is first launched, one after another: minutes for all of a start. Its
asynchronous compile mode moves this to threads; compiled kernels are kept on disk and in this process.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import KernelInterface

try:  # a private module: another version of Triton may not have it
    from triton.runtime._async_compile import AsyncCompileMode
except ImportError:
    AsyncCompileMode = None

logger = logging.getLogger(__name__)

ALLOCATORS = ("empty", "empty_like", "new_empty")  # allocate kernel outputs


@dataclass(frozen=True, slots=True)
class CompileSummary:
    """Kernels of a precompile()."""

    num_kernels: int = 0  # different ones
    num_compiled: int = 0  # not found in the cache on disk
    num_failed: int = 0  # their errors are raised when they are launched
    seconds: float = 0.0

    def __str__(self) -> str:
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        compiled = f"{self.num_compiled} compiled in {self.seconds:.1f} s{failed}"
        return f"{self.num_kernels} Triton kernels, {compiled}"


def precompile(
    run: Callable[[], object], on_progress: Callable[[int, int], None] | None = None
) -> CompileSummary:
    """Compile the kernels that run() launches, in as many threads as this process has cores.

    run          launches nothing while it is called here: outputs of kernels are zeros, so no result may be
                 kept, and no CUDA graph captured. No other thread may launch kernels meanwhile
    on_progress  (compiled, requested), in the calling thread

    Where this fails, a warning is logged, and kernels are compiled one by one at their first launch.
    """
    started = time.perf_counter()
    if AsyncCompileMode is None:
        logger.warning("this version of Triton compiles no kernels in threads: the start takes longer")
        return CompileSummary()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "compile") as threads, _count_compiled() as counts:
        compiler = _Compiler(threads)
        try:
            with AsyncCompileMode(compiler, ignore_errors=True):
                with _request_only(), ZeroOutputs(), torch.inference_mode():
                    run()
                for done, _ in enumerate(as_completed(compiler.futures), start=1):
                    if on_progress is not None:
                        on_progress(done, len(compiler.futures))
        except Exception as error:
            logger.warning("kernels are compiled at their first launch: %s: %s", type(error).__name__, error)
        num_failed = sum(future.exception() is not None for future in compiler.futures)
    seconds = time.perf_counter() - started
    return CompileSummary(len(compiler.futures), counts.count(False), num_failed, seconds)


class _Compiler(Executor):
    """Compiles in threads."""

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self.futures: list[Future[Any]] = []

    def submit(self, compile_kernel: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        future = self._threads.submit(self._compile, compile_kernel)
        self.futures.append(future)
        return future

    def _compile(self, compile_kernel: Callable[[], Any]) -> Any:
        """The kernel; its launcher as well, for which Triton 3.6 runs a C compiler, is in the cache then."""
        kernel = compile_kernel()
        driver.active.launcher_cls(kernel.src, kernel.metadata)
        return kernel


class ZeroOutputs(TorchFunctionMode):
    """Allocates zeros: kernels write nothing, and memory as it was may be no valid token id or index."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if getattr(func, "__name__", "") in ALLOCATORS else result


@contextmanager
def _request_only() -> Iterator[None]:
    """A launch compiles its kernel and does nothing else."""
    launch = KernelInterface.__getitem__

    def request(kernel: Any, grid: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: kernel.run(*args, grid=grid, warmup=True, **kwargs)

    KernelInterface.__getitem__ = request
    try:
        yield
    finally:
        KernelInterface.__getitem__ = launch


@contextmanager
def _count_compiled() -> Iterator[list[bool]]:
    """For each compilation within the block: whether the cache had the kernel."""
    counts: list[bool] = []
    listener = knobs.compilation.listener

    def listen(*, cache_hit: bool, **rest: Any) -> None:
        counts.append(cache_hit)
        if listener is not None:
            listener(cache_hit=cache_hit, **rest)

    knobs.compilation.listener = listen
    try:
        yield counts
    finally:
        knobs.compilation.listener = listener
