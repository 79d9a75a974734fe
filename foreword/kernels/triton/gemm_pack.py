"""How weights lie in memory, and in which order their products are summed: fixed at load from their shape alone.

A matrix [N, K] is cut into panels of 64 rows and blocks of 64 or 128 columns; the values of a panel and a block stand together,
so that a program reads one stretch of memory from its first block to its last. Zeros fill what is missing.

The sum over K has `splits` parts, each summed block after block, added one after the other: p0 + p1 + ... This is the order
for every number of rows. With few rows, reading weights is all there is to do, and each part has its own program: with fewer
than about two for each of 132 multiprocessors some of them wait, with more there are more partial sums to write and to read,
which hurts at 64 rows. A part has at least 256 columns, or there would be nothing to load ahead. So Llama 3.1 8B has 3, 4, 1
and 4 parts (q-k-v, output, gate-up, down), Qwen2.5 0.5B has 3, 3, 2 and 16. The card at hand does not enter.

| format | block of a panel | scales |
|---|---|---|
| dense | [64, 64] of the weight's type | none |
| int8, fp8 | int16 [64, 64]: low bytes columns 0 to 63, high bytes 64 to 127; fp8 is float8_e4m3fn | float32, one for each row |
| q8_0 | int16 [64, 32]: low bytes columns 0 to 31, high bytes 32 to 63 | int32 [1, 64]: two of float16, for 32 columns each |
| int4 | int16 [64, 32]: four values a word, the lowest column 0 to 31, each plus 8 | int32 [2, 64] likewise |

Words are as wide as what the tensor cores multiply, so that one layout of shared memory serves both: with single bytes the
compiler copies 8 bytes at a time on Hopper, with words 16. Scales come in pairs because nothing below 4 bytes is loaded ahead.

Values out of the words that weights are packed in; see packing.py.

float8_e4m3fn by arithmetic on bits: the same on every card, also where the hardware has no such type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from foreword.kernels.ops import Matrix, QuantizedBlocks
from foreword.kernels.quantization import QuantizedWeight, dequantize, quantize, split_blocks

__all__ = [
    "PANEL_ROWS",
    "PackedWeight",
    "columns_per_block",
    "fp16_from_bits",
    "from_float8",
    "num_splits",
    "pack",
    "to_float8",
    "unpack_word",
    "values_per_word",
]

PANEL_ROWS = 64
MAX_SLICE_VALUES = 1 << 23  # values that are packed at a time; some of them as float32 are 32 MiB
TARGET_NUM_PROGRAMS = 256  # programs that fill a card
MIN_SPLIT_COLUMNS = 256  # of a part
MAX_SPLITS = 16
ROW_SCALED_FORMATS = ("int8", "fp8")
GROUP_SCALED_FORMATS = ("int4", "q8_0")


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """data, scales  as the table above says: [panels, blocks, ...], or scales float32 [panels * 64] for each row
    bias          float32 [N] or None
    rows, columns N and K
    blocks        along K
    splits        parts of the sum over K
    """

    format: str
    data: Tensor
    scales: Tensor | None
    bias: Tensor | None
    rows: int
    columns: int
    blocks: int
    splits: int


def columns_per_block(weight_format: str) -> int:
    """Columns of a block."""
    return 128 if weight_format in ("int8", "fp8", "int4") else 64


def num_splits(rows: int, columns: int, weight_format: str) -> int:
    """Parts that the sum over K has. Quantized values are fewer bytes, so more programs keep enough of them on their way."""
    filled = TARGET_NUM_PROGRAMS if weight_format == "dense" else 2 * TARGET_NUM_PROGRAMS
    panels = -(-rows // PANEL_ROWS)
    return max(1, min(-(-filled // panels), columns // MIN_SPLIT_COLUMNS, MAX_SPLITS))


def pack(parts: Sequence[Matrix], weight_format: str, bias: Tensor | None) -> PackedWeight:
    """See Ops.pack_linear.

    Blocks of a file stay what they are where products can read them: q4_0 is what int4 is, q8_0 is a format. The others, and
    parts that differ, become values of the type that `kind` names, bfloat16 if it names none. Beside the parts and the result
    there is never more than some slices of rows.
    """
    form = _pick_format(parts, weight_format)
    rows = sum(_num_rows(part) for part in parts)
    columns = {part.columns if isinstance(part, QuantizedBlocks) else part.shape[1] for part in parts}.pop()
    dtype = (
        torch.bfloat16
        if weight_format in (*ROW_SCALED_FORMATS, *GROUP_SCALED_FORMATS)
        else getattr(torch, weight_format)
    )
    height = max(MAX_SLICE_VALUES // columns // PANEL_ROWS, 1) * PANEL_ROWS
    whole: tuple[Tensor, ...] = ()
    for first in range(0, rows, height):
        made = _pack_slice(_slice(parts, first, first + height), form, dtype)
        whole = whole or tuple(one.new_empty(-(-rows // PANEL_ROWS), *one.shape[1:]) for one in made)
        for held, one in zip(whole, made, strict=True):
            held[first // PANEL_ROWS :][: len(one)] = one
    data, *scales = whole
    wide = None if bias is None else bias.to(torch.float32)
    splits = num_splits(rows, columns, form)
    held_scales = None if not scales else scales[0].flatten() if form in ROW_SCALED_FORMATS else scales[0]
    return PackedWeight(form, data, held_scales, wide, rows, columns, data.shape[1], splits)


def _slice(parts: Sequence[Matrix], first: int, last: int) -> list[Matrix]:
    """Rows `first` to `last` of the parts one below the other."""
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
    """Panels of all parts together, and their scales unless they are dense, [panels, ...] each."""
    if weight_format == "dense":
        matrix = torch.cat(
            [(dequantize(part) if isinstance(part, QuantizedBlocks) else part).to(dtype) for part in parts]
        )
        return (_to_panels(matrix, PANEL_ROWS),)
    each = [_quantize_part(part, weight_format) for part in parts]
    steps, scales = (
        torch.cat([one.quants for one in each]).flatten(1),
        torch.cat([one.scales for one in each]),
    )
    return (
        _pack_row_scaled(steps, scales, weight_format)
        if weight_format in ROW_SCALED_FORMATS
        else _pack_group_scaled(steps, scales, weight_format)
    )


def _num_rows(part: Matrix) -> int:
    return part.data.shape[0] if isinstance(part, QuantizedBlocks) else part.shape[0]


def _pick_format(parts: Sequence[Matrix], weight_format: str) -> str:
    stored = {part.format if isinstance(part, QuantizedBlocks) else "" for part in parts}
    if stored == {""}:
        return weight_format if weight_format in (*ROW_SCALED_FORMATS, "int4") else "dense"
    return {"q4_0": "int4", "q8_0": "q8_0"}.get(stored.pop(), "dense") if len(stored) == 1 else "dense"


def _quantize_part(part: Matrix, weight_format: str) -> QuantizedWeight:
    return split_blocks(part) if isinstance(part, QuantizedBlocks) else quantize(part, weight_format)


def _to_panels(matrix: Tensor, width: int) -> Tensor:
    """[N, K] -> [panels, blocks, 64, width]"""
    rows, columns = matrix.shape
    padded = (
        F.pad(matrix, (0, -columns % width, 0, -rows % PANEL_ROWS))
        if columns % width or rows % PANEL_ROWS
        else matrix
    )
    return padded.reshape(-1, PANEL_ROWS, padded.shape[1] // width, width).transpose(1, 2).contiguous()


def _pack_row_scaled(quants: Tensor, scales: Tensor, weight_format: str) -> tuple[Tensor, Tensor]:
    """steps float32 [N, K], scales [N, 1] -> [panels, ...] and [panels, 64]"""
    values = (
        quants.to(torch.int8) if weight_format == "int8" else quants.to(torch.float8_e4m3fn).view(torch.int8)
    )
    return _pack_words(_to_panels(values, columns_per_block(weight_format)), 2), F.pad(
        scales[:, 0], (0, -len(scales) % PANEL_ROWS)
    ).view(-1, PANEL_ROWS)


def _pack_group_scaled(quants: Tensor, scales: Tensor, weight_format: str) -> tuple[Tensor, Tensor]:
    """steps float32 [N, K], scales [N, K / 32]"""
    values = 4 if weight_format == "int4" else 2
    panels = _to_panels(quants.to(torch.int8), columns_per_block(weight_format))
    data = _pack_words(panels + 8 if weight_format == "int4" else panels, values)
    pairs = _to_panels(scales.to(torch.float16), values).view(torch.int32)  # [panels, blocks, 64, values / 2]
    return data, pairs.transpose(2, 3).contiguous()


def _pack_words(panels: Tensor, values_per_word: int) -> Tensor:
    """int8 [..., BK] -> int16 [..., BK / values]: runs of BK / values columns, the first in the lowest bits."""
    bits = 16 // values_per_word
    runs = panels.unflatten(-1, (values_per_word, -1))
    words = torch.zeros_like(runs[..., 0, :], dtype=torch.int16)
    for j in range(values_per_word):
        words |= (runs[..., j, :].to(torch.int16) & (1 << bits) - 1) << bits * j
    return words


NAN_BITS = tl.constexpr(0x7F)
MIN_NORMAL_BITS = tl.constexpr(121 << 23)  # 2^-6 as float32
SUBNORMAL_BITS = tl.constexpr(
    141 << 23
)  # 2^14: the last place of its float32 is worth 2^-9, the smallest subnormal


@triton.jit
def to_float8(x):
    """float32, magnitudes of at most 448 -> the bits uint8, rounded to nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    odd = (magnitude >> 20) & 1
    normal = (magnitude - (120 << 23) + 0x7FFFF + odd) >> 20
    subnormal = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - SUBNORMAL_BITS
    rounded = tl.where(magnitude < MIN_NORMAL_BITS, subnormal, normal)
    return (rounded | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_float8(x, dtype: tl.constexpr):
    """The bits uint8 -> float16, bfloat16 or float32, exactly: shifted into place, then 2^(difference of the exponents' biases)
    times as large."""
    if dtype == tl.float16:
        wide = x.to(tl.int16)
        scaled = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        value = scaled * tl.full([], 256.0, tl.float16)
    else:
        wide = x.to(tl.int32)
        value = (((wide & 0x80) << 24) | ((wide & 0x7F) << 20)).to(
            tl.float32, bitcast=True
        ) * 1.329227995784916e36
    return tl.where((wide & 0x7F) == NAN_BITS, float("nan"), value).to(dtype)


@triton.constexpr_function
def values_per_word(weight_format: str) -> int:
    """How many values a word holds."""
    return {"dense": 1, "int4": 4}.get(weight_format, 2)


@triton.jit
def unpack_word(words, j, FORMAT: tl.constexpr, FLOAT8: tl.constexpr, DTYPE: tl.constexpr):
    """The values at place j of each word: as they are, int16, or of a type that holds float8 exactly."""
    if FORMAT == "dense":
        return words
    elif FORMAT == "int4":
        return ((words >> 4 * j) & 15) - 8
    elif FORMAT == "fp8":
        bits = ((words >> 8 * j) & 255).to(tl.uint8)
        return bits.to(tl.float8e4nv, bitcast=True) if FLOAT8 else from_float8(bits, DTYPE)
    else:
        return words << 8 * (1 - j) >> 8


@triton.jit
def fp16_from_bits(pair, j):
    """The float16 in the low (j = 0) or the high bits of int32, as float32."""
    return (pair >> 16 * j).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
