"""Packed weights unpack unchanged, by torch and by kernels; splits depend on a weight's shape alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
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
from tests.support.quantized_weights import random_blocks, random_weight

KINDS = ("float32", "bfloat16", "float16", "int8", "fp8", "int4")


def unpacked(weight: PackedWeight) -> Tensor:
    """float32 [N, K] by the table in gemm_pack.py."""
    data = weight.data
    values = columns_per_block(weight.format) // data.shape[-1]
    bits = 16 // values
    if values > 1:
        data = torch.stack([data.to(torch.int32) >> bits * j & (1 << bits) - 1 for j in range(values)], 3)
        if weight.format == "int4":
            data = data - 8
        else:
            data = data.to(torch.uint8).view(torch.float8_e4m3fn if weight.format == "fp8" else torch.int8)
    data = data.to(torch.float32)
    if weight.format in ("int4", "q8_0"):
        scales = (
            weight.scales.transpose(2, 3).clone(memory_format=torch.contiguous_format).view(torch.float16)
        )  # [panels, blocks, 64, values]
        data = data * scales[..., None].to(torch.float32)
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
    [("q8_0", "q8_0"), ("q4_0", "int4"), ("q5_0", "dense"), ("q4_k", "dense"), ("q6_k", "dense")],
)
def test_file_blocks_keep_supported_formats(kind: str, form: str) -> None:
    parts = [random_blocks(kind, rows, 512, rows) for rows in (40, 30)]
    weight = pack(parts, "float32", None)
    assert weight.format == form
    assert torch.equal(unpacked(weight), torch.cat([dequantize(part) for part in parts]))


def packed_in_slices(parts: Sequence[Matrix], kind: str, values: int) -> PackedWeight:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "MAX_SLICE_VALUES", values)
        return pack(parts, kind, None)


@settings(max_examples=examples(40))
@given(
    st.sampled_from((*KINDS, "q8_0", "q4_0", "q6_k", "mixed")),
    st.lists(st.integers(1, 150), min_size=1, max_size=3),
    st.integers(1, 300),
    st.integers(1, 3),
)
def test_slices_change_no_byte(kind: str, sizes: list[int], columns: int, panels: int) -> None:
    """Slices of two panels, or all rows at once."""
    if kind in KINDS:
        parts: list[Matrix] = [random_weight(size, columns, size) for size in sizes]
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
    codes = EVERY_WORD.view(torch.int8).view(-1, 2)
    return codes.view(torch.float8_e4m3fn).float() if form == "fp8" else codes.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["int4", "int8", "fp8"])
def test_every_word_unpacks_exactly(form: str, dtype: torch.dtype) -> None:
    wanted = expected_values(form).to(DEVICE)
    values = torch.empty_like(wanted, dtype=dtype)
    _unpack_kernel[(16,)](EVERY_WORD.to(DEVICE), values, FORMAT=form, VALUES=values.shape[1], BLOCK=1 << 12)
    is_number = ~wanted.isnan()
    assert (~is_number).sum() == (4 * 256 if form == "fp8" else 0)  # two codes in either byte
    assert torch.equal(values.float()[is_number], wanted[is_number])


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
