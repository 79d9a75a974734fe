"""GPUs that the Triton kernels accept, and the reasons to refuse others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from foreword.kernels.gpu import GPUInfo, check_triton

H200, V100, T4 = GPUInfo("NVIDIA H200", (9, 0)), GPUInfo("Tesla V100", (7, 0)), GPUInfo("Tesla T4", (7, 5))


def passing() -> str | None:
    return None


def not_called() -> str | None:
    raise AssertionError("checks were run")


def broken() -> str | None:
    raise RuntimeError("PassManager::run failed\nand a stack")


@pytest.mark.parametrize("gpu", [H200, T4, GPUInfo("B200", (10, 0))])
def test_gpu_with_passing_checks_is_accepted(gpu: GPUInfo) -> None:
    assert check_triton(gpu, True, passing) is None


@pytest.mark.parametrize(
    ("gpu", "installed", "run_checks", "reason"),
    [
        (None, True, not_called, "no CUDA device was found"),
        (H200, False, not_called, "Triton is not installed"),
        (
            V100,
            True,
            not_called,
            "Triton's kernels need compute capability 7.5, not Tesla V100 (compute capability 7.0)",
        ),
        (T4, True, broken, f"Triton's kernels do not run on {T4}: RuntimeError: PassManager::run failed"),
        (
            T4,
            True,
            lambda: "linear [96, 64]: a row differs among 3",
            f"Triton's kernels are not exact on {T4}: linear [96, 64]: a row differs among 3",
        ),
    ],
)
def test_refusal_has_a_reason(
    gpu: GPUInfo | None, installed: bool, run_checks: Callable[[], str | None], reason: str
) -> None:
    assert check_triton(gpu, installed, run_checks) == reason
