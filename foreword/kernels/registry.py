"""Choice of the backend, and the reason where a faster one is unavailable."""

from __future__ import annotations

import hashlib
import importlib
from dataclasses import dataclass
from pathlib import Path

from foreword.errors import ConfigError
from foreword.kernels.cpu.backend import CpuOps
from foreword.kernels.cpu.library import ISAS, load_library, supported_isas
from foreword.kernels.cpu.sampling import NativeSampling
from foreword.kernels.gpu import ComputeTypes, current_gpu, triton_unavailable_reason
from foreword.kernels.ops import Ops
from foreword.kernels.reference.backend import FastMathOps, ReferenceOps

ISA_REQUIREMENTS = {
    "portable": "any processor",
    "neon": "64-bit ARM with dot products (ARMv8.2)",
    "avx2": "AVX2, FMA and F16C",
    "avx2-vnni": "AVX2 as above, and AVX-VNNI or AVX-512 as below",
    "avx512": "AVX-512 with BW, DQ, VL, VNNI and BF16",
    "amx": "AVX-512 as above, AMX-BF16 and AMX-INT8",
}


class NativeReference(NativeSampling, ReferenceOps):
    """The reference with native sampling: the same bits."""

    name = "reference+native"


class NativeFastMath(NativeSampling, FastMathOps):
    """Fast math with native sampling."""

    name = "fast-math+native"


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """One line of `foreword env`; `reason` says why it is unavailable, or its purpose."""

    name: str
    available: bool
    reason: str


def select_backend(
    device: str,
    fast_math: bool = False,
    threads: int = 1,
    isa: str = "auto",
    eager: bool = False,
    types: ComputeTypes | None = None,
) -> Ops:
    """The best backend for a torch device ("cpu", "cuda").

    threads  of the native kernels
    isa      "auto", an instruction set of the native kernels, or "reference" for torch
    eager    on GPUs, launch kernels one by one instead of in CUDA graphs
    types    on GPUs, what the kernels are tried with
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
    if device == "cuda" and triton_unavailable_reason(types) is None:
        backend = importlib.import_module("foreword.kernels.triton.backend")  # only GPUs need Triton
        ops: Ops = (backend.TritonFastMath if fast_math else backend.TritonOps)(eager)
        return ops
    if library is None:
        return FastMathOps() if fast_math else ReferenceOps()
    if fast_math:
        return NativeFastMath(library, threads=threads)
    return NativeReference(library, threads=threads) if isa == "reference" else CpuOps(isa, threads)


def native_unavailable_reason(device: str, types: ComputeTypes | None = None) -> str | None:
    """Why torch computes instead of kernels for the device; None if the kernels are available."""
    if device == "cpu":
        return load_library()[1] or None
    reason = triton_unavailable_reason(types)
    return reason and f"the reference backend (torch) is used, which is slower: {reason}"


def source_digest() -> str:
    """Digest of kernels compiled at run time: another source or enabled variant may round differently."""
    variants = importlib.import_module("foreword.kernels.triton.variants").enabled_variants()
    digest = hashlib.blake2b(" ".join(sorted(variants)).encode(), digest_size=8)
    for path in sorted(Path(__file__).parent.glob("**/*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def list_backends() -> list[BackendStatus]:
    """Every backend, the preferred ones first."""
    library, missing = load_library()
    gpu, refused = current_gpu(), triton_unavailable_reason()
    fast_math = "only with --fast-math: bits depend on the batch"
    return [
        BackendStatus("triton", refused is None, refused or f"kernels for {gpu}"),
        *(
            BackendStatus(f"cpu-{isa}", isa in supported_isas(), missing or f"native kernels for {needs}")
            for isa, needs in reversed(ISA_REQUIREMENTS.items())
        ),
        BackendStatus(NativeReference.name, library is not None, missing or "torch, sampling in C++"),
        BackendStatus(
            ReferenceOps.name,
            True,
            "torch on any device" if gpu else "torch on the CPU (no CUDA device found)",
        ),
        BackendStatus(NativeFastMath.name, library is not None, missing or fast_math),
        BackendStatus("triton-fast-math", refused is None, refused or fast_math),
        BackendStatus(FastMathOps.name, True, fast_math),
    ]
