"""Which GPU there is, and whether the kernels of kernels/triton may compute on it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch

__all__ = ["GPUInfo", "check_triton", "current_gpu", "triton_unavailable_reason"]

MIN_CAPABILITY = (7, 5)  # compute capability; Triton knows no older ones


@dataclass(frozen=True, slots=True)
class GPUInfo:
    """The GPU in use, and its compute capability, such as (9, 0)."""

    name: str
    capability: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.capability[0]}.{self.capability[1]})"


def current_gpu() -> GPUInfo | None:
    """None where torch finds no GPU."""
    if not torch.cuda.is_available():
        return None
    return GPUInfo(torch.cuda.get_device_name(), torch.cuda.get_device_capability())


@cache
def triton_unavailable_reason() -> str | None:
    """Why the reference computes on this machine's GPU; None if it does not. Tried once in a process: that takes a moment."""
    return check_triton(current_gpu(), find_spec("triton") is not None, _check_exactness)


def check_triton(gpu: GPUInfo | None, is_installed: bool, run_checks: Callable[[], str | None]) -> str | None:
    """Why not this card; None if nothing is in the way.

    installed  Triton is there
    trial      compiles and runs kernels on the card; returns what is wrong with their results, or None
    """
    if gpu is None:
        return "no CUDA device was found"
    if not is_installed:
        return "Triton is not installed"
    if gpu.capability < MIN_CAPABILITY:
        return f"Triton's kernels need compute capability {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}, and this is {gpu}"
    try:
        wrong = run_checks()
    except (
        Exception
    ) as error:  # of Triton, of the compiler behind it, of the driver: none of them is a reason not to serve
        lines = str(error).strip().splitlines() or [""]
        return f"Triton's kernels do not run on {gpu}: {type(error).__name__}: {lines[0]}"
    return None if wrong is None else f"Triton's kernels are not exact on {gpu}: {wrong}"


def _check_exactness() -> str | None:
    """Whether a row has the same bits alone and among others: only the card itself can tell."""
    backend = importlib.import_module("foreword.kernels.triton.backend")
    checks = importlib.import_module("foreword.kernels.triton.checks")
    ops = backend.TritonOps(eager=True)
    wrong: str | None = checks.check_row_invariance(ops, "cuda") or checks.check_attention_invariance(
        ops, "cuda"
    )
    return wrong
