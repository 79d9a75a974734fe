"""log and exp in Triton have the bits of the reference, also at range boundaries."""

from __future__ import annotations

import math

import numpy as np
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.kernels import portable_math as plain
from foreword.kernels.triton.portable_math import exp_fixed_point, log, round_to_int
from tests.support.budget import examples
from tests.support.device import DEVICE


@triton.jit
def _log_and_mass(x, logs, masses, whole, N, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    values = tl.load(x + place, mask=place < N, other=1.0)
    tl.store(logs + place, log(values), mask=place < N)
    tl.store(masses + place, exp_fixed_point(-values), mask=place < N)
    tl.store(whole + place, round_to_int(values), mask=(place < N) & (values < 1e15))


def assert_same(x: torch.Tensor) -> None:
    logs, masses, whole = torch.empty_like(x), torch.empty_like(x, dtype=torch.int64), x.round()
    on = [tensor.to(DEVICE) for tensor in (x, logs, masses, whole)]
    _log_and_mass[(1,)](*on, len(x), BLOCK=triton.next_power_of_2(len(x)), enable_fp_fusion=False)
    assert torch.equal(on[1].cpu().view(torch.int64), plain.log(x).view(torch.int64))
    assert torch.equal(on[2].cpu(), plain.exp_fixed_point(-x))
    assert torch.equal(on[3].cpu(), x.round())


def test_log_and_exp_match_reference() -> None:
    x = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1e-9
    halves = torch.arange(1, 2000).double() / 2
    seams = torch.tensor(
        [math.sqrt(0.5), 0.5, 1.0, 2.0, 1 - 2.0**-33, 2.0**-33, 29.8, 64.0, 65.0, 1e30, 2.0**-1022],
        dtype=torch.float64,
    )
    near = torch.from_numpy(np.nextafter(seams.numpy(), 1.0))
    assert_same(
        torch.cat([x, 30 * x, 1 - x * 2.0**-30, x * 2.0**-40, halves, halves * math.log(2), seams, near])
    )


@given(st.lists(st.floats(2.0**-1022, 1e300), min_size=16, max_size=16))
@settings(max_examples=examples(30))
def test_random_values_match_reference(values: list[float]) -> None:
    assert_same(torch.tensor(values, dtype=torch.float64))
