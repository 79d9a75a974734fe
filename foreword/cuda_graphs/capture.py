"""Capture of CUDA graphs, and the batch sizes to capture."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from foreword.kernels.gpu import is_device_lost

log = logging.getLogger(__name__)
NUM_WARM_UPS = 2  # Triton compiles in the first, allocators settle in the second
SIZE_STEPS = ((256, 64), (128, 32), (64, 16), (8, 8))  # (from this size on, distance of sizes)


class CudaGraphPool:
    """The graphs of one device in one memory pool: they run one after another, never two at once."""

    def __init__(self, device: torch.device, eager: bool = False, dry_run: bool = False) -> None:
        """dry_run: run what is to be captured once instead, to compile its kernels."""
        self._device = device
        self._eager = eager or device.type != "cuda"  # capture nothing
        self._dry_run = dry_run
        self._pool: Any = None
        self.num_graphs = 0
        self.num_bytes = 0  # device memory of the graphs

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """The graph of `run`, or `run` itself in eager mode: its inputs and outputs must stay where they are.

        `run` is called before the capture, so its inputs must be harmless by then. If a capture fails, the
        reason is logged once and all later calls return `run`. A lost device and too little memory raise:
        without graphs, the next pass would fail as well.
        """
        if self._dry_run:
            run()
        if self._eager or self._dry_run:
            return run
        try:
            return self._capture_graph(run)
        except RuntimeError as error:
            # Torch's error at the end of a failed capture hides the cause.
            for cause in _causes(error):
                if is_device_lost(cause) or "out of memory" in str(cause):
                    raise cause from None
            self._eager = True
            log.warning("CUDA graphs are disabled: a forward pass could not be captured: %s", error)
            return run

    def _capture_graph(self, run: Callable[[], None]) -> Callable[[], None]:
        self._warm_up(run)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # as a capture does: makes free memory before and after it comparable
        before, _ = torch.cuda.mem_get_info(self._device)
        graph = torch.cuda.CUDAGraph()
        # thread_local: unrelated threads may call CUDA during the capture.
        with (
            self._leave_failed_capture(),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            run()
        after, _ = torch.cuda.mem_get_info(self._device)
        self.num_graphs += 1
        self.num_bytes += max(before - after, 0)
        return graph.replay

    @contextmanager
    def _leave_failed_capture(self) -> Iterator[None]:
        """After an error: torch stays on the stream and allocates in the pool of a capture it cannot end."""
        stream = torch.cuda.current_stream(self._device)
        try:
            yield
        except BaseException:
            torch.cuda.set_stream(stream)
            with suppress(RuntimeError):  # the pool has been left
                torch._C._cuda_endAllocateToPool(stream.device.index, self._pool)
            raise

    def _warm_up(self, run: Callable[[], None]) -> None:
        """Run on a side stream, as capture requires."""
        current = torch.cuda.current_stream(self._device)
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(NUM_WARM_UPS):
                run()
        current.wait_stream(side)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that it was raised from or during."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def capture_sizes(max_size: int) -> tuple[int, ...]:
    """Sizes to capture, ascending to `max_size`: each at most 2 times the one before, 1.25 from 32 on."""
    sizes, size = [], 1
    while size < max_size:
        sizes.append(size)
        size += next((step for start, step in SIZE_STEPS if size >= start), size)
    return (*sizes, max_size)


def pick_size(count: int, sizes: tuple[int, ...]) -> int:
    """The smallest size with room for `count`."""
    return next(size for size in sizes if size >= count)
