"""GPUs that the Triton kernels accept, and the reasons to refuse others."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CalledProcessError

import pytest

from foreword.kernels.gpu import GPUInfo, check_triton

H200, V100, T4 = GPUInfo("NVIDIA H200", (9, 0)), GPUInfo("Tesla V100", (7, 0)), GPUInfo("Tesla T4", (7, 5))


def passing() -> str | None:
    return None


def not_called() -> str | None:
    raise AssertionError("checks were run")


def broken() -> str | None:
    raise RuntimeError("PassManager::run failed\nand a stack")


def without_compiler() -> str | None:
    raise RuntimeError("Failed to find C compiler")


def without_headers() -> str | None:
    raise CalledProcessError(1, "gcc")


@pytest.mark.parametrize("gpu", [H200, T4, GPUInfo("B200", (10, 0))])
def test_gpu_with_passing_checks_is_accepted(gpu: GPUInfo) -> None:
    assert check_triton(gpu, True, passing) is None


@pytest.mark.parametrize(
    ("gpu", "installed", "run_checks", "reason"),
    [
        (None, True, not_called, "no CUDA device was found"),
        (H200, False, not_called, "Triton is not installed: pip install 'triton>=3.6,<3.10'"),
        (
            V100,
            True,
            not_called,
            "Triton's kernels need compute capability 7.5, not Tesla V100 (compute capability 7.0)",
        ),
        (
            T4,
            True,
            without_compiler,
            f"Triton's kernels do not run on {T4}: RuntimeError: Failed to find C compiler. Triton needs a C "
            "compiler and Python's headers: apt install gcc libc6-dev python3-dev",
        ),
        (
            T4,
            True,
            without_headers,
            f"Triton's kernels do not run on {T4}: CalledProcessError: Command 'gcc' returned non-zero exit "
            "status 1. Triton needs a C compiler and Python's headers: apt install gcc libc6-dev python3-dev",
        ),
        (T4, True, broken, f"Triton's kernels do not run on {T4}: RuntimeError: PassManager::run failed"),
        (
            T4,
            True,
            lambda: "linear [96, 64]: a row differs among 3",
            f"Triton's kernels are not exact on {T4}: linear [96, 64]: a row differs among 3. "
            "`foreword bench gpu --only checks` lists all",
        ),
    ],
)
def test_refusal_has_a_reason(
    gpu: GPUInfo | None, installed: bool, run_checks: Callable[[], str | None], reason: str
) -> None:
    assert check_triton(gpu, installed, run_checks) == reason
