"""LoRA adapters on Triton: two small products for tiles of rows, whose rows may have different adapters.

A program goes through the adapters of its 16 rows, lowest slot first, and keeps of each product the rows that
have the adapter. In prompts neighbours share it; when decoding, adapters are small enough for the L2 cache.
The columns of a product are independent, so a row's bits depend on the row and its adapter alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.core.batch import Batch
from foreword.kernels.ops import LoraTable

TILE_ROWS = 16
SHRINK_BLOCK = 128  # columns of x in one step of _shrink_kernel()
MIN_SPLIT_COLUMNS = 512  # columns of x: each split has its own program
MAX_SPLITS = 16
EXPAND_BLOCK = 128  # columns of y of one program
RANK_BLOCK = 16  # ranks in one step of _expand_kernel()
NO_SLOT = tl.constexpr(1 << 30)


def add_lora(y: Tensor, x: Tensor, table: LoraTable, batch: Batch) -> Tensor:
    """Ops.add_lora, in place unless y is strided."""
    assert batch.lora_slots is not None, "a batch without adapters' slots"
    x, y = x.contiguous(), y.contiguous()
    (num_rows, columns), (_, parts, max_rank, _) = x.shape, table.a.shape
    if not num_rows:
        return y
    split_columns = max(MIN_SPLIT_COLUMNS, -(-columns // MAX_SPLITS // SHRINK_BLOCK) * SHRINK_BLOCK)
    splits, tiles = -(-columns // split_columns), -(-num_rows // TILE_ROWS)
    ranks = max(triton.next_power_of_2(max_rank), RANK_BLOCK)
    hidden = torch.empty(splits, num_rows, parts, ranks, dtype=torch.float32, device=x.device)
    shared = {"MAX_RANK": max_rank, "PARTS": parts, "RANKS": ranks, "ROWS": TILE_ROWS}
    _shrink_kernel[(tiles, parts, splits)](
        *(x, table.a, table.ranks, batch.lora_slots, hidden, num_rows, columns, split_columns),
        **shared,
        EVEN_K=columns % SHRINK_BLOCK == 0,
        BLOCK=SHRINK_BLOCK,
        enable_fp_fusion=False,
    )
    _expand_kernel[(tiles, parts, -(-max(table.part_sizes) // EXPAND_BLOCK))](
        *(hidden, table.b, table.ranks, table.scales, batch.lora_slots, y, num_rows, y.shape[1]),
        **shared,
        PART_SIZES=table.part_sizes,
        SPLITS=splits,
        BLOCK=EXPAND_BLOCK,
        RANK_BLOCK=RANK_BLOCK,
        enable_fp_fusion=False,
    )
    return y


@triton.jit
def _next_slot(slots, slot):
    """The lowest slot of the rows above `slot`, or NO_SLOT."""
    return tl.min(tl.where(slots > slot, slots, NO_SLOT), 0)


@triton.jit(do_not_specialize=["num_rows"])
def _shrink_kernel(
    x, a, adapter_ranks, lora_slots, hidden, num_rows, K, split_columns,
    MAX_RANK: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """hidden[split, row, part] = x[row] A^T over the split's columns; grid (row tiles, PARTS, splits)."""
    part, split = tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rank, k = tl.arange(0, RANKS), tl.arange(0, BLOCK)
    slots = tl.load(lora_slots + row, mask=row < num_rows, other=-1).to(tl.int32)
    x += row.to(tl.int64)[None, :] * K + k[:, None]
    a += (part * MAX_RANK + rank)[:, None].to(tl.int64) * K + k[None, :]
    place = (split * num_rows + row).to(tl.int64) * PARTS + part
    first, last = split * split_columns, tl.minimum((split + 1) * split_columns, K)
    slot = _next_slot(slots, -1)
    while slot < NO_SLOT:
        num_ranks = tl.load(adapter_ranks + slot * PARTS + part).to(tl.int32)
        if num_ranks > 0:
            mine = slots == slot
            matrix = a + slot.to(tl.int64) * (PARTS * MAX_RANK) * K
            total = tl.zeros([RANKS, ROWS], tl.float32)
            used = (rank < num_ranks)[:, None]
            for start in range(first, last, BLOCK):
                left_mask, right_mask = used, mine[None, :]
                if not EVEN_K:
                    left_mask = left_mask & (start + k < K)[None, :]
                    right_mask = right_mask & (start + k < K)[:, None]
                left = tl.load(matrix + start, mask=left_mask, other=0.0)
                right = tl.load(x + start, mask=right_mask, other=0.0)
                total = tl.dot(left, right, total, input_precision="ieee")
            tl.store(hidden + place[None, :] * RANKS + rank[:, None], total, mask=mine[None, :])
        slot = _next_slot(slots, slot)


@triton.jit(do_not_specialize=["num_rows"])
def _expand_kernel(
    hidden, b, adapter_ranks, scales, lora_slots, y, num_rows, N,
    MAX_RANK: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr,
    PART_SIZES: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, RANK_BLOCK: tl.constexpr,
):  # fmt: skip
    """y[row] += scale * hidden[row] B^T, splits added in order; grid (row tiles, PARTS, column blocks)."""
    part = tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    start, size = 0, 0
    for p in tl.static_range(PARTS):
        start += tl.where(p < part, PART_SIZES[p], 0)
        size += tl.where(p == part, PART_SIZES[p], 0)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slots = tl.load(lora_slots + row, mask=row < num_rows, other=-1).to(tl.int32)
    inside = column < size
    y += row.to(tl.int64)[:, None] * N + (start + column)[None, :]
    slot = _next_slot(slots, -1)
    while slot < NO_SLOT:
        num_ranks = tl.load(adapter_ranks + slot * PARTS + part).to(tl.int32)
        if num_ranks > 0:
            mine = (slots == slot)[:, None]
            scale = tl.load(scales + slot * PARTS + part)
            delta = tl.zeros([ROWS, BLOCK], tl.float32)
            for first in range(0, num_ranks, RANK_BLOCK):
                rank = first + tl.arange(0, RANK_BLOCK)
                used = rank < num_ranks
                left = tl.zeros([ROWS, RANK_BLOCK], tl.float32)
                for split in tl.static_range(SPLITS):
                    place = ((split * num_rows + row).to(tl.int64) * PARTS + part)[:, None] * RANKS
                    left += tl.load(hidden + place + rank[None, :], mask=mine & used[None, :], other=0.0)
                place = b + (slot.to(tl.int64) * MAX_RANK + rank)[:, None] * N + (start + column)[None, :]
                right = tl.load(place, mask=used[:, None] & inside[None, :], other=0.0)
                delta = tl.dot(left * scale, right.to(tl.float32), delta, input_precision="ieee")
            chosen = mine & inside[None, :]
            total = tl.load(y, mask=chosen, other=0.0).to(tl.float32) + delta
            tl.store(y, total.to(y.dtype.element_ty), mask=chosen)
        slot = _next_slot(slots, slot)
