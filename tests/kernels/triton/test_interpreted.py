"""exact_dot() fixes interpreted products that depend on tile shapes or are wrong in bfloat16."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.support.triton_interpreter import IS_INTERPRETED, exact_dot, program_order

pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="kernels are compiled here")


@triton.jit
def _product(a, b, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr):
    rows, columns, k = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, K)
    left = tl.load(a + rows[:, None] * K + k[None, :])
    right = tl.load(b + columns[None, :] * K + k[:, None])
    tl.store(out + rows[:, None] * COLUMNS + columns[None, :], tl.dot(left, right, input_precision="ieee"))


@triton.jit
def _arrivals(counter, out):
    number = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(out + tl.atomic_add(counter, 1), number)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(a), len(b))
    _product[(1,)](a, b, out, len(a), len(b), a.shape[1])
    return out


def test_interpreted_products_do_not_depend_on_tiles() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(16, 64, generator=generator), torch.randn(64, 64, generator=generator)
    with exact_dot():
        whole = product(a, b)
        assert torch.equal(whole[:, :16], product(a, b[:16]))
    torch.testing.assert_close(whole, (a.double() @ b.double().T).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_interpreted_half_precision_is_upcast(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(16, 32, generator=generator).to(dtype) for _ in range(2))
    with exact_dot():
        torch.testing.assert_close(product(a, b), (a.double() @ b.double().T).float())


def test_programs_run_in_the_requested_order() -> None:
    counter, out = torch.zeros(1, dtype=torch.int32), torch.empty(6, dtype=torch.int32)
    with program_order(lambda numbers: numbers[::-1]):
        _arrivals[(2, 3)](counter, out)
    assert out.tolist() == [5, 4, 3, 2, 1, 0]
