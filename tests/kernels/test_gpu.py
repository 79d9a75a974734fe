"""Which cards Triton's kernels compute on, and why not on others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from foreword.kernels.gpu import GPUInfo, check_triton

H200, V100, T4 = GPUInfo("NVIDIA H200", (9, 0)), GPUInfo("Tesla V100", (7, 0)), GPUInfo("Tesla T4", (7, 5))


def well() -> str | None:
    return None


def never() -> str | None:
    raise AssertionError("tried in vain")


def broken() -> str | None:
    raise RuntimeError("PassManager::run failed\nand a stack")


@pytest.mark.parametrize("card", [H200, T4, GPUInfo("B200", (10, 0))])
def test_a_card_on_which_the_trial_runs_is_taken(card: GPUInfo) -> None:
    assert check_triton(card, True, well) is None


@pytest.mark.parametrize(
    ("card", "installed", "trial", "reason"),
    [
        (None, True, never, "no CUDA device was found"),
        (H200, False, never, "Triton is not installed"),
        (
            V100,
            True,
            never,
            "Triton's kernels need compute capability 7.5, and this is Tesla V100 (compute capability 7.0)",
        ),
        (
            T4,
            True,
            broken,
            "Triton's kernels do not run on Tesla T4 (compute capability 7.5): RuntimeError: PassManager::run failed",
        ),
        (
            T4,
            True,
            lambda: "linear [96, 64]: a row differs among 3",
            "Triton's kernels are not exact on Tesla T4 (compute capability 7.5): linear [96, 64]: a row differs among 3",
        ),
    ],
)
def test_each_refusal_has_its_reason(
    card: GPUInfo | None, installed: bool, trial: Callable[[], str | None], reason: str
) -> None:
    assert check_triton(card, installed, trial) == reason
