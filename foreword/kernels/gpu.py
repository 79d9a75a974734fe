"""The GPU in use, and whether the Triton kernels run on it with exact results."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from subprocess import CalledProcessError

import torch

logger = logging.getLogger(__name__)

# Compute capabilities: the oldest that Triton supports, and the oldest with bfloat16.
MIN_CAPABILITY, BFLOAT16_CAPABILITY = (7, 5), (8, 0)
INSTALL_TRITON = "pip install 'triton>=3.6,<3.10'"
INSTALL_COMPILER = "apt install gcc libc6-dev python3-dev"
DEVICE_LOST_ERRORS = (
    "illegal",
    "unspecified launch failure",
    "misaligned",
    "device-side assert",
    "uncorrectable",
    "hardware stack",
)
PASSING_ERRORS = ("out of memory", "captur")  # torch's; the second is in all errors of a graph's capture


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


def is_device_lost(error: BaseException) -> bool:
    """Whether every later CUDA call would fail too. Triton raises driver errors as RuntimeError."""
    message = str(error)
    if message.startswith("Triton Error"):
        return any(name in message for name in DEVICE_LOST_ERRORS)
    return isinstance(error, torch.AcceleratorError) and not any(name in message for name in PASSING_ERRORS)


@dataclass(frozen=True, slots=True)
class ComputeTypes:
    """Types that an engine computes with; formats as in Ops.pack_linear."""

    dtype: str = "bfloat16"  # activations
    linear_format: str = "bfloat16"
    head_format: str = "bfloat16"


HALF_TYPES = ComputeTypes("float16", "float16", "float16")
_reasons: dict[ComputeTypes, str | None] = {}  # results of the trial in this process
_skips_trial = False


def triton_unavailable_reason(
    types: ComputeTypes | None = None, on_progress: Callable[[int, int], None] | None = None
) -> str | None:
    """Why Triton kernels cannot be used on this machine, or None; checked once per process and types.

    types        default: bfloat16 where the GPU has it, else float16
    on_progress  of the compilation: (compiled, requested)
    """
    gpu = current_gpu()
    if types is None:
        types = HALF_TYPES if gpu is not None and gpu.capability < BFLOAT16_CAPABILITY else ComputeTypes()
    if types not in _reasons:
        run_trial = (lambda: None) if _skips_trial else partial(_run_trial, types, on_progress)
        _reasons[types] = check_triton(gpu, find_spec("triton") is not None, run_trial)
    return _reasons[types]


def skip_trial() -> None:
    """Use Triton in this process without a trial: `foreword bench gpu` lists mismatches and goes on."""
    global _skips_trial
    _skips_trial = True


def check_triton(gpu: GPUInfo | None, is_installed: bool, run_checks: Callable[[], str | None]) -> str | None:
    """Why Triton kernels cannot be used on this GPU, or None.

    run_checks  compiles and runs kernels on the GPU; returns the first wrong result as text, or None
    """
    if gpu is None:
        return "no CUDA device was found"
    if not is_installed:
        return f"Triton is not installed: {INSTALL_TRITON}"
    if gpu.capability < MIN_CAPABILITY:
        return f"Triton's kernels need compute capability {'.'.join(map(str, MIN_CAPABILITY))}, not {gpu}"
    try:
        failure = run_checks()
    except Exception as error:  # errors of Triton, its compiler or the driver
        cause = (str(error).strip().splitlines() or [""])[0]
        if "C compiler" in cause or isinstance(error, CalledProcessError):
            cause = f"{cause.rstrip('.')}. Triton needs a C compiler and Python's headers: {INSTALL_COMPILER}"
        return f"Triton's kernels do not run on {gpu}: {type(error).__name__}: {cause}"
    if failure is None:
        return None
    return f"Triton's kernels are not exact on {gpu}: {failure}. `foreword bench gpu --only checks` lists all"


def trial_mismatches(types: ComputeTypes) -> Iterator[str]:
    """Kernels whose rows have other bits in a batch than alone; only the GPU itself can show it."""
    backend = importlib.import_module("foreword.kernels.triton.backend")
    checks = importlib.import_module("foreword.kernels.triton.checks")
    ops, dtype = backend.TritonOps(eager=True), getattr(torch, types.dtype)
    yield from checks.row_mismatches(ops, "cuda", dtype, types.linear_format, types.head_format)
    yield from checks.attention_mismatches(ops, "cuda", dtype)


def _run_trial(types: ComputeTypes, on_progress: Callable[[int, int], None] | None) -> str | None:
    """The first mismatch. Kernels are compiled first."""
    precompile = importlib.import_module("foreword.kernels.triton.precompile").precompile
    logger.info("trial: %s", precompile(lambda: list(trial_mismatches(types)), on_progress))
    return next(trial_mismatches(types), None)
