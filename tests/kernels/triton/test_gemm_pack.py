"""Packed weights unpack unchanged, by torch and by kernels; splits depend on a weight's shape alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from foreword.kernels.ops import Matrix
from foreword.kernels.quantization import dequantize, fake_quantize
from foreword.kernels.triton import gemm_pack as packing
from foreword.kernels.triton.gemm_pack import (
    PackedWeight,
    columns_per_block,
    masked_shift_ptx,
    num_splits,
    pack,
    unpack_word,
)
from tests.support.budget import examples
from tests.support.device import DEVICE
from tests.support.quantized_weights import (
    random_blocks,
    random_float8_blocks,
    random_grouped_ints,
    random_weight,
)

FP4_VALUES = (
    torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]).outer(torch.tensor([1.0, -1.0])).T.flatten()
)
KINDS = ("float32", "bfloat16", "float16", "int8", "fp8", "int4")


def unpacked(weight: PackedWeight) -> Tensor:
    """float32 [N, K] by the table in gemm_pack.py."""
    data, scales = weight.data, weight.scales
    values = columns_per_block(weight.format) // data.shape[-1]
    bits = 16 // values
    if values > 1:
        data = torch.stack([data.to(torch.int32) >> bits * j & (1 << bits) - 1 for j in range(values)], 3)
        if values == 2:
            is_float8 = weight.format in ("fp8", "fp8_blocks")
            data = data.to(torch.uint8).view(torch.float8_e4m3fn if is_float8 else torch.int8)
        if weight.format == "int4":
            data = data - 8
        elif weight.format == "mxfp4":
            data = FP4_VALUES[data]
    data = data.to(torch.float32)
    if scales is not None and scales.dtype == torch.int32:
        words = scales.transpose(2, 3).clone(
            memory_format=torch.contiguous_format
        )  # [panels, blocks, 64, words]
        if weight.format.startswith("grouped"):
            zeros = (words & 255) - (128 if values == 2 else 0)
            data = data - zeros.repeat_interleave(values // words.shape[3], 3)[..., None]
            words = words & ~255
        if weight.format == "mxfp4":
            exponents = words.view(torch.uint8).to(torch.float32)
            words = torch.exp2(exponents - 127).view(torch.int32)
        floats = words.view(torch.float16 if weight.format in ("int4", "q8_0") else torch.float32)
        data = data * floats.repeat_interleave(values // floats.shape[3], 3)[..., None].to(torch.float32)
    matrix = data.flatten(3).transpose(1, 2).flatten(2).flatten(0, 1)
    if weight.format in ("int8", "fp8"):
        matrix = matrix * weight.scales[:, None]
    return matrix[: weight.rows, : weight.columns]


@settings(max_examples=examples(40))
@given(
    st.sampled_from(KINDS),
    st.lists(st.integers(1, 150), min_size=1, max_size=3),
    st.integers(1, 400),
    st.integers(0, 99),
)
def test_packed_values_unpack_unchanged(kind: str, sizes: list[int], columns: int, seed: int) -> None:
    matrix = random_weight(sum(sizes), columns, seed)
    weight = pack(torch.split(matrix, sizes), kind, None)
    wanted = (
        matrix.to(getattr(torch, kind)).float()
        if hasattr(torch, kind) and "float" in kind
        else fake_quantize(matrix, kind)
    )
    assert torch.equal(unpacked(weight), wanted)
    assert (weight.rows, weight.columns, weight.blocks) == (
        *matrix.shape,
        -(-columns // columns_per_block(weight.format)),
    )


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("q8_0", "q8_0"),
        ("q4_0", "int4"),
        ("mxfp4", "mxfp4"),
        ("q5_0", "dense"),
        ("q4_k", "dense"),
        ("q6_k", "dense"),
    ],
)
def test_file_blocks_keep_supported_formats(kind: str, form: str) -> None:
    parts = [random_blocks(kind, rows, 512, rows) for rows in (40, 30)]
    weight = pack(parts, "float32", None)
    assert weight.format == form
    assert torch.equal(unpacked(weight), torch.cat([dequantize(part) for part in parts]))


@settings(max_examples=examples(40))
@given(
    bits=st.sampled_from([4, 8]),
    sizes=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    groups=st.sampled_from([(32, 3), (32, 8), (64, 3), (128, 3), (256, 2), (512, 1), (96, 1), (384, 2)]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
)
def test_grouped_ints_keep_their_values(
    bits: int, sizes: list[int], groups: tuple[int, int], dtype: torch.dtype
) -> None:
    size, count = groups
    parts = [random_grouped_ints(bits, rows, size * count, size, rows, dtype=dtype) for rows in sizes]
    weight = pack(parts, "bfloat16", None)
    most = 128 if bits == 4 else 64
    width = most if count == 1 else next(width for width in (most, 64, 32) if size % width == 0)
    assert weight.format == f"grouped{bits}_{width}" and weight.scales is not None
    assert torch.equal(unpacked(weight), torch.cat([dequantize(part) for part in parts]))


def test_symmetric_rows_of_bytes_are_int8() -> None:
    """Whatever their scales: they are applied to the sum."""
    matrix = random_grouped_ints(8, 70, 96, 96, dtype=torch.float32)
    weight = pack([replace(matrix, zeros=torch.full_like(matrix.zeros, 128))], "bfloat16", None)
    assert weight.format == "int8"
    assert torch.equal(
        unpacked(weight), dequantize(replace(matrix, zeros=torch.full_like(matrix.zeros, 128)))
    )


@pytest.mark.parametrize(
    ("shape", "columns", "form"),
    [
        ((128, 128), 384, "fp8_blocks"),
        ((128, 128), 300, "fp8_blocks"),
        ((100, 256), 600, "fp8_blocks"),
        ((1, 300), 300, "fp8"),
        ((200, 300), 300, "fp8"),
        ((64, 64), 300, "dense"),
    ],
)
def test_float8_blocks_keep_their_values(shape: tuple[int, int], columns: int, form: str) -> None:
    """Parts of 150 and 70 rows, whose blocks belong to neighbouring panels."""
    parts = [random_float8_blocks(rows, columns, shape, rows) for rows in (150, 70)]
    weight = pack(parts, "float32", None)
    assert weight.format == form
    assert torch.equal(unpacked(weight), torch.cat([dequantize(part) for part in parts]))


def test_columns_keep_their_order() -> None:
    """Inputs are gathered; parts in different orders become dense."""
    orders = [torch.randperm(256, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    parts = [random_grouped_ints(4, 64, 256, 128, seed) for seed in (0, 1)]
    ordered = [replace(part, input_order=orders[0]) for part in parts]
    weight = pack(ordered, "bfloat16", None)
    assert weight.format == "grouped4_128" and torch.equal(weight.input_order, orders[0])
    expected = torch.cat([dequantize(part) for part in ordered])
    assert torch.equal(unpacked(weight), expected[:, orders[0]])
    for other in (replace(parts[1], input_order=orders[1]), parts[1]):
        mixed = pack([ordered[0], other], "float32", None)
        assert mixed.format == "dense" and mixed.input_order is None
        assert torch.equal(unpacked(mixed), torch.cat([dequantize(ordered[0]), dequantize(other)]))


def test_matrices_without_a_kernel_become_dense() -> None:
    """Scales of 24 bits, groups of 16 values, two widths, NaN."""
    scales = random_grouped_ints(4, 8, 256, 128, dtype=torch.float32)
    small = random_grouped_ints(4, 8, 256, 16)
    mixed = [random_grouped_ints(4, 8, 256, size) for size in (32, 64)]
    for parts in ([scales], [small], mixed):
        weight = pack(parts, "float32", None)
        assert weight.format == "dense"
        assert torch.equal(unpacked(weight), torch.cat([dequantize(part) for part in parts]))
    broken = random_float8_blocks(8, 256, (8, 128))
    broken.values.view(torch.uint8)[3, 200] = 0xFF
    assert unpacked(pack([broken], "float32", None)).isnan().nonzero().tolist() == [[3, 200]]


def packed_in_slices(parts: Sequence[Matrix], kind: str, values: int) -> PackedWeight:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "MAX_SLICE_VALUES", values)
        return pack(parts, kind, None)


@settings(max_examples=examples(40))
@given(
    st.sampled_from((*KINDS, "q8_0", "q4_0", "mxfp4", "q6_k", "mixed", "ints", "float8")),
    st.lists(st.integers(1, 150), min_size=1, max_size=3),
    st.integers(1, 300),
    st.integers(1, 3),
)
def test_slices_change_no_byte(kind: str, sizes: list[int], columns: int, panels: int) -> None:
    """Slices of two panels, or all rows at once."""
    if kind in KINDS:
        parts: list[Matrix] = [random_weight(size, columns, size) for size in sizes]
    elif kind == "ints":
        parts = [random_grouped_ints(4, size, 256, 128, size) for size in sizes]
    elif kind == "float8":
        parts = [random_float8_blocks(size, columns, (48, 128), size) for size in sizes]
    else:
        columns = 256
        parts = [random_blocks("q5_0" if kind == "mixed" else kind, size, columns, size) for size in sizes]
        parts += [random_weight(70, columns)] if kind == "mixed" else []
    stored = kind if kind in KINDS else "bfloat16"
    whole = packed_in_slices(parts, stored, 1 << 40)
    sliced = packed_in_slices(parts, stored, panels * 64 * columns)
    assert torch.equal(sliced.data.view(torch.uint8), whole.data.view(torch.uint8))
    assert (sliced.scales is None) == (whole.scales is None)
    if whole.scales is not None and sliced.scales is not None:
        assert sliced.scales.shape == whole.scales.shape
        assert torch.equal(sliced.scales.view(torch.int32), whole.scales.view(torch.int32))


class Largest(TorchFunctionMode):
    """Track the bytes of the largest tensor created, except by `new_empty`."""

    bytes = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            one.untyped_storage().data_ptr() for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)
        }
        if func is not Tensor.new_empty:
            for one in tree_leaves(result):
                if isinstance(one, Tensor) and one.untyped_storage().data_ptr() not in given:
                    self.bytes = max(self.bytes, one.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("kind", [*KINDS, "q8_0", "q4_0", "q4_k"])
def test_temporary_memory_is_one_slice(kind: str) -> None:
    parts: list[Matrix] = [
        random_weight(1500, 256).half() if kind in KINDS else random_blocks(kind, rows, 256)
        for rows in (1500, 600)
    ]
    with Largest() as largest:
        packed_in_slices(parts, kind if kind in KINDS else "bfloat16", 128 * 256)
    assert 0 < largest.bytes <= 128 * 256 * 4


def test_mixed_parts_become_dense() -> None:
    parts = [random_blocks("q8_0", 8, 256), random_weight(8, 256)]
    assert pack(parts, "float32", None).format == "dense"
    assert pack(parts, "int8", None).data.dtype == torch.bfloat16
    assert (
        pack([random_blocks("q8_0", 8, 256), random_blocks("q4_0", 8, 256)], "float16", None).data.dtype
        == torch.float16
    )


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_non_finite_rows_stay_non_finite(kind: str) -> None:
    matrix = random_weight(3, 64)
    matrix[1, 5] = torch.inf
    values = unpacked(pack([matrix], kind, None))
    assert values[1].isnan().any() and torch.equal(values[[0, 2]], fake_quantize(matrix, kind)[[0, 2]])


# q-k-v, output, gate-up, down, head
@pytest.mark.parametrize(
    ("shapes", "splits"),
    [
        (((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)), (3, 4, 1, 4, 1)),
        (((1152, 896), (896, 896), (9728, 896), (896, 4864), (151936, 896)), (3, 3, 2, 16, 1)),
    ],
)
def test_splits_of_known_models(shapes: tuple[tuple[int, int], ...], splits: tuple[int, ...]) -> None:
    assert tuple(num_splits(*shape, "dense") for shape in shapes) == splits


@given(
    st.integers(1, 1 << 18),
    st.integers(1, 1 << 16),
    st.sampled_from(("dense", "int8", "fp8", "int4", "q8_0")),
)
def test_every_split_has_blocks(rows: int, columns: int, form: str) -> None:
    splits = num_splits(rows, columns, form)
    blocks = -(-columns // columns_per_block(form))
    assert 1 <= splits <= 16 and (splits == 1 or blocks // splits >= 256 // columns_per_block(form))


EVERY_WORD = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)


@triton.jit
def _unpack_kernel(words, out, FORMAT: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for j in tl.static_range(VALUES):
        value = unpack_word(tl.load(words + place), j, FORMAT, out.dtype.element_ty)
        tl.store(out + place * VALUES + j, value)


def expected_values(form: str) -> Tensor:
    """float32 [65536, values of a word]"""
    if form == "int4":
        return torch.stack([(EVERY_WORD.int() >> 4 * j & 15) - 8 for j in range(4)], 1).float()
    if form == "mxfp4":
        return FP4_VALUES[torch.stack([EVERY_WORD.int() >> 4 * j & 15 for j in range(4)], 1)]
    codes = EVERY_WORD.view(torch.int8).view(-1, 2)
    return codes.view(torch.float8_e4m3fn).float() if form == "fp8" else codes.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["int4", "int8", "fp8", "mxfp4"])
def test_every_word_unpacks_exactly(form: str, dtype: torch.dtype) -> None:
    wanted = expected_values(form).to(DEVICE)
    values = torch.empty_like(wanted, dtype=dtype)
    _unpack_kernel[(16,)](EVERY_WORD.to(DEVICE), values, FORMAT=form, VALUES=values.shape[1], BLOCK=1 << 12)
    is_number = ~wanted.isnan()
    assert (~is_number).sum() == (4 * 256 if form == "fp8" else 0)  # two codes in either byte
    assert torch.equal(values.float()[is_number], wanted[is_number])


@triton.jit
def _unpack_difference_kernel(
    words, zeros, out, FORMAT: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for j in tl.static_range(VALUES):
        value = unpack_word(tl.load(words + place), j, FORMAT, out.dtype.element_ty, tl.load(zeros + place))
        tl.store(out + place * VALUES + j, value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [4, 8])
def test_differences_from_every_zero_are_exact(bits: int, dtype: torch.dtype) -> None:
    """Words shuffled against zeros."""
    per_word, order = 16 // bits, torch.randperm(1 << 16, generator=torch.Generator().manual_seed(bits))
    words = EVERY_WORD[order]
    zeros = torch.arange(1 << 16, dtype=torch.int32) % (1 << bits)
    codes = torch.stack([words.int() >> bits * j & (1 << bits) - 1 for j in range(per_word)], 1)
    codes = codes ^ 128 if bits == 8 else codes
    values = torch.empty(1 << 16, per_word, dtype=dtype, device=DEVICE)
    form = f"grouped{bits}_32"
    operands = words.to(DEVICE), zeros.to(DEVICE), values
    _unpack_difference_kernel[(16,)](*operands, FORMAT=form, VALUES=per_word, BLOCK=1 << 12)
    assert torch.equal(values.float().cpu(), (codes - zeros[:, None]).float())


def test_quantized_weights_have_no_nan_code() -> None:
    """unpack_word() gives 480 for it."""
    matrix = random_weight(3, 70)
    matrix[0, 1], matrix[1, 2], matrix[2, 3] = torch.nan, torch.inf, 3e38
    codes = pack([matrix], "fp8", None).data.view(torch.int8) & 0x7F
    assert codes.max() < 0x7F


def run_ptx(ptx: str, words: Tensor, flip: Tensor) -> Tensor:
    """int32 registers: "shr.b32", "shl.b32" and the "lop3.b32" that is (a & b) ^ c."""
    registers = {"$1": words, "$2": flip}
    for instruction in filter(None, ptx.replace(" ", "").split(";")):
        name, operands = re.fullmatch(r"(\w+\.b32)(.*)", instruction).groups()  # type: ignore[union-attr]
        target, first, second, *rest = operands.split(",")
        value = registers[first]
        if name == "lop3.b32":
            assert rest[1] == "0x6a"
            registers[target] = value & int(second, 16) ^ registers[rest[0]]
        else:
            shift = int(second)
            assert name in ("shr.b32", "shl.b32") and shift >= 0
            registers[target] = value >> shift if name == "shr.b32" else value << shift & 0xFFFFFFFF
    return registers["$0"]


@pytest.mark.parametrize("flip", [0x4300, 0x6480, -0x8000])
@pytest.mark.parametrize(
    ("shift", "mask"),
    [(0, 15), (4, 15), (8, 15), (12, 15), (8, 0x7F), (0, 0x80), (-8, -0x8000), (-4, 0x7F0), (1, 0x3F80)],
)
def test_ptx_shifts_both_words_of_a_register(shift: int, mask: int, flip: int) -> None:
    low = EVERY_WORD.long() & 0xFFFF
    high = low.flip(0) * 40503 & 0xFFFF
    flips = torch.full_like(low, (flip & 0xFFFF) * 0x10001)
    result = run_ptx(masked_shift_ptx(shift, mask), low | high << 16, flips)
    for words, mine in ((low, result & 0xFFFF), (high, result >> 16)):
        moved = words >> shift if shift >= 0 else words << -shift
        assert torch.equal(mine, (moved & mask & 0xFFFF) ^ (flip & 0xFFFF))
