"""The device of the tests, and optional packages.

Engines use an NVIDIA GPU if there is one; tests that create tensors use DEVICE. FOREWORD_TEST_PARTIAL=1 skips
modules whose packages are not installed; otherwise they fail.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch

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
MEMORY_SHARE = 0.9  # of a GPU's memory for all workers

MemoryInfo = tuple[int, int]  # free and total bytes


def num_workers(environment: Mapping[str, str] = os.environ) -> int:
    """Processes of pytest-xdist that share the machine."""
    return int(environment.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def limit_memory_info(
    mem_get_info: Callable[..., MemoryInfo], reserved: Callable[[], int], count: int
) -> Callable[..., MemoryInfo]:
    """mem_get_info for one of `count` workers, which sees only its share of the GPU's memory.

    mem_get_info, reserved: torch.cuda.mem_get_info and torch.cuda.memory_reserved
    """

    def share_info(*device: object) -> MemoryInfo:
        free, total = mem_get_info(*device)
        share = int(total * MEMORY_SHARE) // count
        return min(free, max(share - reserved(), 0)), share

    return share_info


def missing_package(error: BaseException | None) -> str | None:
    """The package of OPTIONAL_PACKAGES whose absence caused the error, if any."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            name = error.name.split(".")[0]
            return name if name in OPTIONAL_PACKAGES else None
        error = error.__cause__ or error.__context__
    return None
