"""LoRA on the CPU: the reference's values, the same bits alone and in any batch, on every instruction set."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foreword.core.batch import Batch, Chunk, build_batch
from foreword.kernels.cpu.backend import CpuOps
from foreword.kernels.cpu.library import supported_isas
from foreword.kernels.ops import LoraTable
from foreword.kernels.reference.backend import ReferenceOps
from tests.support.budget import SHARE, is_full

DTYPES = (torch.float32, torch.bfloat16)
EXAMPLES = 200 if is_full() else 200 // SHARE


def make_table(seed: int, part_sizes: tuple[int, ...], in_features: int, slots: int, rank: int) -> LoraTable:
    """Adapters of random ranks; the rows beyond them are NaN, as memory may be."""
    rng = torch.Generator().manual_seed(seed)
    ranks = torch.randint(0, rank + 1, (slots, len(part_sizes)), generator=rng)
    a = torch.randn(slots, len(part_sizes), rank, in_features, generator=rng) * in_features**-0.5
    b = torch.randn(slots, rank, sum(part_sizes), generator=rng)
    first = 0
    for part, size in enumerate(part_sizes):
        for slot in range(slots):
            used = int(ranks[slot, part])
            a[slot, part, used:] = math.nan
            b[slot, used:, first : first + size] = math.nan
        first += size
    return LoraTable(part_sizes, a, b, ranks, torch.rand(slots, len(part_sizes), generator=rng) * 2)


def cast(table: LoraTable, dtype: torch.dtype) -> LoraTable:
    return replace(table, a=table.a.to(dtype), b=table.b.to(dtype))


def batch_of(slots: list[int]) -> Batch:
    return build_batch([Chunk([0], 0, [1], 1, lora_slot=slot) for slot in slots], 1, 1, "cpu", with_lora=True)


def add_lora(ops: CpuOps | ReferenceOps, y: Tensor, x: Tensor, table: LoraTable, slots: list[int]) -> Tensor:
    return ops.add_lora(y.clone(), x, table, batch_of(slots))


@settings(max_examples=EXAMPLES)
@given(
    seed=st.integers(0, 2**31),
    part_sizes=st.lists(st.integers(1, 700), min_size=1, max_size=3).map(tuple),
    in_features=st.integers(1, 300),
    rank=st.integers(1, 19),
    slots=st.lists(st.integers(-1, 3), min_size=1, max_size=90),
    dtype=st.sampled_from(DTYPES),
)
def test_rows_alone_and_together_on_every_instruction_set(
    seed: int, part_sizes: tuple[int, ...], in_features: int, rank: int, slots: list[int], dtype: torch.dtype
) -> None:
    table = cast(make_table(seed, part_sizes, in_features, 4, rank), dtype)
    rng = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(len(slots), in_features, generator=rng).to(dtype)
    y = torch.randn(len(slots), sum(part_sizes), generator=rng).to(dtype)
    expected = add_lora(ReferenceOps(), y, x, table, slots)
    together = [
        add_lora(CpuOps(isa, threads), y, x, table, slots) for isa in supported_isas() for threads in (1, 2)
    ]
    for other in together:
        assert torch.equal(other, together[0]), "instruction sets and threads"
    ops = CpuOps()
    alone = torch.cat(
        [add_lora(ops, y[i : i + 1], x[i : i + 1], table, [slot]) for i, slot in enumerate(slots)]
    )
    assert torch.equal(alone, together[0])
    error = (together[0].double() - expected.double()).abs()
    assert (error <= 2e-5 + expected.double().abs() * (2**-7 if dtype == torch.bfloat16 else 1e-5)).all()


@pytest.mark.parametrize("ops", [ReferenceOps(), CpuOps()], ids=["reference", "cpu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_adds_the_scaled_product(ops: CpuOps | ReferenceOps, dtype: torch.dtype) -> None:
    """Against float64, within a unit of the largest terms."""
    table = cast(make_table(3, (96, 32), 256, 3, 8), dtype)
    slots = [2, 0, 1, 1, -1, 0, 2, 2] * 2
    rng = torch.Generator().manual_seed(4)
    x, y = torch.randn(16, 256, generator=rng).to(dtype), torch.randn(16, 128, generator=rng).to(dtype)
    actual = add_lora(ops, y, x, table, slots)
    for row, slot in enumerate(slots):
        for part, columns in enumerate((slice(0, 96), slice(96, 128))):
            rank = int(table.ranks[slot, part]) if slot >= 0 else 0
            a, b = table.a[slot, part, :rank], table.b[slot, :rank, columns]
            scale = table.scales[slot, part].double()
            exact = y[row, columns].double() + scale * (x[row].double() @ a.double().t() @ b.double())
            terms = scale * (x[row].double().abs() @ a.double().abs().t() @ b.double().abs())
            limit = torch.finfo(dtype).eps * (exact.abs() + y[row, columns].double().abs() + terms)
            assert ((actual[row, columns].double() - exact).abs() <= limit).all(), (row, part)


@pytest.mark.parametrize("ops", [ReferenceOps(), CpuOps()], ids=["reference", "cpu"])
def test_rows_without_an_adapter_keep_their_bits(ops: CpuOps | ReferenceOps) -> None:
    table = make_table(5, (40, 24), 64, 2, 4)
    table.ranks[1] = torch.tensor([0, 3])
    table.a[1, 1, :3], table.b[1, :3, 40:] = 1.0, 1.0
    y = torch.full((4, 64), -0.0)
    y[2, 5] = math.nan
    x = torch.full((4, 64), math.inf)
    x[3] = 1.0
    out = add_lora(ops, y, x, table, [-1, -1, -1, 1])
    assert torch.equal(out[:3].view(torch.int32), y[:3].view(torch.int32)), "no adapter"
    assert torch.equal(out[3, :40].view(torch.int32), y[3, :40].view(torch.int32)), "a part of rank 0"
    assert (out[3, 40:] != 0).all()


def test_filling_a_table_changes_a_compiled_pass() -> None:
    """A program holds the tables' addresses: adapters change under it."""
    ops, table = CpuOps(threads=1), make_table(6, (32,), 32, 2, 4)
    weight = ops.pack_linear([torch.eye(32)], "float32")
    table.ranks.zero_()

    def forward(batch: Batch) -> Tensor:
        x = ops.embedding(batch.token_ids, weight, torch.float32)
        return ops.index_rows(ops.add_lora(ops.linear(x, weight), x, table, batch), batch.sample_rows)

    compiled, batch = ops.compile(forward), batch_of([1, 0, -1, 1, 1])
    plain = compiled(batch).clone()
    assert torch.equal(plain, torch.eye(32)[:1].expand(5, -1))
    table.a[1, 0], table.b[1] = 1.0, 2.0
    table.ranks[1], table.scales[1] = 2, 0.5
    changed = compiled(batch)
    assert torch.equal(changed, forward(batch))
    assert [bool((changed[row] == plain[row]).all()) for row in range(5)] == [False, True, True, False, False]
    with pytest.raises(AssertionError, match="without adapters' slots"):
        compiled(replace(batch, lora_slots=None))
