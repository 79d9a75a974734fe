"""float8_e4m3fn bits equal those of torch."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.kernels.triton.gemm_pack import from_float8, to_float8
from tests.support.budget import examples

pytestmark = pytest.mark.usefixtures("on_device")

WIDTH = 256


@triton.jit
def _there(x, out, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    tl.store(out + at, to_float8(tl.load(x + at)))


@triton.jit
def _back(x, out, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    tl.store(out + at, from_float8(tl.load(x + at), out.dtype.element_ty))


def rounded(values: torch.Tensor) -> torch.Tensor:
    """float32 -> float8 bits"""
    out = torch.empty(WIDTH, dtype=torch.uint8)
    _there[(1,)](torch.nn.functional.pad(values, (0, WIDTH - len(values))), out, WIDTH)
    return out[: len(values)]


@settings(max_examples=examples(30))
@given(st.lists(st.floats(-448, 448, width=32), min_size=1, max_size=WIDTH))
def test_values_round_like_torch(values: list[float]) -> None:
    x = torch.tensor(values)
    assert torch.equal(rounded(x), x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_ties_go_to_even() -> None:
    every = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = torch.cat(((every[1:] + every[:-1]) / 2, -(every[1:] + every[:-1]) / 2))
    assert torch.equal(rounded(ties), ties.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_value_is_converted_exactly(dtype: torch.dtype) -> None:
    stored = torch.arange(WIDTH, dtype=torch.int32).to(torch.uint8)
    out = torch.empty(WIDTH, dtype=dtype)
    _back[(1,)](stored, out, WIDTH)
    expected = stored.view(torch.float8_e4m3fn).to(dtype)
    assert torch.equal(out.isnan(), expected.isnan()) and expected.isnan().sum() == 2
    assert torch.equal(out.nan_to_num().float(), expected.nan_to_num().float())
