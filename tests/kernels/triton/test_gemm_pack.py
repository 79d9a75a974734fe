"""Packed weights unpack unchanged, and splits depend on a weight's shape alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from foreword.kernels.ops import Matrix
from foreword.kernels.quantization import dequantize, fake_quantize
from foreword.kernels.triton import gemm_pack as packing
from foreword.kernels.triton.gemm_pack import PackedWeight, columns_per_block, num_splits, pack
from tests.support.budget import examples
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
