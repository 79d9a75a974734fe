"""Quantized weights in torch, against the gguf package and rounding bounds."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from foreword.kernels.ops import QuantizedBlocks
from foreword.kernels.quantization import QUANT_BLOCKS, dequantize, fake_quantize
from tests.support.cpu_kernels import same_bits
from tests.support.quantized_weights import random_blocks, random_weight


def error(values: Tensor, exact: Tensor) -> float:
    return float((values - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def test_blocks_match_gguf() -> None:
    for kind in QUANT_BLOCKS:
        blocks = random_blocks(kind, 5, 768)
        theirs = gguf.quants.dequantize(blocks.data.numpy(), gguf.GGMLQuantizationType[kind.upper()])
        assert torch.equal(dequantize(blocks), torch.from_numpy(theirs))


def test_block_sizes_match_gguf() -> None:
    for kind in QUANT_BLOCKS:
        values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]]
        assert (QUANT_BLOCKS[kind].num_values, QUANT_BLOCKS[kind].num_bytes) == (values, size)


def test_subnormal_and_negative_scales_are_kept() -> None:
    for kind in QUANT_BLOCKS:
        blocks = random_blocks(kind, 3, 512, scale=1e-7)
        theirs = gguf.quants.dequantize(blocks.data.numpy(), gguf.GGMLQuantizationType[kind.upper()])
        assert torch.equal(dequantize(blocks), torch.from_numpy(theirs)) and dequantize(blocks).any()


def test_random_bytes_match_gguf() -> None:
    """Scales that are infinite or NaN too, and all exponents of MXFP4."""
    for kind in QUANT_BLOCKS:
        block = QUANT_BLOCKS[kind]
        generator = torch.Generator().manual_seed(5)
        data = torch.randint(0, 256, (600, block.num_bytes), dtype=torch.uint8, generator=generator)
        if kind == "mxfp4":
            data[:, 0] = torch.arange(600).remainder(256)
        with np.errstate(all="ignore"):
            theirs = torch.from_numpy(
                gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind.upper()])
            )
        assert same_bits(dequantize(QuantizedBlocks(kind, data, block.num_values)), theirs)


def test_int8_is_within_half_a_step() -> None:
    weight = random_weight(20, 333)
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((fake_quantize(weight, "int8") - weight).abs() <= step * 0.5001).all()


def test_int4_is_better_than_one_fixed_scale() -> None:
    weight = random_weight(50, 640)
    peak = weight.reshape(-1, 32).abs().amax(1, keepdim=True)
    fixed = (torch.round(weight.reshape(-1, 32) / peak * 8).clamp(-8, 7) * peak / 8).reshape(weight.shape)
    assert error(fake_quantize(weight, "int4"), weight) < 0.95 * error(fixed, weight)


@pytest.mark.parametrize(("kind", "values"), [("int8", 255), ("int4", 16)])
def test_quantized_row_has_few_values(kind: str, values: int) -> None:
    assert all(len(row.unique()) <= values for row in fake_quantize(random_weight(9, 32), kind))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_zeros_stay_and_non_finite_values_give_nan_scales(kind: str) -> None:
    weight = torch.zeros(4, 70)
    weight[1, 3], weight[2, 69], weight[3, 5] = torch.inf, torch.nan, 1e-42
    values = fake_quantize(weight, kind)
    assert not values[0].any() and not values[3].any()
    assert values[1, 3].isnan() and values[2, 69].isnan()


def test_int4_rounds_groups_independently() -> None:
    weight = random_weight(3, 96)
    whole = fake_quantize(weight, "int4")
    parts = [fake_quantize(part, "int4") for part in torch.split(weight, 32, 1)]
    assert torch.equal(whole, torch.cat(parts, 1))
