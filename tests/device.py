"""Where tests compute, and what may be missing there.

On a machine with an NVIDIA GPU engines go to it by themselves, and what builds its tensors by hand takes DEVICE.
FOREWORD_TEST_PARTIAL=1 lets modules be skipped whose packages are not installed; without it they fail, as they must where
everything is installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch

__all__ = ["DEVICE", "OPTIONAL", "PARTIAL", "missing_package", "shared", "workers"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PARTIAL = os.environ.get("FOREWORD_TEST_PARTIAL") == "1"
OPTIONAL = frozenset(
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
USED = 0.9  # of a GPU's memory, by all workers together

Told = tuple[int, int]  # bytes that are free, and in all


def workers(environment: Mapping[str, str] = os.environ) -> int:
    """Processes that share the machine: those of pytest-xdist."""
    return int(environment.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def shared(told: Callable[..., Told], reserved: Callable[[], int], count: int) -> Callable[..., Told]:
    """What one of `count` workers is told of a GPU's memory: its share is all there is.

    told, reserved  as torch.cuda.mem_get_info and torch.cuda.memory_reserved
    """

    def of_share(*device: object) -> Told:
        free, total = told(*device)
        share = int(total * USED) // count
        return min(free, max(share - reserved(), 0)), share

    return of_share


def missing_package(error: BaseException | None) -> str | None:
    """The package of OPTIONAL whose absence is behind an error, if one is."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            name = error.name.split(".")[0]
            return name if name in OPTIONAL else None
        error = error.__cause__ or error.__context__
    return None
