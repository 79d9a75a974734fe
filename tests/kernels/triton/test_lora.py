"""LoRA adapters on Triton against the reference; rows do not depend on their neighbours."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foreword.core.batch import Batch, Chunk, build_batch
from foreword.core.request import NO_LORA
from foreword.kernels.ops import LoraTable
from foreword.kernels.reference.backend import ReferenceOps
from foreword.kernels.triton.backend import TritonFastMath, TritonOps
from tests.support.budget import examples
from tests.support.cpu_kernels import same_bits
from tests.support.device import DEVICE
from tests.support.triton_compile import KernelSource, compile_all
from tests.support.triton_interpreter import exact_dot

pytestmark = pytest.mark.usefixtures("on_device")


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed)).to(dtype)


def make_table(
    ranks: Sequence[Sequence[int]],
    sizes: tuple[int, ...],
    columns: int,
    dtype: torch.dtype = torch.float32,
) -> LoraTable:
    """Adapters with ranks[slot][part]; what is not theirs is NaN."""
    most = max(max(each) for each in ranks)
    a = torch.full((len(ranks), len(sizes), most, columns), math.nan, dtype=dtype)
    b = torch.full((len(ranks), most, sum(sizes)), math.nan, dtype=dtype)
    for slot, of_parts in enumerate(ranks):
        start = 0
        for part, (rank, size) in enumerate(zip(of_parts, sizes, strict=True)):
            seed = 10 * slot + part
            a[slot, part, :rank] = normal(rank, columns, seed=seed, dtype=dtype) * columns**-0.5
            b[slot, :rank, start : start + size] = normal(rank, size, seed=seed + 5, dtype=dtype)
            start += size
    return LoraTable(sizes, a, b, torch.tensor(ranks), normal(len(ranks), len(sizes), seed=3))


def make_batch(slots: Sequence[int]) -> Batch:
    """One row for each slot."""
    chunks = [Chunk([0], 0, range(1, 2), 1, lora_slot=slot) for slot in slots]
    return build_batch(chunks, 16, 1, DEVICE, with_lora=True)


@settings(max_examples=examples(12))
@given(
    slots=st.lists(st.integers(-1, 2), max_size=40),
    sizes=st.sampled_from([(40,), (40, 8, 8), (130, 130)]),
    columns=st.sampled_from([16, 200, 1100, 9000]),
    ranks=st.lists(st.integers(0, 20), min_size=9, max_size=9),
)
def test_lora_matches_reference(
    slots: list[int], sizes: tuple[int, ...], columns: int, ranks: list[int]
) -> None:
    parts = len(sizes)
    ranks[0] = max(ranks[0], 1)
    table = make_table([ranks[parts * slot : parts * slot + parts] for slot in range(3)], sizes, columns)
    y, x = normal(len(slots), sum(sizes), seed=1), normal(len(slots), columns, seed=2)
    batch = make_batch(slots)
    expected = ReferenceOps().add_lora(y.clone(), x, table, batch)
    for ops in (TritonOps(), TritonFastMath()):
        torch.testing.assert_close(ops.add_lora(y.clone(), x, table, batch), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_rows_have_the_bits_of_rows_alone(dtype: torch.dtype) -> None:
    """Adapters of other ranks, and rows without one, which keep -0.0."""
    table = make_table([[16, 3], [8, 0], [1, 16]], (40, 24), 600, dtype)
    slots = [0, 1, NO_LORA, 2, 2, 0, 1, 2, 0, NO_LORA] * 4
    y, x = normal(len(slots), 64, seed=1, dtype=dtype), normal(len(slots), 600, seed=2, dtype=dtype)
    y[2], y[1, 40:] = -0.0, -0.0
    ops = TritonOps()
    with exact_dot():
        together = ops.add_lora(y.clone(), x, table, make_batch(slots))
        for row in (0, 1, 2, 3, 19, 38):
            alone = ops.add_lora(y[row : row + 1].clone(), x[row : row + 1], table, make_batch([slots[row]]))
            assert same_bits(alone[0], together[row])
        order = list(range(39, 4, -1))
        turned = ops.add_lora(y[order], x[order], table, make_batch([slots[row] for row in order]))
        assert same_bits(turned, together[order])
    assert together.isfinite().all()
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(together[2].view(bits), y[2].view(bits))
    assert torch.equal(together[1, 40:].view(bits), y[1, 40:].view(bits))


def test_result_is_in_place() -> None:
    """Nothing is allocated for it in a graph, and a strided y is copied."""
    table, y, x = make_table([[4]], (32,), 64), normal(2, 32, seed=1), normal(2, 64, seed=2)
    strided = normal(2, 64, seed=1)[:, ::2]
    result = TritonOps().add_lora(y, x, table, make_batch([0, 0]))
    assert result.data_ptr() == y.data_ptr()
    expected = ReferenceOps().add_lora(strided, x, table, make_batch([0, 0]))
    torch.testing.assert_close(TritonOps().add_lora(strided, x, table, make_batch([0, 0])), expected)


@pytest.mark.parametrize("capability", [80, 90])
def test_lora_compiles_without_spilling(capability: int) -> None:
    pointers = {"x": "*bf16", "a": "*bf16", "adapter_ranks": "*i64", "lora_slots": "*i64", "hidden": "*fp32"}
    integers = {"num_rows": "i32", "K": "i32", "split_columns": "i32"}
    shrunk = {**pointers, **integers}
    expanded = {
        "hidden": "*fp32", "b": "*bf16", "adapter_ranks": "*i64", "scales": "*fp32", "lora_slots": "*i64",
        "y": "*bf16", "num_rows": "i32", "N": "i32",
    }  # fmt: skip
    sources = []
    for rank in (16, 64):
        shared = {"MAX_RANK": rank, "PARTS": 3, "RANKS": rank, "ROWS": 16, "BLOCK": 128}
        for name, arguments, constants in (
            ("_shrink_kernel", shrunk, {"EVEN_K": True}),
            ("_expand_kernel", expanded, {"PART_SIZES": (4096, 1024, 1024), "SPLITS": 8, "RANK_BLOCK": 16}),
        ):
            kernel = f"foreword.kernels.triton.lora:{name}"
            divisible = [name for name in arguments if name != "num_rows"]
            sources.append(
                KernelSource(kernel, arguments, {**shared, **constants}, capability, 4, 3, False, divisible)
            )
    for made in compile_all(sources):
        assert made.stack == made.spills == 0 and made.registers <= 255
        assert made.count(r"cp\.async\.cg\.shared\.global.*, 0x10,|ld\.global\S*\.v4")
