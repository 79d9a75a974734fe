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
| mxfp4 | as int4, of E2M1 values | int32 [1, 64]: four exponents |
| fp8_blocks | as fp8 | int32 [1, 64]: a float32 |
| grouped4_G | as int4, of values from 0 to 15 | int32 [128 / G, 64]: float32 scale and zero |
| grouped8_G | as q8_0, of values - 128 | int32 [64 / G, 64]: the same |

fp8 is float8_e4m3fn; q8_0, int4 and mxfp4 have a scale for each 32 columns. fp8_blocks has one for each block
and row: those of a checkpoint belong to several of them. grouped4 and grouped8 are GroupedInts with groups of
G columns at most: 32, 64 or a block. Their zeros are in the eight lowest bits of the scales, which are 0 in
scales that were float16 or bfloat16; matrices with other scales become dense.

Words are as wide as the tensor core operands, so one shared memory layout serves both: with bytes, the
compiler copies 8 bytes at a time on Hopper, with words 16. Scales come in words because loads below 4 bytes
are not pipelined.
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
from foreword.kernels.ops import Float8Blocks, GroupedInts, Matrix, QuantizedBlocks
from foreword.kernels.quantization import dequantize, matrix_shape, quantize, slice_rows, split_blocks

PANEL_ROWS = 64
MAX_SLICE_VALUES = 1 << 23  # values packed at a time, 32 MiB as float32
TARGET_NUM_PROGRAMS = 256  # programs that fill a GPU
MIN_SPLIT_COLUMNS = 256  # columns
MAX_SPLITS = 16
MIN_CHOSEN_EXPERTS = 4  # a row's choice in most models: their programs run at once
ROW_SCALED_FORMATS = ("int8", "fp8")
GROUPED_INT_FORMATS = ("grouped4_128", "grouped4_64", "grouped4_32", "grouped8_64", "grouped8_32")
GROUP_SCALED_FORMATS = ("int4", "q8_0", "mxfp4", "fp8_blocks", *GROUPED_INT_FORMATS)
ZERO_BITS = tl.constexpr(255)  # bits of a scale's float32 that hold the zero


@dataclass(frozen=True, slots=True)
class PackedWeight:
    format: str
    data: Tensor  # [panels, blocks, ...] as in the table above
    scales: Tensor | None  # [panels, blocks, ...], or float32 [panels * 64] for each row
    bias: Tensor | None  # float32 [N]
    rows: int  # N
    columns: int  # K
    blocks: int  # along K
    splits: int  # parts of the sum over K
    input_order: Tensor | None = None  # int64 [K]: the input of each column

    def first_rows(self, count: int) -> PackedWeight:
        """See Ops.first_rows."""
        assert 0 < count <= self.rows
        panels, scales = -(-count // PANEL_ROWS), self.scales
        if scales is not None:
            scales = scales[: panels * (PANEL_ROWS if self.format in ROW_SCALED_FORMATS else 1)]
        bias = None if self.bias is None else self.bias[:count]
        return replace(self, data=self.data[:panels], scales=scales, bias=bias, rows=count)


@triton.constexpr_function
def columns_per_block(weight_format: str) -> int:
    return 64 if weight_format in ("dense", "q8_0", "grouped8_64", "grouped8_32") else 128


def num_splits(rows: int, columns: int, weight_format: str) -> int:
    """Splits of the sum over K. Quantized values have fewer bytes, so loads need more programs in flight."""
    programs = TARGET_NUM_PROGRAMS if weight_format == "dense" else 2 * TARGET_NUM_PROGRAMS
    panels = -(-rows // PANEL_ROWS)
    return max(1, min(-(-programs // panels), columns // MIN_SPLIT_COLUMNS, MAX_SPLITS))


def pack(parts: Sequence[Matrix], weight_format: str, bias: Tensor | None) -> PackedWeight:
    """See Ops.pack_linear.

    Matrices in the formats above keep their values, with q4_0 as int4. Others and mixed parts become dense
    values of weight_format, or bfloat16 if that is quantized. Temporary memory is a few slices of rows.
    """
    packed_format = _pick_format(parts, weight_format)
    heights, widths = zip(*map(matrix_shape, parts), strict=True)
    rows, columns = sum(heights), widths[0]
    quantized = weight_format in (*ROW_SCALED_FORMATS, "int4")
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
    order = None if packed_format == "dense" else _get_input_order(parts[0])
    return PackedWeight(packed_format, data, scales, float_bias, rows, columns, data.shape[1], splits, order)


def stack(experts: Sequence[PackedWeight]) -> PackedWeight:
    """Weights of the same shape, one after the other; rows and splits are those of one of them.

    Raises CheckpointError if their formats differ, or if they need columns of inputs in another order.
    """
    first = experts[0]
    if any(expert.input_order is not None for expert in experts):
        raise CheckpointError("the GPU has no kernel for experts in GPTQ with desc_act")
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
        rows, (height, _) = slice(max(first, 0), max(last, 0)), matrix_shape(part)
        if rows.start < min(rows.stop, height):
            pieces.append(slice_rows(part, rows))
        first, last = first - height, last - height
    return pieces


def _get_input_order(part: Matrix) -> Tensor | None:
    return part.input_order if isinstance(part, (GroupedInts, QuantizedBlocks)) else None


def _pick_format(parts: Sequence[Matrix], weight_format: str) -> str:
    formats = {_format_of(part, weight_format) for part in parts}
    first, *others = (_get_input_order(part) for part in parts)
    same_order = all(
        (order is None) == (first is None) and (order is None or first is None or torch.equal(order, first))
        for order in others
    )
    return formats.pop() if len(formats) == 1 and same_order else "dense"


def _format_of(part: Matrix, weight_format: str) -> str:
    if isinstance(part, Tensor):
        return weight_format if weight_format in (*ROW_SCALED_FORMATS, "int4") else "dense"
    if isinstance(part, QuantizedBlocks):
        return {"q4_0": "int4", "q8_0": "q8_0", "mxfp4": "mxfp4"}.get(part.format, "dense")
    if isinstance(part, Float8Blocks):
        return _format_of_float8(part)
    return _format_of_ints(part)


def _format_of_float8(part: Float8Blocks) -> str:
    """unpack_word() knows no NaN."""
    if part.block_shape[1] >= part.columns:
        name = "fp8"
    elif part.block_shape[1] % columns_per_block("fp8_blocks") == 0:
        name = "fp8_blocks"
    else:
        return "dense"
    return "dense" if bool((part.values.view(torch.uint8) & 0x7F == 0x7F).any()) else name


def _format_of_ints(part: GroupedInts) -> str:
    size, block = part.group_size, columns_per_block(f"grouped{part.bits}_64")
    if part.bits == 8 and size == part.columns and bool((part.zeros == 128).all()):
        return "int8"
    if bool((part.scales.view(torch.int32) & ZERO_BITS.value).any()):
        return "dense"
    widths = (block,) if size == part.columns else (width for width in (block, 64, 32) if size % width == 0)
    width = next(iter(widths), None)
    return "dense" if width is None else f"grouped{part.bits}_{width}"


def _pack_slice(parts: Sequence[Matrix], weight_format: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Panels of all parts, and their scales unless dense, [panels, ...] each."""
    width = columns_per_block(weight_format)
    if weight_format == "dense":
        matrices = (part if isinstance(part, Tensor) else dequantize(part) for part in parts)
        return (_to_panels(torch.cat([matrix.to(dtype) for matrix in matrices]), width),)
    encoded = [_encode(part, weight_format) for part in parts]
    codes, scales = (torch.cat(each) for each in zip(*encoded, strict=True))
    data = _pack_words(_to_panels(codes, width), values_per_word(weight_format))
    if weight_format in ROW_SCALED_FORMATS:
        return data, F.pad(scales[:, 0], (0, -len(scales) % PANEL_ROWS)).view(-1, PANEL_ROWS)
    words = _to_panels(scales, scale_words(weight_format))  # [panels, blocks, 64, words]
    return data, words.transpose(2, 3).contiguous()


def _encode(part: Matrix, weight_format: str) -> tuple[Tensor, Tensor]:
    """Codes int8 [N, K] and scales: float32 [N, 1] of rows, or int32 [N, words of all blocks]."""
    if isinstance(part, GroupedInts):
        return _encode_ints(part, weight_format)
    if isinstance(part, Float8Blocks):
        return _encode_float8(part, weight_format)
    if isinstance(part, QuantizedBlocks) and weight_format == "mxfp4":
        return _encode_mxfp4(part)
    quantized = split_blocks(part) if isinstance(part, QuantizedBlocks) else quantize(part, weight_format)
    codes = quantized.quants.flatten(1)
    if weight_format == "fp8":
        return codes.to(torch.float8_e4m3fn).view(torch.int8), quantized.scales
    if weight_format == "int8":
        return codes.to(torch.int8), quantized.scales
    halves = quantized.scales.to(torch.float16)
    words = F.pad(halves, (0, -halves.shape[1] % (2 * scale_words(weight_format)))).view(torch.int32)
    return (codes + 8 if weight_format == "int4" else codes).to(torch.int8), words


def _encode_ints(part: GroupedInts, weight_format: str) -> tuple[Tensor, Tensor]:
    flipped = part.values ^ 128
    if weight_format == "int8":
        return flipped.view(torch.int8), part.scales
    codes = torch.stack((part.values & 15, part.values >> 4), 2).flatten(1) if part.bits == 4 else flipped
    words = part.scales.view(torch.int32) | part.zeros.to(torch.int32)
    width = int(weight_format.split("_")[1])
    return codes.view(torch.int8), _spread(words, part.group_size, width, part.columns)


def _encode_mxfp4(part: QuantizedBlocks) -> tuple[Tensor, Tensor]:
    """A block is its exponent and 16 bytes, whose low nibbles come first."""
    blocks = part.data.view(len(part.data), -1, 17)
    codes = torch.cat((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), 2)
    exponents = F.pad(blocks[..., 0], (0, -blocks.shape[1] % 4))
    return codes.flatten(1).view(torch.int8), exponents.contiguous().view(torch.int32)


def _encode_float8(part: Float8Blocks, weight_format: str) -> tuple[Tensor, Tensor]:
    height, width = part.block_shape
    scales = part.scales.repeat_interleave(height, 0)[: len(part.values)]
    if weight_format == "fp8_blocks":
        scales = _spread(scales, width, columns_per_block(weight_format), part.columns).view(torch.int32)
    return part.values.view(torch.int8), scales


def _spread(scales: Tensor, group_size: int, width: int, columns: int) -> Tensor:
    """Scales of groups [N, columns / group_size] -> of each `width` columns."""
    starts = torch.arange(0, columns, width, device=scales.device)
    return scales.index_select(1, starts // group_size)


def _to_panels(matrix: Tensor, width: int) -> Tensor:
    """[N, K] -> [panels, blocks, 64, width]"""
    rows, columns = matrix.shape
    if columns % width or rows % PANEL_ROWS:
        matrix = F.pad(matrix, (0, -columns % width, 0, -rows % PANEL_ROWS))
    return matrix.reshape(-1, PANEL_ROWS, matrix.shape[1] // width, width).transpose(1, 2).contiguous()


def _pack_words(panels: Tensor, values: int) -> Tensor:
    """int8 [..., BK] -> int16 [..., BK / values]: runs of BK / values columns, lowest bits first."""
    bits = 16 // values
    runs = panels.unflatten(-1, (values, -1))
    words = torch.zeros_like(runs[..., 0, :], dtype=torch.int16)
    for j in range(values):
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
    if weight_format.startswith(("int4", "mxfp4", "grouped4")):
        return 4
    return 1 if weight_format == "dense" else 2


@triton.constexpr_function
def scale_words(weight_format: str) -> int:
    """Words of scales of a row in a block; 0: none, or scales of rows."""
    if weight_format.startswith("grouped"):
        return columns_per_block(weight_format) // int(weight_format.split("_")[1])
    return {"int4": 2, "q8_0": 1, "mxfp4": 1, "fp8_blocks": 1}.get(weight_format, 0)


@triton.constexpr_function
def has_zeros(weight_format: str) -> bool:
    return weight_format.startswith("grouped")


@triton.constexpr_function
def runs_per_scale(weight_format: str) -> int:
    """Runs of columns, one of each place in a word, with one scale."""
    if weight_format.startswith("grouped"):
        return int(weight_format.split("_")[1]) // 32
    return 2 if weight_format == "fp8_blocks" else 1


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
def _unpack_mxfp4(words, j: tl.constexpr, dtype: tl.constexpr):
    """Bits of exponent and mantissa as they are, times 2^(difference of exponent biases)."""
    if dtype == tl.float32:
        code = (words >> 4 * j).to(tl.int32)
        return (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True) * 2.0**126
    else:
        PLACE: tl.constexpr = 6 if dtype == tl.bfloat16 else 9
        sign = _masked_shift(words, tl.zeros_like(words), 4 * j - 12, -0x8000)
        value = _masked_shift(words, sign, 4 * j - PLACE, 7 << PLACE).to(dtype, bitcast=True)
        return (_computable(value) * (2.0**126 if dtype == tl.bfloat16 else 2.0**14)).to(dtype)


@triton.jit
def _unpack_float32(words, j: tl.constexpr, NIBBLES: tl.constexpr, FLOAT8: tl.constexpr, zero):
    if NIBBLES:
        return (((words >> 4 * j) & 15) - (8 if zero is None else zero)).to(tl.float32)
    elif FLOAT8:
        return from_float8(((words >> 8 * j) & 255).to(tl.uint8), tl.float32)
    else:
        value = (words << 8 * (1 - j) >> 8).to(tl.float32)
        return value if zero is None else value - (zero - 128).to(tl.float32)


@triton.jit
def unpack_word(words, j: tl.constexpr, FORMAT: tl.constexpr, dtype: tl.constexpr, zero=None):
    """The values at place j of each word in dtype, exactly; dense words are values already.

    16-bit types by magic numbers, as conversions of integers and of float8 are slow: bits that are put into
    the mantissa of 2^7 (bfloat16) or 2^10 (float16) add themselves to it. fp8 weights are never NaN.
    zero: int32, subtracted from values and broadcast; differences have eight bits and a sign.
    """
    nibbles: tl.constexpr = values_per_word(FORMAT) == 4
    float8: tl.constexpr = FORMAT == "fp8" or FORMAT == "fp8_blocks"
    if FORMAT == "dense":
        return words
    elif FORMAT == "mxfp4":
        return _unpack_mxfp4(words, j, dtype)
    elif dtype == tl.float32:
        return _unpack_float32(words, j, nibbles, float8, zero)
    else:
        is_bfloat16: tl.constexpr = dtype == tl.bfloat16
        POWER: tl.constexpr = 128 if is_bfloat16 else 1024
        power = tl.full(words.shape, 0x4300 if is_bfloat16 else 0x6400, tl.int16)
        if nibbles:
            value = _computable(_masked_shift(words, power, 4 * j, 15).to(dtype, bitcast=True))
            if zero is None:
                return (value - (POWER + 8.0)).to(dtype)
            else:
                return (value - _add_power(zero, dtype)).to(dtype)
        elif float8:
            # Exponent and mantissa as they are: the value times 2^(difference of exponent biases).
            LEFT: tl.constexpr = 4 if is_bfloat16 else 7
            sign = _masked_shift(words, tl.zeros_like(words), 8 * j - 8, -0x8000)
            value = _masked_shift(words, sign, 8 * j - LEFT, 0x7F << LEFT).to(dtype, bitcast=True)
            return (_computable(value) * (2.0**120 if is_bfloat16 else 2.0**8)).to(dtype)
        elif is_bfloat16:
            # The mantissa has place for seven bits of eight. The sign makes 2^8 of the 2^7 to be subtracted.
            low = _masked_shift(words, power, 8 * j, 0x7F).to(dtype, bitcast=True)
            high = _masked_shift(words, power, 8 * j, 0x80).to(dtype, bitcast=True)
            value = _computable(low) - _computable(high)
            if zero is None:
                return value.to(dtype)
            else:
                low = _add_power(zero & 0x7F, dtype)
                high = _add_power((zero & 0x80) ^ 0x80, dtype)
                return (value - (low - high)).to(dtype)
        else:
            value = _computable(_masked_shift(words, power ^ 0x80, 8 * j, 0xFF).to(dtype, bitcast=True))
            if zero is None:
                return (value - (POWER + 128.0)).to(dtype)
            else:
                return (value - _add_power(zero, dtype)).to(dtype)


@triton.jit
def _add_power(zero, dtype: tl.constexpr):
    """int32 -> 128 + zero for zeros below 128 or at 128 in bfloat16, 1024 + zero in float16."""
    POWER: tl.constexpr = 0x4300 if dtype == tl.bfloat16 else 0x6400
    return _computable((zero | POWER).to(tl.int16).to(dtype, bitcast=True))


@triton.jit
def get_zero(words, j: tl.constexpr, FORMAT: tl.constexpr):
    """The zero of run j as int32, from the words of a block's scales; only if has_zeros()."""
    return words[j // runs_per_scale(FORMAT)] & ZERO_BITS


@triton.jit
def get_scale(words, j: tl.constexpr, FORMAT: tl.constexpr):
    """The float32 scale of run j, from the words of a block's scales."""
    if FORMAT == "int4" or FORMAT == "q8_0":
        return fp16_from_bits(words[j // 2], j % 2)
    elif FORMAT == "fp8_blocks":
        return words[0].to(tl.float32, bitcast=True)
    elif FORMAT == "mxfp4":
        # 2^(e - 127), which is subnormal for 0
        return tl.maximum(((words[0] >> 8 * j) & 255) << 23, 1 << 22).to(tl.float32, bitcast=True)
    else:
        return (words[j // runs_per_scale(FORMAT)] & ~ZERO_BITS).to(tl.float32, bitcast=True)


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
