"""The GPU in use, and whether the Triton kernels run on it with exact results."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch

__all__ = ["GPUInfo", "check_triton", "current_gpu", "triton_unavailable_reason"]

MIN_CAPABILITY = (7, 5)  # compute capability: the oldest that Triton supports


@dataclass(frozen=True, slots=True)
class GPUInfo:
    """Name and compute capability, such as (9, 0)."""

    name: str
    capability: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.capability[0]}.{self.capability[1]})"


def current_gpu() -> GPUInfo | None:
    """The GPU that torch uses, if any."""
    if not torch.cuda.is_available():
        return None
    return GPUInfo(torch.cuda.get_device_name(), torch.cuda.get_device_capability())


@cache
def triton_unavailable_reason() -> str | None:
    """Why Triton kernels cannot be used on this machine, or None; checked once per process."""
    return check_triton(current_gpu(), find_spec("triton") is not None, _check_exactness)


def check_triton(gpu: GPUInfo | None, is_installed: bool, run_checks: Callable[[], str | None]) -> str | None:
    """Why Triton kernels cannot be used on this GPU, or None.

    run_checks  compiles and runs kernels on the GPU; returns the first wrong result as text, or None
    """
    if gpu is None:
        return "no CUDA device was found"
    if not is_installed:
        return "Triton is not installed"
    if gpu.capability < MIN_CAPABILITY:
        return f"Triton's kernels need compute capability {'.'.join(map(str, MIN_CAPABILITY))}, not {gpu}"
    try:
        failure = run_checks()
    except Exception as error:  # of Triton, its compiler or the driver: serving goes on with the reference
        lines = str(error).strip().splitlines() or [""]
        return f"Triton's kernels do not run on {gpu}: {type(error).__name__}: {lines[0]}"
    return None if failure is None else f"Triton's kernels are not exact on {gpu}: {failure}"


def _check_exactness() -> str | None:
    """The first kernel whose row has other bits in a batch than alone; only the GPU itself can show it."""
    backend = importlib.import_module("foreword.kernels.triton.backend")
    checks = importlib.import_module("foreword.kernels.triton.checks")
    ops = backend.TritonOps(eager=True)
    failure: str | None = checks.check_row_invariance(ops, "cuda")
    return failure or checks.check_attention_invariance(ops, "cuda")
