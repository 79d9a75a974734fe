"""Which backend computes, and why not another one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foreword.errors import ConfigError
from foreword.kernels.cpu.backend import CpuOps
from foreword.kernels.cpu.library import ISAS, isas, load_library
from foreword.kernels.cpu.sampling import NativeSampling
from foreword.kernels.fast_math import FastMath
from foreword.kernels.ops import Ops
from foreword.kernels.reference import Reference

__all__ = ["Backend", "describe", "select", "why_not_native"]

NEEDS = {
    "portable": "any processor",
    "avx2": "AVX2, FMA and F16C",
    "avx512": "AVX-512 with BW, DQ, VL, VNNI and BF16",
    "amx": "what avx512 needs, AMX-BF16 and AMX-INT8",
}


class NativeReference(NativeSampling, Reference):
    """The reference with native sampling: the same bits."""

    name = "reference+native"


class NativeFastMath(NativeSampling, FastMath):
    """Fast math with native sampling."""

    name = "fast-math+native"


@dataclass(frozen=True, slots=True)
class Backend:
    """One line of `foreword env`; `reason` says why it is not available, or what it is for."""

    name: str
    available: bool
    reason: str


def select(device: str, fast_math: bool = False, threads: int = 1, isa: str = "auto") -> Ops:
    """The best backend for a torch device ("cpu", "cuda").

    threads  of the native kernels
    isa      "auto", an instruction set of the native kernels, or "reference" for torch
    Raises ConfigError for an instruction set that this processor lacks.
    """
    library, missing = load_library() if device == "cpu" else (None, "the native kernels are for the CPU")
    if isa in ISAS and isa not in isas():
        raise ConfigError(f"cpu_isa {isa} cannot be used here: {missing or 'it needs ' + NEEDS[isa]}", "cpu_isa")
    if isa in ISAS and (fast_math or device != "cpu"):
        raise ConfigError(f"cpu_isa {isa} has no effect {'with --fast-math' if fast_math else 'on ' + device}", "cpu_isa")
    if library is None:
        return FastMath() if fast_math else Reference()
    if fast_math:
        return NativeFastMath(library, threads=threads)
    return NativeReference(library, threads=threads) if isa == "reference" else CpuOps(isa, threads)


def why_not_native(device: str) -> str | None:
    """Why the CPU computes in torch although nobody asked for that; None if it does not."""
    return load_library()[1] or None if device == "cpu" else None


def describe() -> list[Backend]:
    """Every backend, the preferred ones first."""
    library, missing = load_library()
    cuda = torch.cuda.is_available()
    return [
        *(Backend(f"cpu-{isa}", isa in isas(), missing or f"native kernels for {NEEDS[isa]}") for isa in reversed(ISAS)),
        Backend(NativeReference.name, library is not None, missing or "torch on the CPU, sampling in C++"),
        Backend(Reference.name, True, "torch on any device" if cuda else "torch on the CPU (no CUDA device was found)"),
        Backend(NativeFastMath.name, library is not None, missing or "only with --fast-math: bits depend on the batch"),
        Backend(FastMath.name, True, "only with --fast-math: bits depend on the batch"),
    ]
