"""Which backend computes, and why not another one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foreword.kernels.fast_math import FastMath
from foreword.kernels.native import NativeSampling, load_library
from foreword.kernels.ops import Ops
from foreword.kernels.reference import Reference

__all__ = ["Backend", "describe", "select"]


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


def select(device: str, fast_math: bool = False) -> Ops:
    """The best backend for a torch device ("cpu", "cuda")."""
    library, _ = load_library() if device == "cpu" else (None, "")
    if library is not None:
        return NativeFastMath(library) if fast_math else NativeReference(library)
    return FastMath() if fast_math else Reference()


def describe() -> list[Backend]:
    """Every backend, the preferred ones first."""
    library, missing = load_library()
    cuda = torch.cuda.is_available()
    return [
        Backend(NativeReference.name, library is not None, missing or "torch on the CPU, sampling in C++"),
        Backend(Reference.name, True, "torch on any device" if cuda else "torch on the CPU (no CUDA device was found)"),
        Backend(NativeFastMath.name, library is not None, missing or "only with --fast-math: bits depend on the batch"),
        Backend(FastMath.name, True, "only with --fast-math: bits depend on the batch"),
    ]
