"""Quantized weights in plain torch: GGUF blocks, and quantization to int8, int4 and fp8.

The native kernels multiply with exactly these values; tests demand equality.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foreword.kernels.ops import Float8Blocks, GroupedInts, Matrix, QuantizedBlocks

MIN_MAGNITUDE = 2.0**-100  # a largest magnitude below this counts as zero: its inverse would overflow
INT4_GROUP = 32
# Candidates for the quantized value of largest magnitude; the one with the least squared error wins.
INT4_EXTREMES = (-8.0, -8.5, -7.5, -9.0, -7.0, -9.5, -6.5)
HALF_MAX = 65504.0
FP8_MAX = 448.0  # largest value of float8_e4m3fn


@dataclass(frozen=True, slots=True)
class QuantBlock:
    """Values stored together in a file, and their bytes."""

    num_values: int
    num_bytes: int


QUANT_BLOCKS = {
    "q8_0": QuantBlock(32, 34),
    "q5_0": QuantBlock(32, 22),
    "q4_0": QuantBlock(32, 18),
    "q4_1": QuantBlock(32, 20),
    "q5_1": QuantBlock(32, 24),
    "iq4_nl": QuantBlock(32, 18),
    "mxfp4": QuantBlock(32, 17),
    "q4_k": QuantBlock(256, 144),
    "q5_k": QuantBlock(256, 176),
    "q6_k": QuantBlock(256, 210),
    "q2_k": QuantBlock(256, 84),
    "q3_k": QuantBlock(256, 110),
    "iq4_xs": QuantBlock(256, 136),
}
# Values of the 16 codes of 4 bits; those of FP4 are doubled.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def matrix_shape(matrix: Matrix) -> tuple[int, int]:
    """Rows N and columns K."""
    if isinstance(matrix, Tensor):
        return matrix.shape[0], matrix.shape[1]
    return len(matrix.data if isinstance(matrix, QuantizedBlocks) else matrix.values), matrix.columns


def slice_rows(matrix: Matrix, rows: slice) -> Matrix:
    """Rows of a matrix [N, K], without a copy but of scales."""
    if isinstance(matrix, Tensor):
        return matrix[rows]
    if isinstance(matrix, QuantizedBlocks):
        return replace(matrix, data=matrix.data[rows])
    if isinstance(matrix, GroupedInts):
        values, scales, zeros = matrix.values[rows], matrix.scales[rows], matrix.zeros[rows]
        return replace(matrix, values=values, scales=scales, zeros=zeros)
    height, width = matrix.block_shape
    scales = matrix.scales.repeat_interleave(height, 0)[rows]
    return Float8Blocks(matrix.values[rows], scales[: len(matrix.values[rows])], (1, width))


def dequantize(matrix: QuantizedBlocks | GroupedInts | Float8Blocks) -> Tensor:
    """float32 [N, K]"""
    if isinstance(matrix, GroupedInts):
        return _dequantize_grouped(matrix)
    if isinstance(matrix, Float8Blocks):
        return _dequantize_float8(matrix)
    return _dequantize_blocks(matrix)


def _dequantize_grouped(matrix: GroupedInts) -> Tensor:
    """Columns in the order of inputs."""
    values = _unpack_nibbles(matrix.values, 1) if matrix.bits == 4 else matrix.values
    groups = values.to(torch.float32).view(len(values), -1, matrix.group_size)
    weight = ((groups - matrix.zeros[..., None]) * matrix.scales[..., None]).flatten(1)
    return _order_inputs(weight, matrix.input_order)


def _order_inputs(weight: Tensor, input_order: Tensor | None) -> Tensor:
    """Columns [N, K] in the order of inputs."""
    if input_order is None:
        return weight
    return torch.empty_like(weight).index_copy_(1, input_order, weight)


def _dequantize_float8(matrix: Float8Blocks) -> Tensor:
    rows, columns = matrix.values.shape
    block_rows, block_columns = matrix.block_shape
    scales = matrix.scales.repeat_interleave(block_rows, 0)[:rows]
    return matrix.values.to(torch.float32) * scales.repeat_interleave(block_columns, 1)[:, :columns]


def _dequantize_blocks(blocks: QuantizedBlocks) -> Tensor:
    block = QUANT_BLOCKS[blocks.format]
    rows = blocks.data.shape[0]
    assert (
        blocks.columns % block.num_values == 0
        and blocks.data.shape[1] == blocks.columns // block.num_values * block.num_bytes
    )
    values = DEQUANTIZERS[blocks.format](blocks.data.reshape(-1, block.num_bytes))
    return _order_inputs(values.reshape(rows, blocks.columns), blocks.input_order)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Rounded values and their scales. G groups a row: 1, or one for each 32 values, zero-padded."""

    quants: Tensor  # float32 [N, G, K / G]: integers, or values of float8_e4m3fn
    scales: Tensor  # float32 [N, G]; NaN where a value was not finite

    def dequantize(self, columns: int) -> Tensor:
        """float32 [N, columns]"""
        return (self.quants * self.scales[..., None]).flatten(1)[:, :columns]


def quantize(weight: Tensor, weight_format: str) -> QuantizedWeight:
    """`weight` [N, K] as "int8" or "fp8" (a scale for each row) or "int4" (a scale for each 32 values)."""
    quantizers = {"int8": _quantize_int8, "fp8": _quantize_fp8, "int4": _quantize_int4}
    return quantizers[weight_format](weight.to(torch.float32))


def split_blocks(blocks: QuantizedBlocks) -> QuantizedWeight:
    """Values and float16 scales of "q8_0" or "q4_0" blocks."""
    block = QUANT_BLOCKS[blocks.format]
    data = blocks.data.reshape(-1, block.num_bytes)
    if blocks.format == "q8_0":
        quants = data[:, 2:].view(torch.int8)
    else:
        quants = _unpack_nibbles(data[:, 2:], 16).to(torch.int8) - 8
    rows = blocks.data.shape[0]
    quants = quants.to(torch.float32).reshape(rows, -1, block.num_values)
    return QuantizedWeight(quants, _read_float16(data[:, :2]).reshape(rows, -1))


def fake_quantize(weight: Tensor, weight_format: str) -> Tensor:
    """`weight` [N, K] after quantize(), as float32 [N, K]."""
    return quantize(weight, weight_format).dequantize(weight.shape[1])


def _quantize_int8(weight: Tensor) -> QuantizedWeight:
    inverse, scales = _row_scales(weight, 127.0)
    return QuantizedWeight(torch.round(weight * inverse).nan_to_num_(0.0)[:, None], scales)


def _quantize_fp8(weight: Tensor) -> QuantizedWeight:
    inverse, scales = _row_scales(weight, FP8_MAX)
    quants = (weight * inverse).nan_to_num_(0.0).clamp_(-FP8_MAX, FP8_MAX)
    return QuantizedWeight(quants.to(torch.float8_e4m3fn).to(torch.float32)[:, None], scales)


def _row_scales(weight: Tensor, max_value: float) -> tuple[Tensor, Tensor]:
    """max_value / (a row's largest magnitude), and its inverse, both [N, 1]; NaN for a non-finite row."""
    largest = weight.abs().amax(1, keepdim=True)
    # Scalar / tensor would be computed as reciprocal times scalar, rounded twice.
    inverse = torch.where(largest < MIN_MAGNITUDE, 0.0, torch.full_like(largest, max_value) / largest)
    scales = torch.where(largest < MIN_MAGNITUDE, 0.0, largest / max_value)
    return inverse, torch.where(torch.isfinite(largest), scales, torch.nan)


def _quantize_int4(weight: Tensor) -> QuantizedWeight:
    padding = -weight.shape[1] % INT4_GROUP
    groups = torch.nn.functional.pad(weight, (0, padding)).reshape(-1, INT4_GROUP)
    low, high = groups.aminmax(dim=1, keepdim=True)
    peak = torch.where(-low >= high, low, high)
    best, scales = torch.zeros_like(groups), torch.zeros_like(peak)
    least = torch.full_like(peak, torch.inf)
    for extreme in INT4_EXTREMES:
        scale = (peak / extreme).clamp(-HALF_MAX, HALF_MAX).to(torch.float16).to(torch.float32)
        quants, error = _round_groups(groups, scale)
        better = error < least
        best, scales = torch.where(better, quants, best), torch.where(better, scale, scales)
        least = torch.minimum(error, least)
    scales = torch.where(torch.isfinite(groups).all(1, keepdim=True), scales, torch.nan)
    return QuantizedWeight(best.reshape(weight.shape[0], -1, INT4_GROUP), scales.reshape(weight.shape[0], -1))


def _round_groups(groups: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Groups [G, 32] as multiples of their scale [G, 1], and squared error [G, 1], summed in order."""
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
    quants = torch.round(groups * inverse).clamp(-8, 7)
    squares = (groups - quants * scale).square().t().contiguous()
    error = squares[0]
    for square in squares[1:]:
        error = error + square
    return quants, error[:, None]


def _read_float16(data: Tensor) -> Tensor:
    """Little-endian float16 in uint8 [G, 2n] -> float32 [G, n]"""
    return data.contiguous().view(torch.float16).to(torch.float32)


def _unpack_nibbles(data: Tensor, run: int) -> Tensor:
    """uint8 [G, n] -> uint8 [G, 2n]: the low nibbles of each `run` bytes, then their high nibbles."""
    runs = data.reshape(len(data), -1, 1, run)
    return torch.cat((runs & 15, runs >> 4), 2).reshape(len(data), -1)


def _unpack_bits(data: Tensor, width: int, run: int = 0) -> Tensor:
    """uint8 [G, n] -> uint8 [G, 8 / width * n]: of each `run` bytes (all if 0) lowest bits first."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=data.device)
    runs = data.reshape(len(data), -1, 1, run or data.shape[1])
    return (runs >> shifts[:, None] & (1 << width) - 1).flatten(1)


def _unpack_fifth_bits(data: Tensor) -> Tensor:
    """uint8 [G, 4] -> uint8 [G, 32]: one bit per value, shifted left by 4."""
    return (data[..., None] >> torch.arange(8, dtype=torch.uint8, device=data.device) & 1).flatten(1) << 4


def _look_up(codes: Tensor, values: tuple[int, ...]) -> Tensor:
    """uint8 [G, n] -> float32 [G, n]"""
    return torch.tensor(values, dtype=torch.float32, device=codes.device)[codes.long()]


def _scale_parts(scales: Tensor, values: Tensor) -> Tensor:
    """Float32 scales [G, parts], values [G, n] -> float32 [G, parts, n / parts]"""
    return scales[..., None] * values.reshape(*scales.shape, -1)


def _dequantize_q8_0(data: Tensor) -> Tensor:
    return _read_float16(data[:, :2]) * data[:, 2:].view(torch.int8)


def _dequantize_q4_0(data: Tensor) -> Tensor:
    return _read_float16(data[:, :2]) * (_unpack_nibbles(data[:, 2:], 16).to(torch.float32) - 8)


def _dequantize_q5_0(data: Tensor) -> Tensor:
    values = _unpack_nibbles(data[:, 6:], 16) | _unpack_fifth_bits(data[:, 2:6])
    return _read_float16(data[:, :2]) * (values.to(torch.float32) - 16)


def _dequantize_q4_1(data: Tensor) -> Tensor:
    return _read_float16(data[:, :2]) * _unpack_nibbles(data[:, 4:], 16) + _read_float16(data[:, 2:4])


def _dequantize_q5_1(data: Tensor) -> Tensor:
    values = _unpack_nibbles(data[:, 8:], 16) | _unpack_fifth_bits(data[:, 4:8])
    return _read_float16(data[:, :2]) * values + _read_float16(data[:, 2:4])


def _dequantize_iq4_nl(data: Tensor) -> Tensor:
    return _read_float16(data[:, :2]) * _look_up(_unpack_nibbles(data[:, 2:], 16), IQ4_VALUES)


def _dequantize_mxfp4(data: Tensor) -> Tensor:
    """The scale is 2^(e - 128), half of E8M0's because values are doubled; subnormal for e < 2."""
    exponent = data[:, :1].to(torch.int32)
    bits = torch.where(exponent < 2, 0x200000 << exponent.clamp(max=2), (exponent - 1) << 23)
    return bits.view(torch.float32) * _look_up(_unpack_nibbles(data[:, 1:], 16), FP4_VALUES)


def _unpack_k_scales(data: Tensor) -> tuple[Tensor, Tensor]:
    """First 16 bytes of Q4_K or Q5_K blocks -> scales and minimums of their eight groups."""
    d, d_min = torch.split(_read_float16(data[:, :4]), 1, 1)
    scale, minimum, rest = torch.split(data[:, 4:16], 4, 1)
    scales = torch.cat((scale & 63, rest & 15 | scale >> 6 << 4), 1)
    minimums = torch.cat((minimum & 63, rest >> 4 | minimum >> 6 << 4), 1)
    return d * scales, d_min * minimums


def _scale_k_quants(data: Tensor, values: Tensor) -> Tensor:
    """values uint8 [G, 256] -> float32, by the scales and minimums of eight groups."""
    scales, minimums = _unpack_k_scales(data)
    return scales[..., None] * values.reshape(-1, 8, 32) - minimums[..., None]


def _dequantize_q4_k(data: Tensor) -> Tensor:
    return _scale_k_quants(data, _unpack_nibbles(data[:, 16:], 32))


def _dequantize_q5_k(data: Tensor) -> Tensor:
    return _scale_k_quants(data, _unpack_nibbles(data[:, 48:], 32) | _unpack_bits(data[:, 16:48], 1) << 4)


def _dequantize_q6_k(data: Tensor) -> Tensor:
    low = _unpack_nibbles(data[:, :128], 64)
    high = torch.cat([_unpack_bits(half, 2) for half in torch.split(data[:, 128:192], 32, 1)], 1)
    scales = _read_float16(data[:, 208:]) * data[:, 192:208].view(torch.int8)
    return scales[..., None] * ((low | high << 4).to(torch.float32) - 32).reshape(-1, 16, 16)


def _dequantize_q2_k(data: Tensor) -> Tensor:
    """16 parts; a byte of each holds the scale (low half) and the minimum."""
    scales = _read_float16(data[:, 80:82]) * (data[:, :16] & 15)
    minimums = _read_float16(data[:, 82:]) * (data[:, :16] >> 4)
    return _scale_parts(scales, _unpack_bits(data[:, 16:80], 2, 32)) - minimums[..., None]


def _dequantize_q3_k(data: Tensor) -> Tensor:
    """16 parts, whose 6-bit scales have their upper two bits apart."""
    values = _unpack_bits(data[:, 32:96], 2, 32) | _unpack_bits(data[:, :32], 1) << 2
    scales = _unpack_nibbles(data[:, 96:104], 8) | _unpack_bits(data[:, 104:108], 2) << 4
    scales = _read_float16(data[:, 108:]) * (scales.to(torch.float32) - 32)
    return _scale_parts(scales, values.to(torch.float32) - 4)


def _dequantize_iq4_xs(data: Tensor) -> Tensor:
    """8 parts; the upper two bits of their 6-bit scales are a 16-bit word."""
    scales = _unpack_nibbles(data[:, 4:8], 1) | _unpack_bits(data[:, 2:4], 2, 1) << 4
    scales = _read_float16(data[:, :2]) * (scales.to(torch.float32) - 32)
    return _scale_parts(scales, _look_up(_unpack_nibbles(data[:, 8:], 16), IQ4_VALUES))


DEQUANTIZERS: dict[str, Callable[[Tensor], Tensor]] = {
    "q8_0": _dequantize_q8_0,
    "q5_0": _dequantize_q5_0,
    "q4_0": _dequantize_q4_0,
    "q4_1": _dequantize_q4_1,
    "q5_1": _dequantize_q5_1,
    "iq4_nl": _dequantize_iq4_nl,
    "mxfp4": _dequantize_mxfp4,
    "q4_k": _dequantize_q4_k,
    "q5_k": _dequantize_q5_k,
    "q6_k": _dequantize_q6_k,
    "q2_k": _dequantize_q2_k,
    "q3_k": _dequantize_q3_k,
    "iq4_xs": _dequantize_iq4_xs,
}
