"""Random quantized weights for tests, and the values that native products use."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from foreword.kernels.ops import Float8Blocks, GroupedInts, Matrix, QuantizedBlocks
from foreword.kernels.quantization import QUANT_BLOCKS, dequantize, fake_quantize

# Offsets of float16 scales in a block; others: (0,)
SCALE_OFFSETS = {
    "q4_1": (0, 2),
    "q5_1": (0, 2),
    "mxfp4": (),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "q2_k": (80, 82),
    "q3_k": (108,),
}
SUPER_FORMATS = tuple(name for name, block in QUANT_BLOCKS.items() if block.num_values == 256)
WEIGHT_FORMATS = ("int8", "int4", *QUANT_BLOCKS)


def random_weight(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def scale_bytes(weight_format: str) -> list[int]:
    """Places in a block of its float16 scales, or of the exponent of MXFP4."""
    if weight_format == "mxfp4":
        return [0]
    return [place + byte for place in SCALE_OFFSETS.get(weight_format, (0,)) for byte in (0, 1)]


def random_blocks(
    weight_format: str, rows: int, columns: int, seed: int = 0, scale: float = 0.01
) -> QuantizedBlocks:
    """Random bytes for values, normally distributed float16 scales; powers of 2 below `scale` for MXFP4."""
    block = QUANT_BLOCKS[weight_format]
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, columns // block.num_values)
    data = torch.randint(0, 256, (*shape, block.num_bytes), dtype=torch.uint8, generator=generator)
    for place in SCALE_OFFSETS.get(weight_format, (0,)):
        halves = (torch.randn(*shape, 1, generator=generator) * scale).to(torch.float16)
        data[..., place : place + 2] = halves.view(torch.uint8)
    if weight_format == "mxfp4":
        data[..., 0] = data[..., 0] % 5 + round(math.log2(scale)) + 123
    return QuantizedBlocks(weight_format, data.reshape(rows, -1), columns)


def random_grouped_ints(
    bits: int,
    rows: int,
    columns: int,
    group_size: int,
    seed: int = 0,
    scale: float = 0.1,
    dtype: torch.dtype = torch.float16,
) -> GroupedInts:
    """Scales of `dtype`, as in a checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    shape = rows, columns // group_size
    return GroupedInts(
        bits,
        group_size,
        torch.randint(0, 256, (rows, columns * bits // 8), dtype=torch.uint8, generator=generator),
        (torch.randn(shape, generator=generator) * scale).to(dtype).to(torch.float32),
        torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=generator),
    )


def random_float8_blocks(
    rows: int, columns: int, block_shape: tuple[int, int], seed: int = 0, scale: float = 0.01
) -> Float8Blocks:
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(rows, columns, generator=generator) * 40).to(torch.float8_e4m3fn)
    height, width = block_shape
    scales = torch.randn(-(-rows // height), -(-columns // width), generator=generator) * scale
    return Float8Blocks(values, scales, block_shape)


def random_matrix(weight_format: str, rows: int, columns: int, seed: int = 0) -> Matrix:
    if weight_format in ("int8", "int4"):
        return random_weight(rows, columns, seed)
    return random_blocks(weight_format, rows, columns, seed)


def weight_values(matrix: Matrix, weight_format: str) -> Tensor:
    return dequantize(matrix) if isinstance(matrix, QuantizedBlocks) else fake_quantize(matrix, weight_format)


def fake_quantize_activations(x: Tensor, weight_format: str) -> Tensor:
    """x [T, K] as int8 values with a scale for each row, 32 or 256 values, by weight format."""
    columns = x.shape[1]
    run = columns if weight_format == "int8" else 256 if weight_format in SUPER_FORMATS else 32
    runs = F.pad(x.float(), (0, -columns % run)).reshape(x.shape[0], -1, run)
    largest = runs.abs().amax(-1, keepdim=True)
    steps = torch.round(runs * torch.where(largest == 0, 0.0, torch.full_like(largest, 127) / largest))
    return (steps.double() * (largest / 127).double()).reshape(x.shape[0], -1)[:, :columns]
