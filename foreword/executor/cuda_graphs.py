"""CUDA graphs: what was run once is launched again as a whole, without Python between its kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["CudaGraphPool", "capture_sizes", "pick_size"]

log = logging.getLogger(__name__)
NUM_WARM_UPS = 2  # Triton compiles in the first, allocators settle in the second
SIZE_STEPS = ((8, 8), (64, 16), (128, 32), (256, 64))  # (from this size on, buckets are so far apart)


class CudaGraphPool:
    """Graphs of one device, in one pool of memory: they must run one after another, and never two at once.

    eager  nothing is captured; nor is it on a CPU, where everything else is the same
    count  graphs captured
    bytes  of device memory that they took
    """

    def __init__(self, device: torch.device, eager: bool = False) -> None:
        self._device = device
        self._eager = eager or device.type != "cuda"
        self._pool: Any = None
        self.num_graphs = 0
        self.num_bytes = 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """`run`, or the graph of it: what it reads and writes must lie where it lies now.

        It is run before it is captured, so what it reads must be harmless then. Where it cannot be captured the reason is
        logged, once, and everything goes on without graphs.
        """
        if self._eager:
            return run
        try:
            return self._capture_graph(run)
        except RuntimeError as error:
            self._eager = True
            log.warning("CUDA graphs are not used: a pass could not be captured: %s", error)
            return run

    def _capture_graph(self, run: Callable[[], None]) -> Callable[[], None]:
        self._warm_up(run)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # as a capture does: what is free before and behind it can be compared
        before, _ = torch.cuda.mem_get_info(self._device)
        graph = torch.cuda.CUDAGraph()
        # Threads that have nothing to do with this may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        after, _ = torch.cuda.mem_get_info(self._device)
        self.num_graphs += 1
        self.num_bytes += max(before - after, 0)
        return graph.replay

    def _warm_up(self, run: Callable[[], None]) -> None:
        """On a stream of its own, as a capture needs it."""
        current = torch.cuda.current_stream(self._device)
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(NUM_WARM_UPS):
                run()
        current.wait_stream(side)


def capture_sizes(max_size: int) -> tuple[int, ...]:
    """Numbers of rows that are captured, ascending, the last one `most`: each at most twice the one before, and at most a
    quarter more from 32 on."""
    return tuple(_iter_sizes(max_size))


def pick_size(count: int, sizes: tuple[int, ...]) -> int:
    """The smallest size that has room for `count`."""
    return next(size for size in sizes if size >= count)


def _iter_sizes(max_size: int) -> Iterator[int]:
    size = 1
    while size < max_size:
        yield size
        size += next((step for start, step in reversed(SIZE_STEPS) if size >= start), size)
    yield max_size
