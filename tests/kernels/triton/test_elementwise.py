"""Activations, softcap and RMS norm in Triton against the reference."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.kernels.reference.backend import ReferenceOps
from foreword.kernels.triton import elementwise
from foreword.kernels.triton.elementwise import (
    act,
    gate,
    gated_act,
    layer_norm,
    rms_norm,
    scale_by_sigmoid,
    softcap,
)
from tests.support.budget import examples
from tests.support.triton_compile import KernelSource, argument_types, compile_all

pytestmark = pytest.mark.usefixtures("on_device")


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "gpt_oss", "relu2"])
@pytest.mark.parametrize("width", [5, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_match_reference(activation: str, width: int, dtype: torch.dtype) -> None:
    x = (torch.randn(3, 2 * width + 2) * 4).to(dtype)[:, 1:-1]
    rounding = 1e-5 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(
        gated_act(x, activation), ReferenceOps().gated_act(x, activation), atol=rounding, rtol=rounding
    )
    assert gated_act(x[:0], activation).shape == (0, width)


@pytest.mark.parametrize("activation", ["relu2", "gelu_tanh", "xielu"])
@pytest.mark.parametrize("width", [5, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_without_a_gate_match_reference(activation: str, width: int, dtype: torch.dtype) -> None:
    x = (torch.randn(3, width + 2) * torch.logspace(-3, 1, 3)[:, None]).to(dtype)[:, 1:-1]
    rounding = 1e-5 if dtype == torch.float32 else 8e-3
    result = act(x, activation, (0.8, 0.6))
    expected = ReferenceOps().act(x, activation, (0.8, 0.6))
    torch.testing.assert_close(result, expected, atol=rounding, rtol=rounding)
    assert torch.equal(act(x[1:2], activation, (0.8, 0.6)), result[1:2])
    assert act(x[:0], activation, (0.8, 0.6)).shape == (0, width)
    assert act(torch.full_like(x, torch.nan), activation, (0.8, 0.6)).isnan().all()


@pytest.mark.parametrize("width", [5, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scale_by_sigmoid_matches_reference(width: int, dtype: torch.dtype) -> None:
    x, gate = torch.randn(4, width).to(dtype), torch.tensor([[-200.0], [-1.0], [0.5], [200.0]]).to(dtype)
    rounding = 1e-6 if dtype == torch.float32 else 8e-3
    expected = ReferenceOps().scale_by_sigmoid(x, gate)
    torch.testing.assert_close(scale_by_sigmoid(x, gate), expected, atol=rounding, rtol=rounding)
    assert torch.equal(scale_by_sigmoid(x[2:3], gate[2:3]), scale_by_sigmoid(x, gate)[2:3])
    assert scale_by_sigmoid(x[:0], gate[:0]).shape == (0, width)


@pytest.mark.parametrize("activation", ["silu", "sigmoid", "gelu_tanh", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_matches_reference(activation: str, dtype: torch.dtype) -> None:
    """Of slices of wider rows."""
    rounding = 1e-6 if dtype == torch.float32 else 2**-7
    wide = (torch.randn(5, 3000) * 3).to(dtype)
    operands = wide[:, :1030], wide[:, 1500:2530]
    result = gate(*operands, activation)
    expected = ReferenceOps().gate(*operands, activation)
    torch.testing.assert_close(result, expected, atol=rounding, rtol=rounding)
    assert torch.equal(gate(*(part[2:3] for part in operands), activation), result[2:3])
    assert gate(*(part[:0] for part in operands), activation).shape == (0, 1030)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_sum_matches_reference(dtype: torch.dtype) -> None:
    a, b = ((torch.randn(3, 1500) * 4).to(dtype) for _ in range(2))
    result, rounding = elementwise.add_scaled(a, b, 0.7), 0.0 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(result, ReferenceOps().add(a, b, 0.7), atol=0, rtol=rounding)
    assert torch.equal(elementwise.add_scaled(a[1:2], b[1:2], 0.7), result[1:2])
    assert elementwise.add_scaled(a[:0], b[:0], 0.7).shape == (0, 1500)


@pytest.mark.parametrize("scale", [1e-6, 1e-2, 1.0, 100.0, 1e30])
def test_softcap_is_exact_for_small_values(scale: float) -> None:
    x = torch.randn(3, 700) * scale
    x[0, :4] = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan])
    expected = (3.0 * torch.tanh(x.double() / 3.0)).float()
    torch.testing.assert_close(softcap(x, 3.0), expected, atol=0, rtol=2e-6, equal_nan=True)
    assert softcap(x[:0], 3.0).shape == (0, 700)


def test_values_do_not_depend_on_their_place() -> None:
    x = torch.randn(9, 700)
    together, activated = softcap(x, 3.0), gated_act(x, "gelu")
    for row in range(9):
        assert torch.equal(softcap(x[row : row + 1], 3.0), together[row : row + 1])
        assert torch.equal(gated_act(x[row : row + 1], "gelu"), activated[row : row + 1])


@settings(max_examples=examples(15))
@given(
    rows=st.integers(0, 5),
    inside=st.sampled_from([None, 1, 3]),
    width=st.sampled_from([1, 16, 40, 64, 300, 2048, 5000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_rms_norm_matches_reference(rows: int, inside: int | None, width: int, dtype: torch.dtype) -> None:
    """Also for heads within a wider row."""
    torch.manual_seed(rows)
    x = torch.randn((rows, width) if inside is None else (rows, inside + 2, width)).to(dtype)
    x = x if inside is None else x[:, 1:-1]
    weight = torch.randn(width)
    rounding = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    for each in (weight, *([] if inside is None else [torch.randn(inside, width)])):
        torch.testing.assert_close(
            rms_norm(x, each, 1e-5), ReferenceOps().rms_norm(x, each, 1e-5), atol=rounding, rtol=rounding
        )


@pytest.mark.parametrize("width", [1, 40, 64, 300, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norm_matches_reference(width: int, dtype: torch.dtype, has_bias: bool) -> None:
    x = (torch.randn(5, 3, width) * 4 + 10).to(dtype)[:, 1:]
    weight, bias = torch.randn(width), torch.randn(width) if has_bias else None
    rounding = 2e-5 if dtype == torch.float32 else 1e-2
    result, expected = (ops(x, weight, bias, 1e-5) for ops in (layer_norm, ReferenceOps().layer_norm))
    torch.testing.assert_close(result, expected, atol=rounding, rtol=rounding)


def test_heads_are_normalized_as_rows() -> None:
    x, weight = torch.randn(2, 3, 2, 16), torch.randn(16)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).view(-1, 16), rms_norm(x.view(-1, 16), weight, 1e-5))


@pytest.mark.parametrize("width", [48, 1024, 3000])
def test_rows_are_batch_invariant(width: int) -> None:
    x, weight = torch.randn(67, width) * torch.logspace(-3, 3, 67)[:, None], torch.randn(width)
    x[5] = torch.nan
    for norm in (
        partial(rms_norm, weight=weight, eps=1e-5),
        partial(layer_norm, weight=weight, bias=weight, eps=1e-5),
    ):
        together = norm(x)
        for row in (0, 1, 4, 6, 41, 66):
            assert torch.equal(norm(x[row : row + 1]), together[row : row + 1])
        assert together[5].isnan().all() and together[[4, 6]].isfinite().all()


def test_program_shape_depends_on_width_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the order of a sum follows from the program's layout."""
    shapes = set()

    class Launched:
        def __getitem__(self, grid: tuple[int]) -> Launched:
            return self

        def __call__(self, *_: object, **constants: int) -> None:
            shapes.add((constants["WIDTH"], constants["ROWS"], constants["BLOCK"], constants["num_warps"]))

    monkeypatch.setattr(elementwise, "_norm_kernel", Launched())
    for rows in (1, 2, 63, 1000):
        for width in (64, 128, 896, 4096):
            rms_norm(torch.empty(rows, width), torch.empty(width), 1e-5)
    assert shapes == {(64, 32, 64, 4), (128, 16, 128, 4), (896, 2, 1024, 4), (4096, 1, 4096, 8)}


@pytest.mark.parametrize("centers", [False, True])
def test_norms_compile_without_spilling(centers: bool) -> None:
    arguments = argument_types("x:*bf16 weight,bias:*fp32 out:*bf16 num_rows:i32 eps:fp32 outer,inner:i32")
    shapes = [(128, 16, 128, 4), (8192, 1, 8192, 16)]
    made = compile_all(
        [
            KernelSource(
                "foreword.kernels.triton.elementwise:_norm_kernel",
                arguments,
                {"ROWS_INSIDE": 1, "WIDTH": width, "ROWS": rows, "BLOCK": block}
                | {"CENTERS": centers, "HAS_BIAS": centers, "BY_HEAD": not centers, "PDL": capability == 90},
                capability,
                num_warps=warps,
                enable_fp_fusion=False,
                divisible=("x", "weight", "bias", "out", "outer", "inner"),
            )
            for capability, (width, rows, block, warps) in zip((80, 90), shapes, strict=True)
        ]
    )
    assert all(each.stack == each.spills == 0 and each.count(r"ld\.global\.v4") for each in made)
    assert not any(each.count(r"fma\.rn\.f32|approx\.f(tz\.)?32.*sqrt") for each in made)
    without, dependent = made
    assert "griddepcontrol" not in without.ptx
    # A thread has 16 values: float32 of weight and bias, which no kernel writes, then bfloat16 of x.
    before, after = dependent.ptx.split("griddepcontrol.wait")
    assert [part.count("ld.global.v4.b32") for part in (before, after)] == [4 * (1 + centers), 2]
