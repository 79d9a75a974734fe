"""What is left for the KV cache of a GPU, measured on the loaded models before the cache is made.

The largest steps are run for real: as many rows as a step may have, a picture as large as it can be, every row sampled with
all filters and scored. What the allocator holds then is what it will hold while it serves, whether it is in use or lies between
what is. What neither it nor anybody else holds is left, and of that the cache takes --gpu-memory-utilization's share.

Graphs are captured when the cache stands, because they know its addresses. So their memory is set aside before: what a pass of
as many rows as the largest of them needs, since they share one pool, and an allowance for what CUDA itself keeps of each.
`told()` says it when that was too little: then part of what --gpu-memory-utilization leaves free has been used.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import replace
from typing import Protocol

import torch

from foreword.estimate import GIB, DeviceMemory
from foreword.resolve import ResolvedConfig

__all__ = ["CudaMemoryMeter", "MemoryMeter", "ProfileSteps", "profile_memory", "oom_message", "log_memory"]

logger = logging.getLogger(__name__)


class MemoryMeter(Protocol):
    """What a device says of its memory, in bytes."""

    def total(self) -> int:
        """Of the device."""

    def free(self) -> int:
        """Held by nobody."""

    def reserved(self) -> int:
        """Held by this process's allocator, in use or not."""

    def peak(self) -> int:
        """The most that it has held since reset()."""

    def reset(self) -> None:
        """Give back what is not in use, and measure the peak from now on."""


class CudaMemoryMeter:
    """The GPU in use."""

    def total(self) -> int:
        return torch.cuda.mem_get_info()[1]

    def free(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def reserved(self) -> int:
        return torch.cuda.memory_reserved()

    def peak(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.max_memory_reserved()

    def reset(self) -> None:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


class ProfileSteps(Protocol):
    """What is run to be measured."""

    def run_max(self) -> None:
        """Every kind of step, each as large as it can be."""

    def run_graphs(self) -> None:
        """A pass of each model of as many rows as its largest graph."""


def profile_memory(meter: MemoryMeter, estimate: DeviceMemory, steps: ProfileSteps) -> DeviceMemory:
    """The estimate with the figures of this machine; models are loaded, and no KV cache is there but for a block or two."""
    meter.reset()
    weights = meter.reserved()
    steps.run_max()
    activations = meter.peak() - weights
    others = meter.total() - meter.free() - meter.reserved()
    graphs = 0
    if estimate.cuda_graphs:
        meter.reset()
        steps.run_graphs()
        graphs = estimate.cuda_graphs + meter.peak() - weights
    meter.reset()
    return replace(
        estimate,
        other_processes=max(others, 0),
        weights=weights,
        activations=max(activations, 0),
        cuda_graphs=max(graphs, 0),
        is_measured=True,
    )


def log_memory(memory: DeviceMemory, graph_bytes: int) -> None:
    """Log how the memory is divided, and whether graphs have taken more than was set aside."""
    logger.info("memory of the GPU: %s; %.2f GiB are left for the KV cache", memory, memory.kv_cache / GIB)
    if graph_bytes > memory.cuda_graphs:
        logger.warning(
            "CUDA graphs took %.2f GiB, %.2f were set aside: a lower --gpu-memory-utilization leaves room for them",
            graph_bytes / GIB,
            memory.cuda_graphs / GIB,
        )


def oom_message(resolved: ResolvedConfig, error: BaseException) -> str:
    """What an operator is told when memory ran out while loading."""
    needs = f"weights need about {resolved.weight_bytes / GIB:.2f} GiB and the KV cache {resolved.kv_bytes / GIB:.2f} GiB"
    helps = "a smaller model, --quantization or --kv-cache-memory would need less"
    if resolved.device == "cuda":
        if resolved.memory is not None:
            needs = f"{resolved.memory}, the KV cache {resolved.kv_bytes / GIB:.2f}"
        fewer = f"fewer --max-num-batched-tokens than {resolved.max_num_batched_tokens}"
        helps = f"{fewer}, a lower --gpu-memory-utilization, --quantization or a smaller model would need less"
    said = f" ({' '.join(str(error).split())})" if str(error) else ""
    return f"out of memory while loading: {needs}; {helps}{said}"
