"""Which backend computes, and why not another one."""

from __future__ import annotations

import hashlib
import importlib
from dataclasses import dataclass
from pathlib import Path

from foreword.errors import ConfigError
from foreword.kernels.cpu.backend import CpuOps
from foreword.kernels.cpu.library import ISAS, load_library, supported_isas
from foreword.kernels.cpu.sampling import NativeSampling
from foreword.kernels.gpu import current_gpu, triton_unavailable_reason
from foreword.kernels.ops import Ops
from foreword.kernels.reference.backend import FastMathOps, ReferenceOps

__all__ = ["BackendStatus", "list_backends", "native_unavailable_reason", "select_backend", "source_digest"]

TRITON_OPS = (
    "foreword.kernels.triton.backend",
    "TritonOps",
)  # imported where they are to be used: nothing else needs Triton
TRITON_FAST_MATH_OPS = ("foreword.kernels.triton.fast_math", "TritonFastMath")

ISA_REQUIREMENTS = {
    "portable": "any processor",
    "avx2": "AVX2, FMA and F16C",
    "avx512": "AVX-512 with BW, DQ, VL, VNNI and BF16",
    "amx": "what avx512 needs, AMX-BF16 and AMX-INT8",
}


class NativeReference(NativeSampling, ReferenceOps):
    """The reference with native sampling: the same bits."""

    name = "reference+native"


class NativeFastMath(NativeSampling, FastMathOps):
    """Fast math with native sampling."""

    name = "fast-math+native"


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """One line of `foreword env`; `reason` says why it is not available, or what it is for."""

    name: str
    available: bool
    reason: str


def select_backend(
    device: str, fast_math: bool = False, threads: int = 1, isa: str = "auto", eager: bool = False
) -> Ops:
    """The best backend for a torch device ("cpu", "cuda").

    threads  of the native kernels
    isa      "auto", an instruction set of the native kernels, or "reference" for torch
    eager    on GPUs, launch kernels one by one instead of as graphs
    Raises ConfigError for an instruction set that this processor lacks.
    """
    library, missing = load_library() if device == "cpu" else (None, "the native kernels are for the CPU")
    if isa in ISAS and isa not in supported_isas():
        raise ConfigError(
            f"cpu_isa {isa} cannot be used here: {missing or 'it needs ' + ISA_REQUIREMENTS[isa]}", "cpu_isa"
        )
    if isa in ISAS and (fast_math or device != "cpu"):
        raise ConfigError(
            f"cpu_isa {isa} has no effect {'with --fast-math' if fast_math else 'on ' + device}", "cpu_isa"
        )
    if device == "cuda" and triton_unavailable_reason() is None:
        return _make_triton_ops(fast_math, eager)
    if library is None:
        return FastMathOps() if fast_math else ReferenceOps()
    if fast_math:
        return NativeFastMath(library, threads=threads)
    return NativeReference(library, threads=threads) if isa == "reference" else CpuOps(isa, threads)


def _make_triton_ops(fast_math: bool, eager: bool) -> Ops:
    module, name = TRITON_FAST_MATH_OPS if fast_math else TRITON_OPS
    ops: Ops = getattr(importlib.import_module(module), name)(eager)
    return ops


def native_unavailable_reason(device: str) -> str | None:
    """Why torch computes, instead of kernels made for the device, although nobody asked for that; None if it does not."""
    if device == "cpu":
        return load_library()[1] or None
    reason = triton_unavailable_reason()
    return reason and f"the reference computes, in torch, which is slower: {reason}"


def source_digest() -> str:
    """Tells kernels apart that are compiled where they run, as `library_digest()` tells builds: another source may round
    differently."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.glob("**/*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def list_backends() -> list[BackendStatus]:
    """Every backend, the preferred ones first."""
    library, missing = load_library()
    found, refused = current_gpu(), triton_unavailable_reason()
    return [
        BackendStatus("triton", refused is None, refused or f"kernels for {found}"),
        *(
            BackendStatus(
                f"cpu-{isa}",
                isa in supported_isas(),
                missing or f"native kernels for {ISA_REQUIREMENTS[isa]}",
            )
            for isa in reversed(ISAS)
        ),
        BackendStatus(
            NativeReference.name, library is not None, missing or "torch on the CPU, sampling in C++"
        ),
        BackendStatus(
            ReferenceOps.name,
            True,
            "torch on any device" if found else "torch on the CPU (no CUDA device was found)",
        ),
        BackendStatus(
            NativeFastMath.name,
            library is not None,
            missing or "only with --fast-math: bits depend on the batch",
        ),
        BackendStatus(
            "triton-fast-math", refused is None, refused or "only with --fast-math: bits depend on the batch"
        ),
        BackendStatus(FastMathOps.name, True, "only with --fast-math: bits depend on the batch"),
    ]
