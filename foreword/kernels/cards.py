"""Which GPU there is, and whether the kernels of kernels/triton may compute on it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch

__all__ = ["Card", "card", "refusal", "why_not_triton"]

OLDEST = (7, 5)  # compute capability; Triton knows no older ones


@dataclass(frozen=True, slots=True)
class Card:
    """The GPU in use, and its compute capability, such as (9, 0)."""

    name: str
    capability: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.capability[0]}.{self.capability[1]})"


def card() -> Card | None:
    """None where torch finds no GPU."""
    if not torch.cuda.is_available():
        return None
    return Card(torch.cuda.get_device_name(), torch.cuda.get_device_capability())


@cache
def why_not_triton() -> str | None:
    """Why the reference computes on this machine's GPU; None if it does not. Tried once in a process: that takes a moment."""
    return refusal(card(), find_spec("triton") is not None, _try)


def refusal(found: Card | None, installed: bool, trial: Callable[[], str | None]) -> str | None:
    """Why not this card; None if nothing is in the way.

    installed  Triton is there
    trial      compiles and runs kernels on the card; returns what is wrong with their results, or None
    """
    if found is None:
        return "no CUDA device was found"
    if not installed:
        return "Triton is not installed"
    if found.capability < OLDEST:
        return f"Triton's kernels need compute capability {OLDEST[0]}.{OLDEST[1]}, and this is {found}"
    try:
        wrong = trial()
    except Exception as error:  # of Triton, of the compiler behind it, of the driver: none of them is a reason not to serve
        lines = str(error).strip().splitlines() or [""]
        return f"Triton's kernels do not run on {found}: {type(error).__name__}: {lines[0]}"
    return None if wrong is None else f"Triton's kernels are not exact on {found}: {wrong}"


def _try() -> str | None:
    """Whether a row has the same bits alone and among others: only the card itself can tell."""
    backend = importlib.import_module("foreword.kernels.triton.backend")
    checks = importlib.import_module("foreword.kernels.triton.checks")
    ops = backend.TritonOps(eager=True)
    wrong: str | None = checks.check_rows(ops, "cuda") or checks.check_attention(ops, "cuda")
    return wrong
