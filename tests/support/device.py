"""Where tests compute, and what may be missing there.

On a machine with an NVIDIA GPU engines go to it by themselves, and what builds its tensors by hand takes DEVICE.
FOREWORD_TEST_PARTIAL=1 lets modules be skipped whose packages are not installed; without it they fail, as they must where
everything is installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch

__all__ = ["DEVICE", "OPTIONAL_PACKAGES", "PARTIAL", "limit_memory_info", "missing_package", "num_workers"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PARTIAL = os.environ.get("FOREWORD_TEST_PARTIAL") == "1"
OPTIONAL_PACKAGES = frozenset(
    {
        "gguf",
        "jsonschema",
        "langchain_openai",
        "litellm",
        "llguidance",
        "matplotlib",
        "openai",
        "schemathesis",
        "sentencepiece",
        "transformers",
        "triton",
    }
)
MEMORY_SHARE = 0.9  # of a GPU's memory, by all workers together

MemoryInfo = tuple[int, int]  # bytes that are free, and in all


def num_workers(environment: Mapping[str, str] = os.environ) -> int:
    """Processes that share the machine: those of pytest-xdist."""
    return int(environment.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def limit_memory_info(
    mem_get_info: Callable[..., MemoryInfo], reserved: Callable[[], int], count: int
) -> Callable[..., MemoryInfo]:
    """What one of `count` workers is told of a GPU's memory: its share is all there is.

    told, reserved  as torch.cuda.mem_get_info and torch.cuda.memory_reserved
    """

    def of_share(*device: object) -> MemoryInfo:
        free, total = mem_get_info(*device)
        share = int(total * MEMORY_SHARE) // count
        return min(free, max(share - reserved(), 0)), share

    return of_share


def missing_package(error: BaseException | None) -> str | None:
    """The package of OPTIONAL whose absence is behind an error, if one is."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            name = error.name.split(".")[0]
            return name if name in OPTIONAL_PACKAGES else None
        error = error.__cause__ or error.__context__
    return None
