"""Kernels compile for GPUs that are not present."""

from __future__ import annotations

import pytest

from tests.support.triton_compile import MAX_SHARED, KernelSource, compile_all

KERNEL = "tests.kernels.triton.test_interpreted:_product"
ARGUMENTS = {"a": "*bf16", "b": "*bf16", "out": "*fp32"}
SHAPE = {"ROWS": 64, "COLUMNS": 64, "K": 64}


def test_products_compile_to_each_gpus_instructions() -> None:
    ampere, hopper = compile_all(
        [KernelSource(KERNEL, ARGUMENTS, SHAPE, capability) for capability in (80, 90)]
    )
    assert all("m16n8k16" in product for product in ampere.products) and ampere.products
    assert all("m64n64k16" in product for product in hopper.products) and hopper.products
    for capability, made in ((80, ampere), (90, hopper)):
        assert 0 < made.shared <= MAX_SHARED[capability] and 0 < made.registers < 256
        assert made.stack == made.spills == 0 and made.count(r"ld\.global\.v4") > 0


def test_spilled_registers_are_detected() -> None:
    (made,) = compile_all(
        [KernelSource(KERNEL, ARGUMENTS, {"ROWS": 256, "COLUMNS": 256, "K": 16}, 80, num_warps=1)]
    )
    assert made.stack > 0 and made.spills > 0


def test_compiler_errors_are_raised() -> None:
    with pytest.raises(AssertionError, match="power of 2"):
        compile_all([KernelSource(KERNEL, ARGUMENTS, {"ROWS": 48, "COLUMNS": 64, "K": 64})])
