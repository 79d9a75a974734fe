"""Variants of kernels that only a GPU can judge: off by default, with the bits of the default.

FOREWORD_TRITON_VARIANTS=name,name enables some for a whole process. `foreword bench gpu` measures each one
in a process of its own. A variant that no GPU favours is deleted with its code.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import torch

from foreword.errors import ConfigError, did_you_mean

VARIANTS_ENV = "FOREWORD_TRITON_VARIANTS"  # comma separated names
PDL_CAPABILITY = (9, 0)  # compute capability


@dataclass(frozen=True, slots=True)
class Variant:
    change: str  # against the default kernels
    expected: str  # what it gains, and where


VARIANTS: dict[str, Variant] = {  # by name
    "linear_unpadded": Variant(
        "linear layers of few rows with the narrowest instruction on Hopper, so with another n for more rows",
        "up to a tenth of a step of 1 to 32 rows, most with int4, if n changes no bit",
    ),
    "linear_wide_tiles": Variant(
        "tiles of 128 x 256 for prompts, for dense weights with one split of K (most of an 8B model)",
        "a quarter less traffic from the L2 cache, which limits prompts on Hopper",
    ),
    "linear_two_programs": Variant(
        "at most 128 registers for quantized weights from 33 rows on: two programs on a multiprocessor",
        "one program unpacks while the other multiplies; spills between splits of K, and within with int4",
    ),
    "pdl": Variant(
        "programmatic dependent launch: a kernel starts before the one before it has ended, and waits",
        "1.5 to 2.5 us a launch on Hopper: a tenth of a decode step of one request",
    ),
    "attention_unpadded": Variant(
        "attention tiles of 16 columns where they suffice, so with another n of the matrix instruction",
        "a fifth fewer instructions when decoding on Hopper, if n changes no bit",
    ),
}


@cache
def enabled_variants() -> frozenset[str]:
    """Names in the environment, read once per process. Raises ConfigError for unknown ones."""
    names = frozenset(filter(None, map(str.strip, os.environ.get(VARIANTS_ENV, "").split(","))))
    for name in sorted(names - VARIANTS.keys()):
        hint = did_you_mean(name, VARIANTS) or f"; known: {', '.join(VARIANTS)}"
        raise ConfigError(f"{VARIANTS_ENV}: there is no variant {name!r}{hint}", VARIANTS_ENV)
    return names


def is_enabled(name: str) -> bool:
    """Whether this process launches the variant."""
    assert name in VARIANTS, name
    return name in enabled_variants()


def launches_dependents(device: torch.device) -> bool:
    """Whether kernels themselves wait for the one before them (variant "pdl"), instead of the GPU.

    Every program waits before it reads or writes what another kernel may write, and only then lets the next
    kernel start: all kernels but one before it have ended. CUDA graphs record such launches as programmatic
    edges (CUDA 12.3 and later); after a copy, a memset or another stream's event the edge is an ordinary one.
    """
    if not is_enabled("pdl") or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= PDL_CAPABILITY
