"""Layout of weights in GPU memory, and the order of summation: fixed at load by the weight's shape alone.

A matrix [N, K] is cut into panels of 64 rows and blocks of 64 or 128 columns, padded with zeros. The values
of a panel and block are contiguous, so a program reads one stretch of memory from its first block to its
last.

The sum over K has `splits` parts, each summed block by block, then added in order: p0 + p1 + ... for every
number of rows. With few rows, reading weights dominates, and each split has its own program. Below about two
programs for each of 132 multiprocessors some idle; more mean more partial sums, which costs at 64 rows. A
split has at least 256 columns, so that loads can be pipelined. Llama 3.1 8B has 3, 4, 1 and 4 splits (qkv,
output, gate-up, down), Qwen2.5 0.5B has 3, 3, 2 and 16. The GPU at hand does not enter.

| format | block of a panel | scales |
|---|---|---|
| dense | [64, 64] of the weight's type | none |
| int8, fp8 | int16 [64, 64]: low bytes are columns 0 to 63, high bytes 64 to 127 | float32, one per row |
| q8_0 | int16 [64, 32]: low bytes are columns 0 to 31, high bytes 32 to 63 | int32 [1, 64]: two float16 |
| int4 | int16 [64, 32]: 4 values + 8 a word, lowest bits are columns 0 to 31 | int32 [2, 64]: two each |

fp8 is float8_e4m3fn; q8_0 and int4 have a scale for each 32 columns. Words are as wide as the tensor core
operands, so one shared memory layout serves both: with bytes, the compiler copies 8 bytes at a time on
Hopper, with words 16. Scales come in pairs because loads below 4 bytes are not pipelined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from foreword.errors import CheckpointError
from foreword.kernels.ops import Matrix, QuantizedBlocks
from foreword.kernels.quantization import dequantize, quantize, split_blocks

__all__ = [
    "PANEL_ROWS",
    "PackedWeight",
    "columns_per_block",
    "fp16_from_bits",
    "from_float8",
    "masked_shift_ptx",
    "num_splits",
    "pack",
    "stack",
    "to_float8",
    "unpack_word",
    "values_per_word",
]

PANEL_ROWS = 64
MAX_SLICE_VALUES = 1 << 23  # values packed at a time, 32 MiB as float32
TARGET_NUM_PROGRAMS = 256  # programs that fill a GPU
MIN_SPLIT_COLUMNS = 256  # columns
MAX_SPLITS = 16
MIN_CHOSEN_EXPERTS = 4  # of a row, in most models: their programs run at once
ROW_SCALED_FORMATS = ("int8", "fp8")
GROUP_SCALED_FORMATS = ("int4", "q8_0")


@dataclass(frozen=True, slots=True)
class PackedWeight:
    format: str
    data: Tensor  # [panels, blocks, ...] as in the table above
    scales: Tensor | None  # [panels, blocks, ...], or float32 [panels * 64] for each row
    bias: Tensor | None  # float32 [N]
    rows: int  # N
    columns: int  # K
    blocks: int  # along K
    splits: int  # of the sum over K


def columns_per_block(weight_format: str) -> int:
    return 128 if weight_format in ("int8", "fp8", "int4") else 64


def num_splits(rows: int, columns: int, weight_format: str) -> int:
    """Splits of the sum over K. Quantized values have fewer bytes, so loads need more programs in flight."""
    programs = TARGET_NUM_PROGRAMS if weight_format == "dense" else 2 * TARGET_NUM_PROGRAMS
    panels = -(-rows // PANEL_ROWS)
    return max(1, min(-(-programs // panels), columns // MIN_SPLIT_COLUMNS, MAX_SPLITS))


def pack(parts: Sequence[Matrix], weight_format: str, bias: Tensor | None) -> PackedWeight:
    """See Ops.pack_linear.

    q4_0 (as int4) and q8_0 blocks keep their format. Other blocks and mixed parts become dense values of
    weight_format, or bfloat16 if that is quantized. Temporary memory is a few slices of rows.
    """
    packed_format = _pick_format(parts, weight_format)
    rows = sum(_num_rows(part) for part in parts)
    columns = {part.columns if isinstance(part, QuantizedBlocks) else part.shape[1] for part in parts}.pop()
    quantized = weight_format in (*ROW_SCALED_FORMATS, *GROUP_SCALED_FORMATS)
    dtype = torch.bfloat16 if quantized else getattr(torch, weight_format)
    height = max(MAX_SLICE_VALUES // columns // PANEL_ROWS, 1) * PANEL_ROWS
    packed: tuple[Tensor, ...] = ()
    for first in range(0, rows, height):
        panels = _pack_slice(_slice(parts, first, first + height), packed_format, dtype)
        packed = packed or tuple(part.new_empty(-(-rows // PANEL_ROWS), *part.shape[1:]) for part in panels)
        for target, part in zip(packed, panels, strict=True):
            target[first // PANEL_ROWS :][: len(part)] = part
    data, scales = packed if len(packed) == 2 else (packed[0], None)
    if scales is not None and packed_format in ROW_SCALED_FORMATS:
        scales = scales.flatten()
    float_bias = None if bias is None else bias.to(torch.float32)
    splits = num_splits(rows, columns, packed_format)
    return PackedWeight(packed_format, data, scales, float_bias, rows, columns, data.shape[1], splits)


def stack(experts: Sequence[PackedWeight]) -> PackedWeight:
    """Weights of the same shape, one after the other; rows and splits are those of one of them.

    Raises CheckpointError if their formats differ.
    """
    first = experts[0]
    if any(expert.format != first.format for expert in experts):
        formats = sorted({expert.format for expert in experts})
        raise CheckpointError(f"experts of one layer have several formats: {', '.join(formats)}")
    padding = -first.rows % PANEL_ROWS
    scales = [expert.scales for expert in experts if expert.scales is not None]
    biases = [F.pad(expert.bias, (0, padding)) for expert in experts if expert.bias is not None]
    return replace(
        first,
        data=torch.cat([expert.data for expert in experts]),
        scales=torch.cat(scales) if scales else None,
        bias=torch.cat(biases) if biases else None,
        splits=num_splits(MIN_CHOSEN_EXPERTS * first.rows, first.columns, first.format),
    )


def _slice(parts: Sequence[Matrix], first: int, last: int) -> list[Matrix]:
    """Rows first to last of the stacked parts."""
    pieces: list[Matrix] = []
    for part in parts:
        rows = slice(max(first, 0), max(last, 0))
        if rows.start < min(rows.stop, _num_rows(part)):
            pieces.append(
                QuantizedBlocks(part.format, part.data[rows], part.columns)
                if isinstance(part, QuantizedBlocks)
                else part[rows]
            )
        first, last = first - _num_rows(part), last - _num_rows(part)
    return pieces


def _pack_slice(parts: Sequence[Matrix], weight_format: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Panels of all parts, and their scales unless dense, [panels, ...] each."""
    if weight_format == "dense":
        matrices = (dequantize(part) if isinstance(part, QuantizedBlocks) else part for part in parts)
        return (_to_panels(torch.cat([matrix.to(dtype) for matrix in matrices]), PANEL_ROWS),)
    quantized = [
        split_blocks(part) if isinstance(part, QuantizedBlocks) else quantize(part, weight_format)
        for part in parts
    ]
    quants = torch.cat([part.quants for part in quantized]).flatten(1)
    scales = torch.cat([part.scales for part in quantized])
    pack_format = _pack_row_scaled if weight_format in ROW_SCALED_FORMATS else _pack_group_scaled
    return pack_format(quants, scales, weight_format)


def _num_rows(part: Matrix) -> int:
    return part.data.shape[0] if isinstance(part, QuantizedBlocks) else part.shape[0]


def _pick_format(parts: Sequence[Matrix], weight_format: str) -> str:
    stored = {part.format if isinstance(part, QuantizedBlocks) else "" for part in parts}
    if stored == {""}:
        return weight_format if weight_format in (*ROW_SCALED_FORMATS, "int4") else "dense"
    return {"q4_0": "int4", "q8_0": "q8_0"}.get(stored.pop(), "dense") if len(stored) == 1 else "dense"


def _to_panels(matrix: Tensor, width: int) -> Tensor:
    """[N, K] -> [panels, blocks, 64, width]"""
    rows, columns = matrix.shape
    if columns % width or rows % PANEL_ROWS:
        matrix = F.pad(matrix, (0, -columns % width, 0, -rows % PANEL_ROWS))
    return matrix.reshape(-1, PANEL_ROWS, matrix.shape[1] // width, width).transpose(1, 2).contiguous()


def _pack_row_scaled(quants: Tensor, scales: Tensor, weight_format: str) -> tuple[Tensor, Tensor]:
    """quants float32 [N, K], scales [N, 1] -> [panels, ...] and [panels, 64]"""
    values = quants.to(torch.int8 if weight_format == "int8" else torch.float8_e4m3fn).view(torch.int8)
    padded_scales = F.pad(scales[:, 0], (0, -len(scales) % PANEL_ROWS))
    panels = _to_panels(values, columns_per_block(weight_format))
    return _pack_words(panels, 2), padded_scales.view(-1, PANEL_ROWS)


def _pack_group_scaled(quants: Tensor, scales: Tensor, weight_format: str) -> tuple[Tensor, Tensor]:
    """quants float32 [N, K], scales [N, K / 32]"""
    values = 4 if weight_format == "int4" else 2
    panels = _to_panels(quants.to(torch.int8), columns_per_block(weight_format))
    data = _pack_words(panels + 8 if weight_format == "int4" else panels, values)
    pairs = _to_panels(scales.to(torch.float16), values).view(torch.int32)  # [panels, blocks, 64, values / 2]
    return data, pairs.transpose(2, 3).contiguous()


def _pack_words(panels: Tensor, values_per_word: int) -> Tensor:
    """int8 [..., BK] -> int16 [..., BK / values]: runs of BK / values columns, lowest bits first."""
    bits = 16 // values_per_word
    runs = panels.unflatten(-1, (values_per_word, -1))
    words = torch.zeros_like(runs[..., 0, :], dtype=torch.int16)
    for j in range(values_per_word):
        words |= (runs[..., j, :].to(torch.int16) & (1 << bits) - 1) << bits * j
    return words


NAN_BITS = tl.constexpr(0x7F)
MIN_NORMAL_BITS = tl.constexpr(121 << 23)  # 2^-6 as float32
SUBNORMAL_BITS = tl.constexpr(141 << 23)  # 2^14 as float32: its unit in the last place is 2^-9


@triton.jit
def to_float8(x):
    """float32 with magnitudes up to 448 -> float8_e4m3fn bits as uint8, to nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    odd = (magnitude >> 20) & 1
    normal = (magnitude - (120 << 23) + 0x7FFFF + odd) >> 20
    subnormal = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - SUBNORMAL_BITS
    rounded = tl.where(magnitude < MIN_NORMAL_BITS, subnormal, normal)
    return (rounded | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_float8(x, dtype: tl.constexpr):
    """float8_e4m3fn bits as uint8 -> float16, bfloat16 or float32, exactly, on GPUs without the type too.

    Shift into place, then multiply by 2^(difference of exponent biases).
    """
    if dtype == tl.float16:
        wide = x.to(tl.int16)
        scaled = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        value = scaled * tl.full([], 256.0, tl.float16)
    else:
        wide = x.to(tl.int32)
        scaled = (((wide & 0x80) << 24) | ((wide & 0x7F) << 20)).to(tl.float32, bitcast=True)
        value = scaled * 1.329227995784916e36
    return tl.where((wide & 0x7F) == NAN_BITS, float("nan"), value).to(dtype)


@triton.constexpr_function
def values_per_word(weight_format: str) -> int:
    return {"dense": 1, "int4": 4}.get(weight_format, 2)


COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter has no PTX and no bfloat16


@triton.constexpr_function
def masked_shift_ptx(shift: int, mask: int) -> str:
    """PTX of _masked_shift() for the two words of a register: the mask cuts off bits of the other word."""
    move = f"shr.b32 $0, $1, {shift};" if shift >= 0 else f"shl.b32 $0, $1, {-shift};"
    return f"{move} lop3.b32 $0, $0, {(mask & 0xFFFF) * 0x10001:#010x}, $2, 0x6a;"


@triton.jit
def _masked_shift(words, flip, SHIFT: tl.constexpr, MASK: tl.constexpr):
    """((words >> SHIFT) & MASK) ^ flip of int16; a negative SHIFT moves to the left."""
    if COMPILED:
        # Without this, 16-bit words are shifted one by one: a third more instructions for int4.
        ptx: tl.constexpr = masked_shift_ptx(SHIFT, MASK)
        return tl.inline_asm_elementwise(ptx, "=&r,r,r", [words, flip], tl.int16, is_pure=True, pack=2)
    elif SHIFT >= 0:
        return ((words >> SHIFT) & MASK) ^ flip
    else:
        return ((words << -SHIFT) & MASK) ^ flip


@triton.jit
def unpack_word(words, j: tl.constexpr, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """The values at place j of each word in dtype, exactly; dense words are values already.

    16-bit types by magic numbers, as conversions of integers and of float8 are slow: bits that are put into
    the mantissa of 2^7 (bfloat16) or 2^10 (float16) add themselves to it. fp8 weights are never NaN.
    """
    if FORMAT == "dense":
        return words
    elif dtype == tl.float32:
        if FORMAT == "int4":
            return (((words >> 4 * j) & 15) - 8).to(tl.float32)
        elif FORMAT == "fp8":
            return from_float8(((words >> 8 * j) & 255).to(tl.uint8), tl.float32)
        else:
            return (words << 8 * (1 - j) >> 8).to(tl.float32)
    else:
        is_bfloat16: tl.constexpr = dtype == tl.bfloat16
        POWER: tl.constexpr = 128 if is_bfloat16 else 1024
        power = tl.full(words.shape, 0x4300 if is_bfloat16 else 0x6400, tl.int16)
        if FORMAT == "int4":
            value = _masked_shift(words, power, 4 * j, 15).to(dtype, bitcast=True)
            return (_computable(value) - (POWER + 8.0)).to(dtype)
        elif FORMAT == "fp8":
            # Exponent and mantissa as they are: the value times 2^(difference of exponent biases).
            LEFT: tl.constexpr = 4 if is_bfloat16 else 7
            sign = _masked_shift(words, tl.zeros_like(words), 8 * j - 8, -0x8000)
            value = _masked_shift(words, sign, 8 * j - LEFT, 0x7F << LEFT).to(dtype, bitcast=True)
            return (_computable(value) * (2.0**120 if is_bfloat16 else 2.0**8)).to(dtype)
        elif is_bfloat16:
            # The mantissa has place for seven bits of eight. The sign makes 2^8 of the 2^7 to be subtracted.
            low = _masked_shift(words, power, 8 * j, 0x7F).to(dtype, bitcast=True)
            high = _masked_shift(words, power, 8 * j, 0x80).to(dtype, bitcast=True)
            return (_computable(low) - _computable(high)).to(dtype)
        else:
            value = _masked_shift(words, power ^ 0x80, 8 * j, 0xFF).to(dtype, bitcast=True)
            return (_computable(value) - (POWER + 128.0)).to(dtype)


@triton.jit
def _computable(value):
    """The value in a type with arithmetic: the interpreter has none for bfloat16, and drops subnormals."""
    if COMPILED or value.dtype == tl.float16:
        return value
    else:
        return (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def fp16_from_bits(pair, j):
    """The float16 in the low (j = 0) or the high bits of int32, as float32."""
    return (pair >> 16 * j).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
