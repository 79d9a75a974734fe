"""Values that are computed each for itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from foreword.kernels.reference.backend import ReferenceOps
from foreword.kernels.triton.elementwise import gated_act, softcap
from tests.support.device import DEVICE


@pytest.fixture(autouse=True, scope="module")
def on_device() -> Iterator[None]:
    with torch.device(DEVICE):
        yield


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("width", [5, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_those_of_the_reference(activation: str, width: int, dtype: torch.dtype) -> None:
    x = (torch.randn(3, 2 * width + 2) * 4).to(dtype)[:, 1:-1]
    rounding = 1e-5 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(
        gated_act(x, activation), ReferenceOps().gated_act(x, activation), atol=rounding, rtol=rounding
    )
    assert gated_act(x[:0], activation).shape == (0, width)


@pytest.mark.parametrize("scale", [1e-6, 1e-2, 1.0, 100.0, 1e30])
def test_small_values_are_capped_as_exactly_as_large_ones(scale: float) -> None:
    x = torch.randn(3, 700) * scale
    x[0, :4] = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan])
    expected = (3.0 * torch.tanh(x.double() / 3.0)).float()
    torch.testing.assert_close(softcap(x, 3.0), expected, atol=0, rtol=2e-6, equal_nan=True)
    assert softcap(x[:0], 3.0).shape == (0, 700)


def test_a_value_does_not_depend_on_its_place() -> None:
    x = torch.randn(9, 700)
    together, activated = softcap(x, 3.0), gated_act(x, "gelu")
    for row in range(9):
        assert torch.equal(softcap(x[row : row + 1], 3.0), together[row : row + 1])
        assert torch.equal(gated_act(x[row : row + 1], "gelu"), activated[row : row + 1])
