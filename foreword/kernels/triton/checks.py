"""Checks that this GPU computes a row with the same bits in every batch; run once when a model is loaded.

They launch kernels that most models launch as well, so they add little to the compilation of a start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from foreword.core.batch import Chunk, KVLayer, build_batch
from foreword.kernels.ops import Ops
from foreword.kernels.triton import attention
from foreword.kernels.triton.gemm import device_tiles, pick_split_mode, pick_tile
from foreword.kernels.triton.gemm_pack import PackedWeight

ROW_COUNTS = (1, 16, 17, 32, 33, 64, 65, 128, 129, 257)  # on both sides of each threshold in gemm.py
LAYER_SHAPE = (6144, 1024)  # K has splits: each in its own program, or all in one for 257 rows
HEAD_SHAPE = (1024, 256)  # K is one split
BLOCK_SIZE = 16
DRAFT_ROWS = 6
BITS = {2: torch.int16, 4: torch.int32}  # by bytes of a value

Span = tuple[int, int]


def row_mismatches(
    ops: Ops,
    device: torch.device | str,
    dtype: torch.dtype,
    linear_format: str,
    head_format: str,
    shapes: Sequence[tuple[int, int]] = (LAYER_SHAPE, HEAD_SHAPE),
    row_counts: Sequence[int] = ROW_COUNTS,
) -> Iterator[str]:
    """Products whose rows have other bits in a batch than alone.

    shapes  [N, K] of the weight of layers, with a residual and with a gate, and of the head's
    """
    generator = torch.Generator().manual_seed(0)
    num_rows = max(row_counts)
    for (size, width), weight_format, is_head in zip(
        shapes, (linear_format, head_format), (False, True), strict=True
    ):
        matrix, x, residual = (
            torch.randn(shape, generator=generator).to(device, dtype)
            for shape in ((size, width), (num_rows, width), (num_rows, size))
        )
        weight = ops.pack_linear([matrix], weight_format)
        for name, run in _layers(ops, weight, x, residual, is_head):
            for count, difference in _differences(row_counts, run):
                tile = _describe_tile(weight, x.itemsize, count)
                yield (
                    f"a {name} in {weight_format} gives other bits for {count} rows than for one "
                    f"({tile}; {difference})"
                )


def attention_mismatches(
    ops: Ops,
    device: torch.device | str,
    dtype: torch.dtype,
    kv_heads: int = 8,
    group: int = 4,
    dim: int = 128,
    num_rows: int = 64,
) -> Iterator[str]:
    """Batches where a row's attention has other bits than in a prompt chunk of num_rows.

    Batches: single rows, drafts, chunks and many requests of each, for tiles of all widths, with one program
    per split, half as many, and one. The rows lie on both sides of the third split; requests share blocks.
    """
    start = 2 * attention.SPLIT - num_rows // 2
    blocks = range(1, -(-(start + num_rows) // BLOCK_SIZE) + 1)
    slots = (len(blocks) + 1) * BLOCK_SIZE
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in ((num_rows, kv_heads * group, dim), *[(slots, kv_heads, dim)] * 2)
    )
    cache = KVLayer(k, v)

    def run(spans: Sequence[Span]) -> Tensor:
        chunks = [Chunk([0] * (last - first), start + first, blocks, 1) for first, last in spans]
        batch = build_batch(chunks, BLOCK_SIZE, 1, str(device), with_request_index=True)
        return ops.attention(torch.cat([q[first:last] for first, last in spans]), cache, batch, dim**-0.5)

    whole = run([(0, num_rows)])
    for name, spans in _batches(num_rows, kv_heads):
        difference = _difference(run(spans), torch.cat([whole[first:last] for first, last in spans]))
        if difference:
            words = f"attention in {str(dtype).removeprefix('torch.')} gives other bits for {name}"
            yield f"{words} than for a prompt chunk ({difference})"


def _layers(
    ops: Ops, weight: PackedWeight, x: Tensor, residual: Tensor, is_head: bool
) -> Iterator[tuple[str, Callable[[slice], Tensor]]]:
    """(name, function from a slice of x to its output rows)"""
    if is_head:
        yield "head", lambda rows: ops.linear(x[rows], weight, torch.float32)
    else:
        yield "linear layer", lambda rows: ops.linear(x[rows], weight, None, residual[rows])
        yield "gated linear layer", lambda rows: ops.linear_gated_act(x[rows], weight, "silu")


def _differences(row_counts: Sequence[int], run: Callable[[slice], Tensor]) -> Iterator[tuple[int, str]]:
    """Row counts whose bits differ from those of their rows alone, and how.

    Rows alone are compared with both ends of the largest batch, and that batch with all others.
    """
    whole = run(slice(0, max(row_counts)))
    for row in (0, len(whole) - 1):
        difference = _difference(run(slice(row, row + 1)), whole[row : row + 1])
        if difference:
            yield len(whole), difference
    for count in row_counts:
        difference = _difference(run(slice(0, count)), whole[:count])
        if difference:
            yield count, difference


def _difference(values: Tensor, expected: Tensor) -> str:
    """The first different element and the number of them; "" if all bits are equal."""
    bits, expected_bits = (each.contiguous().view(BITS[each.element_size()]) for each in (values, expected))
    if torch.equal(bits, expected_bits):
        return ""
    differs = (bits != expected_bits).flatten()
    first = int(differs.nonzero()[0])
    index = [int(part) for part in torch.unravel_index(torch.tensor(first), values.shape)]
    pair = f"{float(values.flatten()[first])!r} and {float(expected.flatten()[first])!r}"
    return f"{int(differs.sum())} of {values.numel()} values, at {index} {pair}"


def _describe_tile(weight: PackedWeight, itemsize: int, num_rows: int) -> str:
    tile = pick_tile(weight.format, itemsize, num_rows, weight.splits, device_tiles(weight.data.device))
    num_tiles = -(-weight.rows // tile.bm) * -(-num_rows // tile.bn)
    mode = pick_split_mode(num_tiles, tile, weight.splits, num_rows)
    return f"tile {tile.bm} x {tile.bn}, {weight.splits} splits {mode}"


def _batches(num_rows: int, kv_heads: int) -> Iterator[tuple[str, list[Span]]]:
    """(name, rows of each request of a batch)"""
    alone, draft, chunk = (num_rows - 1, num_rows), (num_rows - DRAFT_ROWS, num_rows), (0, num_rows)
    enough = -(-attention.TARGET_NUM_PROGRAMS // kv_heads)
    for row in (0, num_rows // 2 - 1, num_rows // 2, num_rows - 1):
        yield "a row alone", [(row, row + 1)]
    yield "a draft", [draft]
    yield "requests of all kinds", [chunk, draft, alone]
    for count in (-(-enough // 2), enough):
        yield f"{count} rows of as many requests", [alone] * count
        yield f"drafts of {count} requests", [draft] * count
    yield f"chunks of {enough} requests", [chunk] * enough
